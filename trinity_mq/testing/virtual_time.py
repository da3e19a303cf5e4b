"""An event loop whose clock jumps to the next timer, so that an hour of waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")
_wrap_future = asyncio.wrap_future


class StandsStill(Exception):
    """Every task waits and no timer is set: a deadlock."""


class _JumpingSelector(selectors.SelectSelector):
    """Moves the clock on where a real loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise StandsStill("every task waits and no timer is set")
        self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time. Executor jobs run at once, on the loop's own thread: a thread would need real time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop began."""
        return self._jumping.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # one narrowing: results are always asyncio futures
        """Run ``func`` now and return its finished future."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, T], *, limit: float = 1e6) -> T:
    """Run ``main`` in virtual time.

    Raises:
        TimeoutError: It was not done after ``limit`` virtual seconds.
        StandsStill: It deadlocked.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit):
            return await main

    with (
        mock.patch.object(asyncio, "wrap_future", _wrap_finished),
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        return runner.run(limited())


def _wrap_finished(future: Future[T], *, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Future[T]:
    """Wrap a pool's future once it is done: while a thread works the virtual clock would run away."""
    wait([future])
    return _wrap_future(future, loop=loop)
