"""For ``deliver="caller"``: the experiences of a ticket, read from its batch queue and kept until asked for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import DecodeError, Mark, TaskResult
from trinity_mq.runtime.deliveries import REFERENCE, acknowledge, dead_letter, requeue
from trinity_mq.transport.batch_blobs import delete_blobs
from trinity_mq.transport.blobs import PARTS, BlobStore, StoreUnavailable, open_store, patiently
from trinity_mq.transport.co_batched_parts import PartKey, Share, shares_of
from trinity_mq.transport.references import resolve

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

log = structlog.get_logger(__name__)

UNBOUND_BEFORE_DELETE = 1.0
"""Seconds between unbinding a batch queue and deleting it: deleting it under publishers closes their connections."""
PREFETCH = 256
INLINE = 256 * 1024
"""Bytes of a part that is decoded on the loop: handing it to a thread would take longer."""
BURST = 16
"""Parts read before others get their turn."""


class _Held:
    """What was read of one ticket."""

    def __init__(self) -> None:
        self.declared = asyncio.Event()
        self.feed: Consumer | None = None
        self.parts: dict[PartKey, list[Experience]] = {}
        self.lock = asyncio.Lock()
        """One reader at a time: what another reads would wake nobody."""


class Collector:
    """Drains the batch queues of tickets whose experiences go to the caller."""

    def __init__(self, bus: Bus, topology: Topology, config: Config, by: str = "") -> None:
        self._bus, self._topology, self._by = bus, topology, by
        self._timeout = config.broker.publish_timeout
        self._store = open_store(config.broker, topology.run)
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        self._deletions: asyncio.Queue[tuple[float, Ticket]] = asyncio.Queue()

    async def run(self) -> None:
        """Delete unbound queues, and the blobs of what was in them, when it is time, until cancelled."""
        while True:
            await self._delete_next()

    async def _delete_next(self) -> None:
        due, ticket = await self._deletions.get()
        try:
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await self._bus.delete(self._topology.batch_queue(ticket.batch, ticket.ticket).name)
            await delete_blobs(self._store, f"{PARTS}/{ticket.ticket}")
        except asyncio.CancelledError:
            self._deletions.put_nowait((due, ticket))  # for close, or the next start
            raise

    def expect(self, ticket: Ticket) -> None:
        """A ticket is about to be opened."""
        self._held[ticket.ticket] = _Held()

    def opened(self, ticket: Ticket) -> None:
        """Its batch queue is there."""
        if (held := self._held.get(ticket.ticket)) is not None:
            held.declared.set()

    async def read(self, ticket: Ticket) -> None:
        """Read what comes for a ticket until cancelled, and keep it for :meth:`take`."""
        held = self._held.get(ticket.ticket)
        if held is None:
            return  # forgotten
        await held.declared.wait()
        async with held.lock:
            try:
                feed, count = await self._feed(held, ticket), 0
                async for delivery in feed:
                    await self._read(held, delivery)
                    count += 1
                    if count % BURST == 0:
                        await asyncio.sleep(0)
            except (QueueGone, StoreUnavailable) as error:
                log.info("reading_ends", ticket=ticket.ticket, reason=str(error))  # who takes tells

    async def ensure(self, ticket: Ticket, results: Sequence[TaskResult]) -> None:
        """Return once the experiences of the listed attempts are here. Parts that do not decode are parked.

        Experiences reach the broker before their result, so what a result lists is in the queue already.

        Raises:
            TimeoutError: Broker and blob store delivered nothing for ``broker.publish_timeout``.
            StoreUnavailable: The blob store did not answer; a later call may have them.
        """
        held = self._held[ticket.ticket]
        missing = {key for key in _keys(results) if key not in held.parts}
        if not missing:
            return
        try:
            async with asyncio.timeout(self._timeout) as silence, held.lock:
                missing.difference_update(held.parts)  # what another reader has read meanwhile
                while missing:
                    feed = await self._feed(held, ticket)
                    missing.difference_update(await self._read(held, await anext(feed)))
                    silence.reschedule(asyncio.get_running_loop().time() + self._timeout)
        except (QueueGone, StopAsyncIteration):
            log.error("batch_queue_gone", ticket=ticket.ticket)

    def pop(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """Hand over the experiences of the listed attempts, in order of their runs."""
        held = self._held.get(ticket.ticket)
        if held is None:
            return []  # forgotten meanwhile
        return [experience for key in _keys(results) for experience in held.parts.pop(key, ())]

    async def take(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """:meth:`ensure`, then :meth:`pop`."""
        await self.ensure(ticket, results)
        return self.pop(ticket, results)

    async def forget(self, ticket: Ticket) -> None:
        """Drop what was not asked for, and the queue: unbound now, deleted later."""
        held = self._held.pop(ticket.ticket, None)
        if held is not None and held.feed is not None:
            await held.feed.close()
        queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
        await self._bus.unbind(queue)
        self._deletions.put_nowait((asyncio.get_running_loop().time() + UNBOUND_BEFORE_DELETE, ticket))

    async def close(self) -> None:
        """Stop reading; what was read is kept, the rest stays in the queues. Queues that are unbound go first."""
        for held in self._held.values():
            if held.feed is not None:
                await held.feed.close()
                held.feed = None
        while self._bus.usable and not self._deletions.empty():
            await self._delete_next()

    async def _feed(self, held: _Held, ticket: Ticket) -> Consumer:
        if held.feed is None:
            queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
            held.feed = await self._bus.consume(queue, prefetch=PREFETCH)
        return held.feed

    async def _read(self, held: _Held, delivery: Delivery) -> list[PartKey]:
        """Take in one delivery; return whose experiences are here by it."""
        if delivery.kind == Mark.kind:
            await acknowledge(delivery)  # we looked whether the queue answers
            return []
        try:
            shares = [share for share in shares_of(delivery) if share.key not in held.parts]
        except DecodeError as error:
            await dead_letter(self._bus, self._topology, delivery, str(error), self._by)
            shares = []
        if shares:
            inline = delivery.content_type != REFERENCE and len(delivery.body) <= INLINE
            try:
                experiences = (
                    _decode(self._store, delivery, shares)
                    if inline
                    else await patiently(_decode, self._store, delivery, shares)
                )
                for share in shares:
                    held.parts[share.key] = experiences if share.rows is None else experiences[share.rows]
            except DecodeError as error:
                await dead_letter(self._bus, self._topology, delivery, f"does not decode: {error}", self._by)
                held.parts.update((share.key, []) for share in shares)
            except (StoreUnavailable, asyncio.CancelledError):
                await requeue(delivery)  # else it would be ours, unread, and come to no later call
                raise
        await acknowledge(delivery)
        return [share.key for share in shares]


def _keys(results: Sequence[TaskResult]) -> Iterator[PartKey]:
    return ((result.attempt, part) for result in results for part in range(result.parts))


def _decode(store: BlobStore | None, delivery: Delivery, shares: Sequence[Share]) -> list[Experience]:
    from trinity_mq.experience import Experience  # torch only where experiences are wanted

    experiences = Experience.deserialize_many(resolve(store, delivery.body, delivery.content_type))
    for share in shares:
        share.check(len(experiences))
    return experiences
