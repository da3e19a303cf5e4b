"""Waiting for a change without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Notifier:
    """Wakes everybody who waits, each time something changed."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake the waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, timeout: float | None = None) -> bool:
        """Return True at the next :meth:`notify`, False after ``timeout`` seconds."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return once ``predicate`` holds; it is asked now and after each :meth:`notify`."""
        while not predicate():
            await self.wait()
