"""The event loop of daemons: uvloop if it is installed, otherwise asyncio's default loop.

libuv moves the bytes of AMQP and HTTP with fewer kernel and Python calls. The order of events stays the same: the tests
of agents run on asyncio's own loop, the tests of whole runs on this loop.
"""

from __future__ import annotations

import asyncio
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
