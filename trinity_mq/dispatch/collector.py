"""Reads the experiences of ``deliver="caller"`` tickets from their batch queues and keeps them until the caller takes
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import DecodeError, Mark, TaskResult
from trinity_mq.runtime.deliveries import REFERENCE, acknowledge, dead_letter, requeue
from trinity_mq.runtime.notify import Notifier
from trinity_mq.transport.batch_blobs import delete_blobs
from trinity_mq.transport.blobs import (
    PARTS,
    BlobStore,
    StoreUnavailable,
    open_store,
    resolve_body,
    run_with_store_retries,
)
from trinity_mq.transport.experience_parts import AttemptRows, PartKey, attempt_rows_of

if TYPE_CHECKING:
    from trinity_mq.experience import Experience

log = structlog.get_logger(__name__)

UNBOUND_BEFORE_DELETE = 1.0
"""Seconds between unbinding and deleting a batch queue. Deleting a queue that is still published to closes the
publishers' connections.
"""
PREFETCH = 256
INLINE = 1024 * 1024
"""Maximum bytes of a message that is decoded on the event loop. For such a message, a handover to a thread would take
longer.
"""
STOPPED = "the scheduler was stopped while a caller waited for it; call start() again"
BURST = 16
"""Number of messages to read before other tasks of the event loop get a turn."""


class _Held:
    """Parts of a ticket that were read and not yet handed to the caller."""

    def __init__(self) -> None:
        self.declared = asyncio.Event()
        self.consumer: Consumer | None = None
        self.parts: dict[PartKey, list[Experience]] = {}
        self.is_being_read = False
        """True while a call reads the queue. Other calls wait for the parts that it reads."""
        self.changed = Notifier()
        """Notified after each delivery that was read, and when a call stops reading."""

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Mark the queue as being read while the context lasts."""
        self.is_being_read = True
        try:
            yield
        finally:
            self.is_being_read = False
            self.changed.notify()


class Collector:
    """Reads the batch queues of tickets whose experiences go to the caller."""

    def __init__(self, bus: Bus, topology: Topology, config: Config, by: str = "") -> None:
        self._bus, self._topology, self._by = bus, topology, by
        self._timeout = config.broker.publish_timeout
        self._store = open_store(config.broker, topology.run)
        self._held: dict[str, _Held] = {}
        self._endings: asyncio.Queue[tuple[Ticket, Consumer | None]] = asyncio.Queue()
        """Tickets whose queues must be unbound, each with the open consumer of its queue or None."""
        self._deletions: asyncio.Queue[tuple[float, Ticket]] = asyncio.Queue()

    async def run(self) -> None:
        """Unbind the queues of forgotten tickets, and later delete these queues and the blobs of their messages, until
        cancelled.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._end_all(), name="unbind")
            group.create_task(self._delete_all(), name="delete")

    async def _end_all(self) -> None:
        while True:
            await self._end_next()

    async def _delete_all(self) -> None:
        while True:
            await self._delete_next()

    async def _end_next(self) -> None:
        ticket, consumer = await self._endings.get()
        try:
            if consumer is not None:
                await consumer.close()
            await self._bus.unbind(self._topology.batch_queue(ticket.batch, ticket.ticket))
        except asyncio.CancelledError:
            self._endings.put_nowait((ticket, consumer))  # left for close or the next start
            raise
        self._deletions.put_nowait((asyncio.get_running_loop().time() + UNBOUND_BEFORE_DELETE, ticket))

    async def _delete_next(self) -> None:
        due, ticket = await self._deletions.get()
        try:
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            await self._bus.delete(self._topology.batch_queue(ticket.batch, ticket.ticket).name)
            await delete_blobs(self._store, f"{PARTS}/{ticket.ticket}")
        except asyncio.CancelledError:
            self._deletions.put_nowait((due, ticket))  # left for close or the next start
            raise

    def expect(self, ticket: Ticket) -> None:
        """Register a ticket that is about to be opened."""
        self._held[ticket.ticket] = _Held()

    def opened(self, ticket: Ticket) -> None:
        """Allow reading to begin, because the batch queue of the ticket now exists."""
        if (held := self._held.get(ticket.ticket)) is not None:
            held.declared.set()

    @asynccontextmanager
    async def reading(self, tickets: Sequence[Ticket]) -> AsyncIterator[None]:
        """Read the experiences of ``tickets`` in the background while the context lasts, so that :meth:`ensure` has
        little to read.
        """
        loop = asyncio.get_running_loop()
        readers = [loop.create_task(self._read_all(ticket)) for ticket in tickets]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            for error in await asyncio.gather(*readers, return_exceptions=True):
                if isinstance(error, Exception):
                    log.warning("reading_failed", reason=str(error))  # ensure reads the rest

    async def _read_all(self, ticket: Ticket) -> None:
        held = self._held.get(ticket.ticket)
        if held is None:
            return  # the ticket was forgotten
        await held.declared.wait()
        await held.changed.until(lambda: not held.is_being_read)
        with held.being_read():
            try:
                consumer, count = await self._consumer(held, ticket), 0
                async for delivery in consumer:
                    await self._read(held, delivery)
                    count += 1
                    if count % BURST == 0:
                        await asyncio.sleep(0)
            except (QueueGone, StoreUnavailable) as error:
                log.info("reading_ends", ticket=ticket.ticket, reason=str(error))  # ensure reports this error

    async def ensure(self, ticket: Ticket, results: Sequence[TaskResult]) -> None:
        """Return once the experiences of the attempts of ``results`` have been read, by this or by another call. Parts
        that cannot be decoded are dead-lettered and count as read, unless their headers do not name their attempts. If
        the queue no longer exists, the loss is only logged. Return at once if the ticket was forgotten.

        Experiences reach the broker before their result, so all parts that a result lists are already in the queue.

        Raises:
            TimeoutError: Broker and blob store delivered nothing for ``BrokerConfig.publish_timeout`` seconds.
            StoreUnavailable: The blob store did not answer. A later call may succeed.
            RuntimeError: :meth:`close` ended the call.
        """
        held = self._held.get(ticket.ticket)
        if held is None:
            return
        try:
            async with asyncio.timeout(self._timeout) as silence:
                for key in _keys(results):
                    while key not in held.parts:
                        if held.is_being_read:
                            await held.changed.wait()
                        else:
                            with held.being_read():
                                await self._read(held, await anext(await self._consumer(held, ticket)))
                        silence.reschedule(asyncio.get_running_loop().time() + self._timeout)
        except QueueGone:
            log.error("batch_queue_gone", ticket=ticket.ticket)
        except StopAsyncIteration:
            if ticket.ticket in self._held:  # not forgotten, so the experiences stay for a later call
                raise RuntimeError(STOPPED) from None

    def pop(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """Remove and return the experiences of the attempts of ``results`` that have been read, in the order of their
        runs.
        """
        held = self._held.get(ticket.ticket)
        if held is None:
            return []  # the ticket was forgotten in the meantime
        return [experience for key in _keys(results) for experience in held.parts.pop(key, ())]

    async def take(self, ticket: Ticket, results: Sequence[TaskResult]) -> list[Experience]:
        """Call :meth:`ensure`, then return the result of :meth:`pop`."""
        await self.ensure(ticket, results)
        return self.pop(ticket, results)

    def forget(self, ticket: Ticket) -> None:
        """Drop the experiences of a ticket that the caller did not take. Its queue is unbound soon, by :meth:`run` or
        :meth:`close`, and deleted later.
        """
        held = self._held.pop(ticket.ticket, None)
        self._endings.put_nowait((ticket, None if held is None else held.consumer))

    async def close(self) -> None:
        """Stop reading. While the bus is usable, unbind and delete the queues of forgotten tickets. Experiences of
        other tickets are kept if they were read, and stay in the queues otherwise.
        """
        for held in self._held.values():
            if held.consumer is not None:
                await held.consumer.close()
                held.consumer = None
        while self._bus.usable and not self._endings.empty():
            await self._end_next()
        while self._bus.usable and not self._deletions.empty():
            await self._delete_next()

    async def _consumer(self, held: _Held, ticket: Ticket) -> Consumer:
        if held.consumer is None:
            queue = self._topology.batch_queue(ticket.batch, ticket.ticket)
            held.consumer = await self._bus.consume(queue, prefetch=PREFETCH)
        return held.consumer

    async def _read(self, held: _Held, delivery: Delivery) -> None:
        """Store the parts of a delivery, and acknowledge the delivery. Requeue it if this fails."""
        if delivery.kind != Mark.kind:  # BatchQueues sends marks to test whether the queue confirms messages
            try:
                await self._store_parts(held, delivery)
            except BaseException:
                await requeue(delivery)  # otherwise the delivery would stay unread and reach no later call
                raise
        await acknowledge(delivery)
        held.changed.notify()

    async def _store_parts(self, held: _Held, delivery: Delivery) -> None:
        """Store the parts of a delivery that are not stored yet. Dead-letter a delivery that does not decode, and store
        the parts that its headers name as empty.

        Raises:
            StoreUnavailable: The blob store did not answer.
        """
        shares: list[AttemptRows] = []
        try:
            shares = [share for share in attempt_rows_of(delivery) if share.key not in held.parts]
            if not shares:
                return
            if delivery.content_type != REFERENCE and len(delivery.body) <= INLINE:
                experiences = _decode(self._store, delivery, shares)
            else:
                experiences = await run_with_store_retries(_decode, self._store, delivery, shares)
        except DecodeError as error:
            await dead_letter(self._bus, self._topology, delivery, f"does not decode: {error}", self._by)
            held.parts.update((share.key, []) for share in shares)
        else:
            for share in shares:
                held.parts[share.key] = experiences if share.rows is None else experiences[share.rows]


def _keys(results: Sequence[TaskResult]) -> Iterator[PartKey]:
    return ((result.attempt, part) for result in results for part in range(result.parts))


def _decode(store: BlobStore | None, delivery: Delivery, shares: Sequence[AttemptRows]) -> list[Experience]:
    from trinity_mq.experience import Experience  # processes that need no experiences do not import torch

    experiences = Experience.deserialize_many(resolve_body(store, delivery.body, delivery.content_type))
    for share in shares:
        share.check(len(experiences))
    return experiences
