"""Waiting in tests for what gives no signal of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

STEP = 0.01


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout: float = 10.0) -> None:
    """Return once ``condition`` holds; TimeoutError if it does not in time."""
    async with asyncio.timeout(timeout):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(STEP)
