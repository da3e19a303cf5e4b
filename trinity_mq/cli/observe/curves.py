"""The metrics of a run as curves, bounded in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trinity_mq.cli.reports.curves import PICTURES, drawn
from trinity_mq.messages import Metrics

MOST_POINTS = 4000
"""Points kept of a curve; every second one is removed where there are more."""


class Curves:
    """Values of every metric by step; a later value for the same step replaces the earlier one."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self.changes = 0
        """Rises with each value."""

    def add(self, message: Metrics) -> None:
        """Take in the values of one step of one agent."""
        for name, value in message.values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            points = self._points.setdefault(name, {})
            points.pop(message.step, None)
            points[message.step] = float(value)
            if len(points) > MOST_POINTS:
                self._points[name] = dict(list(points.items())[::2])
            self.changes += 1

    def add_all(self, messages: Iterable[Metrics]) -> None:
        """Take in the values of several steps."""
        for message in messages:
            self.add(message)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return sorted(self._points)

    def points(self) -> Mapping[str, list[tuple[int, float]]]:
        """Return the points of every curve, by step."""
        return {name: sorted(points.items()) for name, points in self._points.items()}

    def pictures(self) -> list[dict[str, Any]]:
        """Return what the page draws: title, remark and curves of each picture of which something is known."""
        points = self.points()
        found = []
        for picture in PICTURES:
            if chosen := drawn(points, picture):
                found.append({"title": picture.title, "about": picture.about, "curves": chosen})
        return found

    def named(self, name: str) -> list[tuple[int, float]]:
        """Return one curve by the metric's name; empty where it is not known."""
        return sorted(self._points.get(name, {}).items())
