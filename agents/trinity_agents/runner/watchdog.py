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
    """Ends this process when its event loop stands still for too long: nothing else in it could.

    What it held goes back to the broker as soon as its connection is gone; delivered again, it runs in a process of its
    own. The stacks of all threads go to stderr.

    Args:
        limit: Seconds the loop may stand still.
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
            # twice: after the process itself was stopped for a while, the first wait has ended before the loop goes on
            if not self._alive.wait(self._limit) and not self._alive.wait(2 * TICK):
                log.error("loop_stands_still", seconds=self._limit, hint="an asynchronous workflow must not block")
                faulthandler.dump_traceback()
                os._exit(EXIT_RESTART)
