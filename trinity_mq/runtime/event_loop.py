"""Event loops: of daemons, on uvloop if it is installed, and of commands, which clean up after Ctrl-C and SIGTERM.

libuv moves the bytes of AMQP and HTTP with fewer kernel and Python calls. The order of events stays the same: the tests
of agents run on asyncio's own loop, the tests of whole runs on the loop of daemons.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_fast_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end as :func:`asyncio.run` does, on uvloop if it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return a factory of event loops; None: asyncio's default."""
    try:
        import uvloop
    except ImportError:  # uvloop does not exist for Windows and PyPy
        return None

    class FineClock(uvloop.Loop):
        """uvloop with Python's monotonic clock. uvloop's own clock counts whole milliseconds and does not advance while
        a callback runs. Deadlines are compared, and traces of several processes are merged, by this clock.
        """

        def time(self) -> float:
            return time.monotonic()

    return FineClock


def loop_time() -> float:
    """Return the time of the running loop in seconds, which is virtual in a simulated run; without a running loop the
    time of the monotonic clock.
    """
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def run_until_complete(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on a new event loop. In the main thread SIGTERM has the effect of Ctrl-C: it cancels ``work``, which
    then cleans up.

    Raises:
        KeyboardInterrupt: ``work`` was interrupted.
        BrokenPipeError: The reader of standard output closed it. This error replaces an exception group that contains
            it.
    """
    try:
        return asyncio.run(_cancelled_by_sigterm(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except BaseExceptionGroup as group:
        if group.subgroup(BrokenPipeError) is not None:
            raise BrokenPipeError from group
        raise


async def _cancelled_by_sigterm(work: Coroutine[Any, Any, T]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return await work  # only the main thread receives signals
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
