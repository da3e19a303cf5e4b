"""Durations of an agent's work, for its heartbeats: the duration of current work, and the usual duration of finished
work.
"""

from __future__ import annotations

import asyncio
import collections
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

REMEMBERED_DURATIONS = 50
"""Number of latest durations whose median is the usual duration."""


class UsualDuration:
    """Median of the latest durations of a kind of work."""

    def __init__(self) -> None:
        self._last: collections.deque[float] = collections.deque(maxlen=REMEMBERED_DURATIONS)

    def add(self, seconds: float) -> None:
        """Add the duration of finished work."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """Median in seconds. Zero if no work has finished yet."""
        return round(statistics.median(self._last), 3) if self._last else 0.0


class WorkUnderWay:
    """Current work of an agent that does a single thing at a time. Kinds of work are, for example, train steps, weight
    syncs and saves.
    """

    def __init__(self) -> None:
        self.what = ""
        """Description of the current work. Empty if the agent is idle."""
        self._kind, self._since = "", 0.0
        self._usual: dict[str, UsualDuration] = {}

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[None]:
        """Report ``what`` as current work during the ``with`` block. The block's duration is added to the durations of
        ``kind``, unless the block ends with an exception.
        """
        outer_work = self.what, self._kind, self._since
        self.what, self._kind, self._since = what, kind, asyncio.get_running_loop().time()
        try:
            yield
            self._usual.setdefault(kind, UsualDuration()).add(asyncio.get_running_loop().time() - self._since)
        finally:
            self.what, self._kind, self._since = outer_work

    @property
    def seconds(self) -> float:
        """Seconds since the current work began. Zero if the agent is idle."""
        return round(asyncio.get_running_loop().time() - self._since, 1) if self.what else 0.0

    @property
    def usual_seconds(self) -> float:
        """Median duration in seconds of earlier work of the same kind. Zero if the agent is idle or no such work has
        finished.
        """
        usual = self._usual.get(self._kind)
        return usual.seconds if usual is not None and self.what else 0.0
