"""Reads large request bodies in threads, so that many or huge bodies neither block a server nor fill its memory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
THREADS = 2
MOST_BYTES = 256 * 1024**2
"""Maximum bytes of the large bodies that are being read or wait for a thread. Further bodies are refused."""


class ReaderBusy(Exception):
    """Too many bytes wait to be read; the client should retry."""


class BodyReader:
    """Reads bodies of more than ``small`` bytes in threads, :data:`THREADS` at a time. It reads smaller bodies on the
    event loop, which costs less than a thread.
    """

    def __init__(self, small: int) -> None:
        self._small = small
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tmq-body")
        self._free = asyncio.Semaphore(THREADS)
        self.held = 0
        """Bytes of the large bodies that are being read or wait."""

    async def run(self, size: int, read: Callable[[], T]) -> T:
        """Return the result of ``read``.

        A caller that is cancelled while it waits does not take a thread. If the caller is cancelled later, the thread
        stays occupied and the bytes count until ``read`` ends.

        Args:
            size: Bytes of the body.
            read: Reads the body; it must not use the event loop.

        Raises:
            ReaderBusy: More than :data:`MOST_BYTES` would be read or wait.
        """
        if size <= self._small:
            return read()
        if self.held + size > MOST_BYTES:
            raise ReaderBusy(
                f"the request has {size} bytes, and {self.held} bytes of others are being read, wanted at most "
                f"{MOST_BYTES} in all; retry later"
            )
        self.held += size
        try:
            await self._free.acquire()
        except BaseException:
            self.held -= size
            raise
        loop = asyncio.get_running_loop()
        reading = self._threads.submit(contextvars.copy_context().run, read)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(self._release, size)

        reading.add_done_callback(ended)
        return await asyncio.wrap_future(reading)

    def _release(self, size: int) -> None:
        self.held -= size
        self._free.release()
