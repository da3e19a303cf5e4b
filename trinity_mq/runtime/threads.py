"""Blocking calls in threads: in daemon threads that may be abandoned, or awaited until their end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

MOST_IDLE = 64
"""Maximum number of idle threads kept for further calls."""

_abandoned: dict[threading.Thread, float] = {}
"""Abandoned threads that still run, with the loop time of their abandonment in seconds."""


class AbandonedError(BaseException):
    """Raised inside an abandoned thread. It is not an Exception, since code in the thread must not handle it."""


class _Worker(threading.Thread):
    """A daemon thread that makes one call after another. It ends when one of its calls is abandoned, or when a call
    ends and :data:`MOST_IDLE` threads are idle.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self) -> None:
        with contextlib.suppress(AbandonedError):  # a late interruption: no caller waits any more
            while True:
                self.calls.get()()
                if self in _abandoned or len(_idle) >= MOST_IDLE:
                    return
                self.name = "idle"
                _idle.append(self)


_idle: list[_Worker] = []
"""Threads without a call. Starting a thread blocks the event loop for a tenth of a millisecond."""
os.register_at_fork(after_in_child=_idle.clear)


async def in_thread(function: Callable[[], T], name: str, stop: Callable[[int], None] | None = None) -> T:
    """Return the result of ``function``, run in a daemon thread that it has for itself.

    Unlike with ``asyncio.to_thread``, a function that never returns does not take a thread from a shared pool and does
    not prevent the process from ending. When the caller is cancelled, the thread is abandoned: ``stop`` asks it to end,
    its result is dropped, and :func:`stuck_threads` names it until it ends. Other threads are reused.

    Args:
        function: The blocking call.
        name: Name of the thread.
        stop: Called with the thread's number if the caller is cancelled while ``function`` runs, such as
            :func:`interrupt`.

    Raises:
        RuntimeError: ``function`` raised StopIteration, or a BaseException other than Exception, SystemExit and
            CancelledError. Its other errors are raised unchanged.
    """
    loop, context, future = asyncio.get_running_loop(), contextvars.copy_context(), Future[T]()
    lock, is_over = threading.Lock(), False

    def call() -> T:
        nonlocal is_over
        try:
            return context.run(function)
        finally:
            with lock:
                is_over = True

    def work() -> None:
        try:
            result = call()
        except AbandonedError:
            raise
        except BaseException as error:
            passes = isinstance(error, Exception | SystemExit | asyncio.CancelledError)
            passes = passes and not isinstance(error, StopIteration)  # a future cannot carry StopIteration
            future.set_exception(error if passes else RuntimeError(f"raised {error!r}, wanted an Exception"))
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    thread = _start_call(work, name)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        with lock:
            if not is_over:
                _abandoned[thread] = loop.time()
                if stop is not None and thread.ident is not None:
                    stop(thread.ident)
        raise


def _start_call(call: Callable[[], None], name: str) -> _Worker:
    """Let an idle thread, or else a new thread, make a call; return the thread."""
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Worker()
        thread.name = name
        thread.calls.put(call)
        thread.start()
    else:
        thread.name = name
        thread.calls.put(call)
    return thread


_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""The event loop of :func:`await_in_thread`, by process id."""
SHARED_LOOP = "coroutines"
"""Name of the thread that runs the event loop of :func:`await_in_thread`."""
CHECK = 0.5
"""Maximum seconds until a thread that waits for a coroutine notices an interruption."""


def await_in_thread(awaitable: Awaitable[T]) -> T:
    """Return the result of an awaitable to a thread without an event loop; block until then.

    All awaitables of this process run on one permanent event loop, so that they can share clients that belong to it. An
    interruption of the calling thread cancels the awaitable.

    Raises:
        RuntimeError: Called on that event loop, which would wait for itself.
    """

    async def awaited() -> T:
        return await awaitable

    def begin() -> None:
        task = loop.create_task(awaited())
        task.add_done_callback(ended.put)
        tasks.append(task)

    def cancel() -> None:
        for task in tasks:
            task.cancel()

    loop = _shared_loop()
    if threading.current_thread().name == SHARED_LOOP and asyncio.get_running_loop() is loop:
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # otherwise Python warns that the coroutine was never awaited
        raise RuntimeError(
            "this call would block the event loop that runs the coroutine; await the asynchronous method instead"
        )
    # A queue in C: an interruption inside a lock in Python would leave it locked, and the event loop would wait for it.
    tasks: list[asyncio.Task[T]] = []
    ended: SimpleQueue[asyncio.Task[T]] = SimpleQueue()
    try:
        loop.call_soon_threadsafe(begin)
        while True:
            with contextlib.suppress(Empty):
                task = ended.get(timeout=CHECK)
                break
    except BaseException:  # an interruption, perhaps before call_soon_threadsafe returns
        loop.call_soon_threadsafe(cancel)
        raise
    return task.result()


def _shared_loop() -> asyncio.AbstractEventLoop:
    made = asyncio.new_event_loop() if os.getpid() not in _loops else None
    loop = _loops[os.getpid()] if made is None else _loops.setdefault(os.getpid(), made)
    if loop is made:
        threading.Thread(target=loop.run_forever, name=SHARED_LOOP, daemon=True).start()
    elif made is not None:  # another thread was faster
        made.close()
    return loop


def stuck_threads(since: float = math.inf) -> list[str]:
    """Return the names of threads that were abandoned at loop time ``since`` (seconds) or earlier and still run."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.pop(thread, None)
    return sorted(thread.name for thread, when in _abandoned.items() if when <= since)


def interrupt(thread: int) -> None:
    """Raise AbandonedError in a thread as soon as it executes Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(AbandonedError))


async def run_to_end(executor: Executor, work: Callable[[], T]) -> T:
    """Run ``work`` in ``executor``. If the caller is cancelled, drop ``work`` if it has not started, otherwise wait for
    its end.
    """
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
