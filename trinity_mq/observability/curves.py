"""The metrics of a run as curves, bounded in memory."""

from __future__ import annotations

import math
from typing import Any

from trinity_mq.messages import Metrics
from trinity_mq.observability.report.curves import drawn_pictures

MOST_POINTS = 4000


class Curves:
    """Values of every metric by step. A later value for the same step replaces the earlier value.

    Args:
        max_points: Maximum number of points kept per curve. Every second point is removed from a longer curve.
    """

    def __init__(self, max_points: int = MOST_POINTS) -> None:
        self._max_points = max_points
        self._points: dict[str, dict[int, float]] = {}
        self.changes = 0
        """Number of values added so far. It changes whenever a curve changes."""

    def add(self, message: Metrics) -> None:
        """Add the finite values of one step of one agent. Other values are skipped."""
        for name, value in message.values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            points = self._points.setdefault(name, {})
            points.pop(message.step, None)
            points[message.step] = float(value)
            if len(points) > self._max_points:
                self._points[name] = dict(list(points.items())[::2])
            self.changes += 1

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return sorted(self._points)

    def pictures(self) -> list[dict[str, Any]]:
        """Return title, description and curves of each picture that has data."""
        curves = {name: self.named(name) for name in self._points}
        return [
            {"title": picture.title, "about": picture.about, "curves": chosen}
            for picture, chosen in drawn_pictures(curves)
        ]

    def named(self, name: str) -> list[tuple[int, float]]:
        """Return the curve of the named metric, or an empty list for an unknown metric."""
        return sorted(self._points.get(name, {}).items())
