"""Verdicts that do not flicker: another one is shown once it has mostly been read for some time. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from trinity_mq.diagnosis.records import Bottleneck, Finding

T = TypeVar("T")

LIMIT_SECONDS = 30.0
"""Seconds over which a stage must mostly be the limit before it is named."""
FINDING_SECONDS = 5.0
"""Seconds over which a run must mostly wait for somebody else, or move again, before it is said."""
MOSTLY = 2 / 3
"""Share of the readings of that time. A reading that comes up less often than that does not change what is shown."""


class Steady(Generic[T]):
    """The verdict to show. Time is an argument, in seconds of any clock.

    Args:
        shown: The verdict at the beginning.
        key: Returns the part of a verdict that must not flicker; the words are always those of the last such reading.
        seconds: Time over which another verdict must mostly be read before it is shown.
        at_once: Returns whether a verdict, the second argument, takes the place of the one shown without that.
    """

    def __init__(self, shown: T, key: Callable[[T], Hashable], seconds: float, at_once: Callable[[T, T], bool]) -> None:
        self.shown = shown
        self._key, self._seconds, self._at_once = key, seconds, at_once
        self._readings: collections.deque[tuple[float, Hashable]] = collections.deque()
        self._began: float | None = None
        """Time of the first reading."""

    def read(self, verdict: T, now: float) -> T:
        """Take in the verdict at ``now``, and return the one to show."""
        key = self._key(verdict)
        self._began = now if self._began is None else self._began
        self._readings.append((now, key))
        while self._readings[0][0] < now - self._seconds:
            self._readings.popleft()
        count = sum(one == key for _, one in self._readings)
        has_lasted = now - self._began >= self._seconds and count >= MOSTLY * len(self._readings)
        if has_lasted or key == self._key(self.shown) or self._at_once(self.shown, verdict):
            self.shown = verdict
        return self.shown


def steady_limit() -> Steady[Bottleneck | None]:
    """Return the stage to show as the limit of a run; none at first."""
    return Steady[Bottleneck | None](None, lambda one: one and one.stage, LIMIT_SECONDS, lambda _shown, _read: False)


def steady_finding() -> Steady[Finding | None]:
    """Return the finding to show; the first one, and the end of the run, at once."""

    def at_once(shown: Finding | None, read: Finding | None) -> bool:
        return shown is None or (read is not None and read.state == "over")

    return Steady[Finding | None](None, lambda one: one and (one.state, one.culprit), FINDING_SECONDS, at_once)
