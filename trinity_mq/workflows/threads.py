"""Blocking code beside an event loop, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Return what ``function`` returns, run in a daemon thread of its own.

    Unlike with ``asyncio.to_thread``, one that never returns takes no thread from a pool that others need, and does not
    keep the process from ending. When the caller is cancelled, the thread runs on and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as error:  # which no future can carry
            failure = RuntimeError(f"raised {error!r}")
        except BaseException as error:  # also SystemExit: it ends this call, not the process
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
