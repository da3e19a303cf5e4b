"""Says whether a series of measurements grows, apart from its noise. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_POINTS = 400
"""Points from which a slope is taken; a longer series is reduced to the medians of as many parts."""
LEAST_POINTS = 8
LEVEL = 0.01
"""Share of the level that growth over a whole series may have in any case."""


@dataclass(frozen=True)
class Trend:
    """The course of a series."""

    level: float
    """Median, in the series' unit."""
    growth: float
    """Slope times the time of the series, in its unit: Theil and Sen's slope, the median of those between all pairs of
    points, which outliers do not move."""
    noise: float
    """Spread around that line: two standard deviations, estimated by the median of the absolute residuals."""
    seconds: float
    """Time of the series."""

    @property
    def an_hour(self) -> float:
        """Growth in an hour, in the series' unit."""
        return self.growth / self.seconds * 3600.0

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than its noise, or than a hundredth of its level."""
        return self.growth <= max(self.noise, LEVEL * abs(self.level))


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return the course of ``(seconds, value)`` in the order of time, None where these are too few to tell.

    >>> found = trend([(float(n), 5.0 + n) for n in range(20)])
    >>> (found.growth, found.noise, found.is_flat)
    (19.0, 0.0, False)
    """
    if len(points) < LEAST_POINTS:
        return None
    parts = np.array_split(np.asarray(points, dtype=float), min(len(points), MOST_POINTS))
    times = np.array([part[:, 0].mean() for part in parts])
    values = np.array([np.median(part[:, 1]) for part in parts])
    first, second = np.triu_indices(len(times), 1)
    slope = float(np.median((values[second] - values[first]) / (times[second] - times[first])))
    residuals = values - slope * times
    spread = float(np.median(np.abs(residuals - np.median(residuals))))
    seconds = float(points[-1][0] - points[0][0])
    return Trend(float(np.median(values)), slope * seconds, 2 * 1.4826 * spread, seconds)
