"""Event loops that clean up after Ctrl-C and after SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_until_complete(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on a new event loop. SIGTERM has the effect of Ctrl-C: it cancels ``work``, which then cleans up.

    Raises:
        KeyboardInterrupt: ``work`` was interrupted.
        BrokenPipeError: The reader of standard output closed it. This error replaces all other errors of the group.
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
