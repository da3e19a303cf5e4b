"""Waiting in tests for what gives no signal of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_mq.local_broker.base import LocalNode

STEP = 0.01


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout: float = 10.0) -> None:
    """Return once ``condition`` holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(STEP)


async def queues_noted(node: LocalNode) -> None:
    """Have a broker write down now which quorum queues it has; by itself it does so when half a second was quiet.

    A queue that a SIGKILL meets before that comes back empty, whatever was confirmed.
    """
    await node.ctl("eval", "[dets:sync(Table) || Table <- dets:all()], ok.")
