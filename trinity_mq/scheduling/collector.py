"""For ``deliver="caller"``: the experiences of a ticket, read from its batch queue and kept until asked for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.messages import TaskResult
from trinity_mq.runtime.mail import park, settle
from trinity_mq.scheduling.tickets import Ticket

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

log = structlog.get_logger(__name__)

UNBOUND_BEFORE_DELETE = 1.0
"""Seconds between unbinding a batch queue and deleting it: deleting it under publishers closes their connections."""
PREFETCH = 64


class _Held:
    """What was read of one ticket."""

    def __init__(self) -> None:
        self.feed: Consumer | None = None
        self.parts: dict[tuple[str, int], list[Experience]] = {}
        self.lock = asyncio.Lock()
        """One reader at a time: what another reads would wake nobody."""


class Collector:
    """Drains the batch queues of tickets whose experiences go to the caller."""

    def __init__(self, bus: Bus, topology: Topology, config: Config, by: str = "") -> None:
        self._bus, self._topology, self._by = bus, topology, by
        self._timeout = config.broker.publish_timeout
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        self._deletions: asyncio.Queue[tuple[float, str]] = asyncio.Queue()

    async def run(self) -> None:
        """Delete unbound queues when it is time, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due, name = await self._deletions.get()
            try:
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self._bus.delete(name)
            except asyncio.CancelledError:
                self._deletions.put_nowait((due, name))  # for the next start
                raise

    async def take(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """Return the experiences of the listed attempts, in order of their runs. Parts that do not decode are parked.

        Experiences reach the broker before their result, so what a result lists is in the queue already.

        Raises:
            TimeoutError: The broker did not deliver them within ``broker.publish_timeout``.
        """
        wanted = [(result.attempt, part) for result in results for part in range(result.parts)]
        held = self._held[ticket.ticket]
        async with asyncio.timeout(self._timeout), held.lock:
            while any(key not in held.parts for key in wanted):
                try:
                    if held.feed is None:
                        queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
                        held.feed = await self._bus.consume(queue, prefetch=PREFETCH)
                    await self._read(held, await anext(held.feed))
                except (QueueGone, StopAsyncIteration):
                    log.error("batch_queue_gone", ticket=ticket.ticket)
                    break
        return [experience for key in wanted for experience in held.parts.pop(key, [])]

    async def forget(self, ticket: Ticket) -> None:
        """Drop what was not asked for, and the queue: unbound now, deleted later."""
        held = self._held.pop(ticket.ticket, None)
        if held is not None and held.feed is not None:
            await held.feed.close()
        queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
        await self._bus.unbind(queue)
        self._deletions.put_nowait((asyncio.get_running_loop().time() + UNBOUND_BEFORE_DELETE, queue.name))

    async def close(self) -> None:
        """Stop reading; what was read is kept, the rest stays in the queues."""
        for held in self._held.values():
            if held.feed is not None:
                await held.feed.close()
                held.feed = None

    async def _read(self, held: _Held, delivery: Delivery) -> None:
        from trinity_mq.experience import DecodeError, Experience  # torch only where experiences are wanted

        attempt, part = delivery.headers.get("attempt"), delivery.headers.get("part")
        if not isinstance(attempt, str) or not isinstance(part, int):
            reason = "an experience part needs the headers attempt and part"
            await park(self._bus, self._topology, delivery, reason, self._by)
        elif (attempt, part) not in held.parts:
            try:
                held.parts[attempt, part] = await asyncio.to_thread(Experience.deserialize_many, delivery.body)
            except DecodeError as error:
                await park(self._bus, self._topology, delivery, f"does not decode: {error}", self._by)
                held.parts[attempt, part] = []
        await settle(delivery)
