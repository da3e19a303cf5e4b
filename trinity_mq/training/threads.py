"""Work that must not be left half done, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


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
