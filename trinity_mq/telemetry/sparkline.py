"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float | None], width: int = 40, *, low: float | None = None, high: float | None = None
) -> str:
    """Return at most ``width`` bars for ``values`` in order; longer series are averaged into ``width`` parts.

    Args:
        values: None and what is not finite leave a gap where a part holds nothing else.
        width: Characters at most.
        low: Value of the lowest bar; None: the least of the parts.
        high: Value of the highest bar; None: the greatest of the parts.
    """
    if width < 1:
        raise ValueError(f"width is {width}, wanted at least 1")
    count = min(width, len(values))
    parts = [_mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    known = [part for part in parts if part is not None]
    if not known:
        return " " * count
    low = min(known) if low is None else low
    high = max(known) if high is None else high
    return "".join(" " if part is None else _bar(part, low, high) for part in parts)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    # the sum of great numbers is infinite, their mean is not
    return min(max(known), max(min(known), sum(value / len(known) for value in known)))


def _bar(value: float, low: float, high: float) -> str:
    span = high / 2 - low / 2  # halves: the difference of great numbers is infinite
    share = (value / 2 - low / 2) / span if span > 0.0 else 0.0
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]
