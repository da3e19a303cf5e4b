"""Ends a process whose event loop is blocked by a workflow."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading

import structlog

from trinity_mq.runtime.errors import EXIT_RESTART

log = structlog.get_logger(__name__)

TICK = 1.0
"""Seconds between two checks of the loop."""


class Watchdog:
    """Ends this process if its event loop is blocked for too long, which nothing else in the process can do.

    The broker redelivers the held slices once the connection is closed; a redelivered slice runs in a separate process.
    The stacks of all threads are written to stderr.

    Args:
        limit: Maximum seconds for which the loop may be blocked.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._alive = threading.Event()

    async def run(self) -> None:
        """Watch the running loop until cancelled."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="watchdog", daemon=True).start()
        try:
            while True:
                self._alive.set()
                await asyncio.sleep(TICK)
        finally:
            over.set()
            self._alive.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.is_set():
            self._alive.clear()
            # Two waits, because after a suspension of the whole process the first wait ends before the loop resumes.
            if not self._alive.wait(self._limit) and not self._alive.wait(2 * TICK):
                log.error("event_loop_blocked", seconds=self._limit, hint="an asynchronous workflow must not block")
                faulthandler.dump_traceback()
                os._exit(EXIT_RESTART)
