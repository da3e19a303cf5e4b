"""Blocking code beside an event loop, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_abandoned: dict[threading.Thread, float] = {}
"""Threads that run on although nobody waits for them, and the loop time since when."""


class AbandonedError(BaseException):
    """Raised inside of a thread for whose result nobody waits any more. Not an Exception: it is not to be handled."""


async def in_thread(function: Callable[[], T], name: str, stop: Callable[[int], None] | None = None) -> T:
    """Return what ``function`` returns, run in a daemon thread of its own.

    Unlike with ``asyncio.to_thread``, one that never returns takes no thread from a pool that others need, and does not
    keep the process from ending. When the caller is cancelled, the thread is asked to end, if there is a way; its
    result is dropped, and until it ends :func:`stuck_threads` counts it.

    Args:
        function: What blocks.
        name: Of the thread.
        stop: Called with the thread's number when the caller is cancelled while ``function`` runs, such as
            :func:`interrupt`.
    """
    call = _Call(function, name)
    call.thread.start()
    try:
        return await call.future
    except asyncio.CancelledError:
        call.abandon(stop)
        raise


def stuck_threads(since: float) -> int:
    """Return how many threads were given up at loop time ``since`` or before and still run."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.pop(thread, None)
    return sum(given_up <= since for given_up in _abandoned.values())


def interrupt(thread: int) -> None:
    """Raise AbandonedError in a thread, as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(AbandonedError))


class _Call(Generic[T]):
    """One function in one thread."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function, self._context = function, contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()
        self._in_function = True

    def abandon(self, stop: Callable[[int], None] | None) -> None:
        """Nobody waits any more."""
        with self._lock:
            if not self._in_function:
                return
            _abandoned[self.thread] = self._loop.time()
            if stop is not None and self.thread.ident is not None:
                stop(self.thread.ident)

    def _work(self) -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            try:
                result = self._context.run(self._function)
            finally:
                with self._lock:
                    self._in_function = False
        except StopIteration as error:  # which no future can carry
            failure = RuntimeError(f"raised {error!r}")
        except BaseException as error:  # also SystemExit: it ends this call, not the process
            failure = error
        try:
            self._loop.call_soon_threadsafe(self._settle, result, failure)
        except (RuntimeError, AbandonedError):
            return  # the loop is closed, or a late interruption: nobody waits any more

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        _abandoned.pop(self.thread, None)
        if self.future.cancelled():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)  # type: ignore[arg-type]  # T may be None itself
