"""A curve as a single line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return at most ``width`` bars for the finite values in order, scaled from their minimum to their maximum. A
    longer series is averaged into ``width`` parts.
    """
    finite = [value for value in values if math.isfinite(value)]
    largest = max(map(abs, finite), default=0.0) or 1.0
    scaled = [value / largest for value in finite]  # avoids overflow of sums and differences
    count = min(width, len(scaled))
    edges = [part * len(scaled) // count for part in range(count + 1)] if count else []
    means = [math.fsum(scaled[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low = min(means, default=0.0)
    span = max(means, default=0.0) - low or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)
