"""The event loop of daemons: uvloop where it is installed, else asyncio's own.

libuv moves the bytes of AMQP and HTTP with fewer calls of the kernel and of Python. What a daemon waits for stays the
same: the tests of agents run on asyncio's own loop, those of whole runs on this one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_fast_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end as :func:`asyncio.run` does, on uvloop where that is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes an event loop; None: asyncio's default."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows and PyPy
        return None

    class FineClock(uvloop.Loop):
        """uvloop's clock counts whole milliseconds and stands still while a callback runs. Deadlines are compared, and
        traces of processes joined, by this one.
        """

        def time(self) -> float:
            return time.monotonic()

    return FineClock
