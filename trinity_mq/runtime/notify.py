"""Waiting for a change without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Notifier:
    """Wakes all waiters at each change."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}
        """A dict, which keeps the order of arrival: the order of a set would differ from run to run."""

    def notify(self) -> None:
        """Wake the waiters."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, timeout: float | None = None) -> bool:
        """Return True at the next :meth:`notify`, False after ``timeout`` seconds."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            if timeout is None:
                await waiter
            else:
                async with asyncio.timeout(timeout):
                    await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)
        return True

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Return once ``predicate`` is true; it is evaluated now and after each :meth:`notify`."""
        while not predicate():
            await self.wait()

    async def unless(self, predicate: Callable[[], bool], work: Awaitable[None]) -> bool:
        """Await ``work``, but cancel it once ``predicate`` is true; return whether it ended by itself."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self.until(predicate))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
                return True
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
