"""Operators that compute, in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")

_given_up: set[threading.Thread] = set()


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Return what ``function`` returns, run in a daemon thread of its own.

    Unlike with ``asyncio.to_thread``, one that never returns takes no thread from a pool and does not keep the process
    from ending. When the caller is cancelled its result is dropped, and until it ends :func:`stuck` tells.

    Raises:
        RuntimeError: It raised what is no Exception, such as SystemExit: that ends this call, not the process.
    """
    threads, context = _DaemonThreads(name), contextvars.copy_context()
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, context.run, function)
    except asyncio.CancelledError:
        _given_up.update(threads.started)
        raise


def stuck() -> list[str]:
    """Return the names of threads that were given up and still run; only the end of the process ends them."""
    _given_up.difference_update([thread for thread in _given_up if not thread.is_alive()])
    return sorted(thread.name for thread in _given_up)


class _DaemonThreads(Executor):
    """A daemon thread for each call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.started: list[threading.Thread] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Start the thread."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                # no future can carry a StopIteration
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if plain else RuntimeError(f"raised {error!r}, wanted an Exception"))
            else:
                future.set_result(result)

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        self.started.append(thread)
        thread.start()
        return future
