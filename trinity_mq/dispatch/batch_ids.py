"""The order of batch ids."""

from __future__ import annotations

import math
import re


def sort_batch_id(batch_id: int | str) -> tuple[float, int]:
    """Return the sort key of a batch id: training batches by number, each before the evaluations that carry its number.

    >>> sorted(["3/b", 3, "4/a", 2, "x"], key=sort_batch_id)
    [2, 3, '3/b', '4/a', 'x']
    """
    if isinstance(batch_id, int):
        return (batch_id, 0)
    digits = re.match(r"\d+", batch_id)
    return (int(digits.group()), 1) if digits else (math.inf, 1)
