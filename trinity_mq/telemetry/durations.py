"""Durations of an agent's work for its heartbeats: of what is under way, and the usual one of what was done."""

from __future__ import annotations

import asyncio
import collections
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

REMEMBERED_DURATIONS = 50
"""The last durations that the usual one is the median of."""


class UsualDuration:
    """The median of the last durations of one kind of work."""

    def __init__(self) -> None:
        self._last: collections.deque[float] = collections.deque(maxlen=REMEMBERED_DURATIONS)

    def add(self, seconds: float) -> None:
        """Take in the duration of work that is done."""
        self._last.append(seconds)

    @property
    def seconds(self) -> float:
        """The median in seconds; 0 where nothing is done yet."""
        return round(statistics.median(self._last), 3) if self._last else 0.0


class WorkUnderWay:
    """The work that an agent does one after another, by kinds such as train steps, weight syncs and saves."""

    def __init__(self) -> None:
        self.what = ""
        """The work under way, in words; empty: none is."""
        self._kind, self._since = "", 0.0
        self._usual: dict[str, UsualDuration] = {}

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[None]:
        """Report ``what`` as under way during the ``with`` block; its duration counts among those of ``kind``, unless
        it ends with an exception.
        """
        before = self.what, self._kind, self._since
        self.what, self._kind, self._since = what, kind, asyncio.get_running_loop().time()
        try:
            yield
            self._usual.setdefault(kind, UsualDuration()).add(asyncio.get_running_loop().time() - self._since)
        finally:
            self.what, self._kind, self._since = before

    @property
    def seconds(self) -> float:
        """Seconds since the work under way began; 0 where none is."""
        return round(asyncio.get_running_loop().time() - self._since, 1) if self.what else 0.0

    @property
    def usual_seconds(self) -> float:
        """Median duration in seconds of work of its kind; 0 where none was done, or none is under way."""
        usual = self._usual.get(self._kind)
        return usual.seconds if usual is not None and self.what else 0.0
