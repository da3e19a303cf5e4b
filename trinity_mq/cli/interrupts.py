"""Event loops that clean up on Ctrl-C and on SIGTERM alike."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on an event loop of its own. SIGTERM ends it as Ctrl-C does: it is cancelled, and cleans up.

    Raises:
        KeyboardInterrupt: It was interrupted.
        BrokenPipeError: The reader of our output has left, whatever else failed.
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
        return await work  # only the main thread gets signals
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
