"""An event loop whose clock jumps to the next timer, so that an hour of waiting takes no real time."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import weakref
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")
_wrap_future = asyncio.wrap_future

OWNER: contextvars.ContextVar[str | None] = contextvars.ContextVar("owner", default=None)
"""Name of the simulated process whose code runs. Its tasks and timers inherit it, so that the process can be frozen."""


class DeadlockError(Exception):
    """Every task waits and no timer is set: a deadlock."""


class _JumpingSelector(selectors.SelectSelector):
    """Advances the clock instead of sleeping as a real loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise DeadlockError("every task waits and no timer is set")
        self.now += timeout
        return ready


class _Ready(deque[asyncio.Handle]):
    """Callbacks that are due. Callbacks of frozen processes wait in a separate list."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen: dict[str | None, list[asyncio.Handle]] = {}

    def append(self, handle: asyncio.Handle) -> None:
        waiting = self.frozen.get(self._owner(handle)) if self.frozen else None
        if waiting is None:
            super().append(handle)
        else:
            waiting.append(handle)

    @staticmethod
    def _owner(handle: asyncio.Handle) -> str | None:
        context: contextvars.Context = handle._context  # type: ignore[attr-defined]  # noqa: SLF001  # no other way
        return context.get(OWNER)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time. Executor jobs run at once on the loop's own thread, because another thread needs real
    time.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._ready = _Ready()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], str | None] = weakref.WeakKeyDictionary()

    def create_task(self, coro: Coroutine[Any, Any, T], **how: Any) -> asyncio.Task[T]:  # type: ignore[override]  # the arguments are passed on
        """Start a task and record its owner."""
        task: asyncio.Task[T] = super().create_task(coro, **how)
        context = how.get("context")
        self._owners[task] = OWNER.get() if context is None else context.get(OWNER)
        return task

    def tasks_of(self, owners: Collection[str]) -> set[asyncio.Task[Any]]:
        """Return the tasks of these owners that are not done."""
        return {task for task in asyncio.all_tasks(self) if self._owners.get(task) in owners}

    def freeze(self, owner: str) -> None:
        """Stop all code in contexts of this :data:`OWNER`, as SIGSTOP does. The clock still advances for it."""
        self._ready.frozen.setdefault(owner, [])

    def thaw(self, owner: str) -> None:
        """Resume this owner, and run all its callbacks that became due while it was frozen."""
        self._ready.extend(self._ready.frozen.pop(owner, []))

    def is_frozen(self, owner: str) -> bool:
        """Return whether this owner is frozen."""
        return owner in self._ready.frozen

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
        TimeoutError: ``main`` was not done after ``limit`` virtual seconds.
        DeadlockError: ``main`` deadlocked.
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
    """Wrap a pool's future once it is done: otherwise the virtual clock would advance while a thread works."""
    wait([future])
    return _wrap_future(future, loop=loop)
