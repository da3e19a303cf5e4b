"""Verdicts that do not flicker: a new verdict is shown after most readings have agreed on it for some time.
Pure logic.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trinity_mq.observability.diagnosis.records import Bottleneck, RunFinding

T = TypeVar("T")

LIMIT_SECONDS = 30.0
"""Seconds over which a stage must be the limit in most readings before it is named."""
FINDING_SECONDS = 5.0
"""Seconds over which most readings must agree on state and culprit before another finding is shown."""
MOSTLY = 2 / 3
"""Share of the readings within these seconds that must agree on a new verdict before it is shown."""


class FlickerFilter(Generic[T]):
    """Selects the verdict to show, and delays changes. Time is an argument, in seconds of any clock.

    Args:
        shown: The initial verdict.
        key: Returns the part of a verdict that must not flicker. A reading with the key of the shown verdict replaces
            it at once.
        seconds: Time over which most readings must agree on another key before a verdict with it is shown.
        at_once: Returns whether a new verdict (second argument) replaces the shown one (first argument) without delay.
    """

    def __init__(self, shown: T, key: Callable[[T], Hashable], seconds: float, at_once: Callable[[T, T], bool]) -> None:
        self.shown = shown
        self._key, self._seconds, self._at_once = key, seconds, at_once
        self._readings: collections.deque[tuple[float, Hashable]] = collections.deque()
        self._began: float | None = None
        """Time of the first reading."""

    def read(self, verdict: T, now: float) -> T:
        """Record the verdict at ``now``, and return the verdict to show."""
        key = self._key(verdict)
        self._began = now if self._began is None else self._began
        self._readings.append((now, key))
        while self._readings[0][0] < now - self._seconds:
            self._readings.popleft()
        count = sum(reading == key for _, reading in self._readings)
        has_lasted = now - self._began >= self._seconds and count >= MOSTLY * len(self._readings)
        if has_lasted or key == self._key(self.shown) or self._at_once(self.shown, verdict):
            self.shown = verdict
        return self.shown


def bottleneck_filter() -> FlickerFilter[Bottleneck | None]:
    """Return the filter for the limiting stage of a run; initially None."""
    return FlickerFilter[Bottleneck | None](
        None, lambda limit: limit and limit.stage, LIMIT_SECONDS, lambda _shown, _read: False
    )


def finding_filter() -> FlickerFilter[RunFinding | None]:
    """Return the filter for the finding. The first finding and the end of the run are shown at once."""

    def at_once(shown: RunFinding | None, read: RunFinding | None) -> bool:
        return shown is None or (read is not None and read.state == "over")

    return FlickerFilter[RunFinding | None](
        None, lambda finding: finding and (finding.state, finding.culprit), FINDING_SECONDS, at_once
    )
