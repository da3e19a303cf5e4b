"""Deadlines that stand still while the broker is away or blocked: what cannot move is not late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trinity_mq.bus import Bus


class UsableClock:
    """Counts the time in which the bus is usable."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._left: dict[asyncio.Timeout, float | None] = {}
        """Seconds left of deadlines that stand still; None for those that run."""
        bus.on_change(self._changed)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after ``seconds`` of this clock, as :func:`asyncio.timeout` does."""
        async with asyncio.timeout(seconds) as deadline:
            self._left[deadline] = None
            self._changed()
            try:
                yield
            finally:
                del self._left[deadline]

    def _changed(self) -> None:
        usable = self._bus.usable
        for deadline, left in self._left.items():
            if deadline.expired():
                continue
            now, when = asyncio.get_running_loop().time(), deadline.when()
            if usable and left is not None:
                self._left[deadline] = None
                deadline.reschedule(now + left)
            elif not usable and when is not None:
                self._left[deadline] = max(0.0, when - now)
                deadline.reschedule(None)
