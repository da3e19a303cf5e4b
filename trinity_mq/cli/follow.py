"""Listening to a run: telemetry and queue depths into a board."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.cli.board import Board
from trinity_mq.messages import DecodeError, decode_any


async def follow(
    bus: Bus, topology: Topology, board: Board, who: str, on_change: Callable[[], None] = lambda: None
) -> None:
    """Tell the board of all telemetry from now on, until cancelled; ``on_change`` is called after each message."""
    queue = topology.listener(who, uuid.uuid4().hex[:12], "telemetry", "#")
    await bus.declare(queue)
    async with await bus.consume(queue) as feed:
        async for delivery in feed:
            try:
                message = decode_any(delivery.body, delivery.content_type)
            except DecodeError:
                message = None  # of the many who hear it, the explorer reports it
            if message is not None:
                board.hear(message, asyncio.get_running_loop().time())
                on_change()
            await delivery.ack()


async def depths(bus: Bus, topology: Topology, names: Sequence[str]) -> dict[str, int | None]:
    """Return the depths of the run's queues by their short names; None where there is no queue, or no broker at
    present.
    """
    found: dict[str, int | None] = {}
    for name in names:
        try:
            found[name] = await bus.depth(topology.prefix + name)
        except BusUnavailable:
            found[name] = None
    return found
