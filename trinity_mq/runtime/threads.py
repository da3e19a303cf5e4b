"""Blocking calls in threads: daemon threads that nobody has to wait for, and work that is waited for to its end."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")

_abandoned: dict[threading.Thread, float] = {}
"""Threads that run on although nobody waits for them, with the loop time of their abandonment in seconds."""


class AbandonedError(BaseException):
    """Raised inside an abandoned thread. Not an Exception: code in the thread must not handle it."""


async def in_thread(function: Callable[[], T], name: str, stop: Callable[[int], None] | None = None) -> T:
    """Return what ``function`` returns, run in a daemon thread of its own.

    Unlike with ``asyncio.to_thread``, a function that never returns takes no thread from a pool that others need, and
    does not keep the process from ending. When the caller is cancelled, the thread is abandoned: it is asked to end if
    there is a way, its result is dropped, and :func:`stuck_threads` names it until it ends.

    Args:
        function: The blocking call.
        name: Name of the thread.
        stop: Called with the thread's number when the caller is cancelled while ``function`` runs, such as
            :func:`interrupt`.

    Raises:
        RuntimeError: It raised a BaseException other than Exception, SystemExit and CancelledError.
    """
    thread, context, loop = _DaemonThread(name), contextvars.copy_context(), asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(thread, context.run, function)
    except asyncio.CancelledError:
        thread.abandon(loop.time(), stop)
        raise


def stuck_threads(since: float = math.inf) -> list[str]:
    """Return the names of threads that were abandoned at loop time ``since`` (seconds) or before and still run."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.pop(thread, None)
    return sorted(thread.name for thread, when in _abandoned.items() if when <= since)


def interrupt(thread: int) -> None:
    """Raise AbandonedError in a thread, as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(AbandonedError))


class _DaemonThread(Executor):
    """Runs one call in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._in_function = True

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start the thread."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                self._work(future, lambda: fn(*args, **kwargs))
            except AbandonedError:
                return  # an interruption that came late: nobody waits any more

        self._thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._thread.start()
        return future

    def _work(self, future: Future[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            try:
                result = call()
            finally:
                with self._lock:
                    self._in_function = False
        except BaseException as error:
            passes = isinstance(error, Exception | SystemExit | asyncio.CancelledError)
            passes = passes and not isinstance(error, StopIteration)  # which no future carries
            future.set_exception(error if passes else RuntimeError(f"raised {error!r}, wanted an Exception"))
        else:
            future.set_result(result)

    def abandon(self, now: float, stop: Callable[[int], None] | None) -> None:
        """Leave the thread to itself, and ask it to end."""
        with self._lock:
            if not self._in_function or self._thread is None:
                return
            _abandoned[self._thread] = now
            if stop is not None and self._thread.ident is not None:
                stop(self._thread.ident)


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run ``work`` in ``executor``; when cancelled, drop it if it has not begun, else wait for its end first."""
    running = executor.submit(work)
    waiting = asyncio.wrap_future(running)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError as error:
            running.cancel()
            cancelled = error
    if cancelled is None:
        return waiting.result()
    failure = None if waiting.cancelled() else waiting.exception()
    raise cancelled from failure
