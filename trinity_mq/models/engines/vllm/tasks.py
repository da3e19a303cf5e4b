"""Concurrent coroutines of one request, and work that an event interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what each returns, in order; the first failure ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless(come: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Do ``work`` until ``come`` is set; returns whether that was before it was done. What it raises is raised."""
    async with asyncio.TaskGroup() as group:
        coming = group.create_task(come.wait())
        working = group.create_task(_raised_later(work))
        await asyncio.wait({coming, working}, return_when=asyncio.FIRST_COMPLETED)
        coming.cancel()
        working.cancel()
    if working.cancelled():
        return True
    if error := working.result():
        raise error
    return False


async def _raised_later(work: Coroutine[Any, Any, Any]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None
