"""For ``deliver="caller"``: the experiences of a ticket, read from its batch queue and kept until asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus import Bus, Consumer, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.messages import TaskResult
from trinity_mq.scheduling.tickets import Ticket

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

log = structlog.get_logger(__name__)

UNBOUND_BEFORE_DELETE = 1.0
"""Seconds between unbinding a batch queue and deleting it: deleting it under publishers closes their connections."""


class Collector:
    """Drains the batch queues of tickets whose experiences go to the caller."""

    def __init__(self, bus: Bus, topology: Topology, config: Config) -> None:
        self._bus, self._topology = bus, topology
        self._timeout = config.broker.publish_timeout
        self._feeds: dict[str, Consumer] = {}
        self._parts: dict[str, dict[tuple[str, int], bytes]] = {}

    async def take(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """Return the experiences of the listed attempts, in order of their runs.

        Experiences reach the broker before their result, so what a result lists is in the queue already.
        """
        from trinity_mq.experience import Experience  # torch only where experiences are wanted

        wanted = [(result.attempt, part) for result in results for part in range(result.parts)]
        parts = self._parts.setdefault(ticket.ticket, {})
        async with asyncio.timeout(self._timeout):
            while any(key not in parts for key in wanted):
                feed = await self._feed(ticket)
                try:
                    delivery = await anext(feed)
                except (QueueGone, StopAsyncIteration):
                    log.error("batch_queue_gone", ticket=ticket.ticket)
                    break
                attempt, part = delivery.headers.get("attempt"), delivery.headers.get("part")
                if isinstance(attempt, str) and isinstance(part, int):
                    parts[attempt, part] = delivery.body
                await delivery.ack()
        found: list[Experience] = []
        for key in wanted:
            if key in parts:
                found += await asyncio.to_thread(Experience.deserialize_many, parts.pop(key))
        return found

    async def forget(self, ticket: Ticket) -> None:
        """Drop what was not asked for, and the queue."""
        self._parts.pop(ticket.ticket, None)
        feed = self._feeds.pop(ticket.ticket, None)
        if feed is not None:
            await feed.close()
        queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
        await self._bus.unbind(queue)
        await asyncio.sleep(UNBOUND_BEFORE_DELETE)
        await self._bus.delete(queue.name)

    async def close(self) -> None:
        """Stop reading; what was read and not asked for is dropped."""
        for feed in self._feeds.values():
            await feed.close()
        self._feeds.clear()

    async def _feed(self, ticket: Ticket) -> Consumer:
        feed = self._feeds.get(ticket.ticket)
        if feed is None:
            feed = await self._bus.consume(self._topology.batch_queue(ticket.batch, ticket.ticket), prefetch=64)
            self._feeds[ticket.ticket] = feed
        return feed
