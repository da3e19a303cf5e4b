"""Reads the parts of a closed batch from its queue, without acknowledging them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_mq.bus import Bus, Delivery, QueueGone, Topology
from trinity_mq.config import Config
from trinity_mq.messages import BatchClosed, DecodeError, Mark, OperatorStatus
from trinity_mq.runtime.deliveries import acknowledge, dead_letter
from trinity_mq.runtime.peers import Peers
from trinity_mq.transport.blobs import BlobStore, resolved_size
from trinity_mq.transport.co_batched_parts import AttemptRows, PartKey, attempt_rows_of
from trinity_mq.transport.experience_parts import ReceivedPart

IDLE_CHECK = 2.0
"""Seconds without a part after which the existence of the batch queue is checked."""


class UnusableBatch(Exception):
    """No operator can process this batch: the batch is at fault, not the operator."""


class BatchReader:
    """Collects the parts that a manifest lists.

    Args:
        bus: A connected bus.
        topology: The run's names.
        config: Limits of size and time.
        store: Blob store of the parts that are sent by reference.
        operator: Id of the operator, for its dead letters.
        peers: Heartbeats of the other operators.
        waiting: Called with a description of the missing parts while waiting, and with None when a part arrives.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        config: Config,
        store: BlobStore | None,
        *,
        operator: str,
        peers: Peers,
        waiting: Callable[[str | None], None],
    ) -> None:
        self._bus, self._topology, self._store = bus, topology, store
        self._max_bytes, self._deadline = config.broker.max_batch_bytes, config.explorer.operator_deadline
        self._operator, self._peers, self._waiting = operator, peers, waiting

    async def read(self, manifest: BatchClosed) -> dict[PartKey, ReceivedPart]:
        """Return the parts that the manifest lists, in its order.

        No part is acknowledged, so that the parts are redelivered if this process dies.

        Raises:
            QueueGone: The batch queue does not exist any more.
            UnusableBatch: Parts have been missing for too long, or the batch is too large.
        """
        expected = [(accepted.attempt, part) for accepted in manifest.accepted for part in range(accepted.parts)]
        if not expected:
            return {}
        received: dict[PartKey, ReceivedPart] = {}
        missing, size, idle = set(expected), 0, 0.0
        queue = self._topology.batch_queue(manifest.batch, manifest.ticket)
        async with await self._bus.consume(queue, prefetch=0) as consumer:
            while missing:
                try:
                    async with asyncio.timeout(IDLE_CHECK):
                        delivery = await anext(consumer)
                except TimeoutError:
                    self._waiting(f"{len(missing)} parts of batch {manifest.batch}")
                    idle += await self._idle_seconds(manifest, queue.name)
                    if idle >= self._deadline:
                        raise UnusableBatch(
                            f"{len(missing)} of {len(expected)} parts did not arrive within {self._deadline:g} s"
                        ) from None
                    continue
                self._waiting(None)
                idle = 0.0
                parts = [part for part in await self._parts(delivery) if part.key in missing]
                missing.difference_update(part.key for part in parts)
                received.update((part.key, ReceivedPart(delivery, part)) for part in parts)
                if parts:
                    size += resolved_size(self._store, delivery.body, delivery.content_type)
                if size > self._max_bytes:
                    raise UnusableBatch(f"batch {manifest.batch} is over broker.max_batch_bytes {self._max_bytes}")
        return {key: received[key] for key in expected}

    async def _parts(self, delivery: Delivery) -> list[AttemptRows]:
        """Return the parts in a message; a message that does not decode is dead-lettered."""
        if delivery.kind == Mark.kind:
            return []  # the queue's owner publishes marks to test the queue
        try:
            return list(attempt_rows_of(delivery))
        except DecodeError as error:
            await dead_letter(self._bus, self._topology, delivery, str(error), self._operator)
            await acknowledge(delivery)
            return []

    async def _idle_seconds(self, manifest: BatchClosed, queue: str) -> float:
        """Return the seconds of an idle check that count towards the deadline, 0 while no part can reach this operator.

        Raises:
            QueueGone: The batch queue does not exist any more, so no part will arrive.
        """
        if not self._bus.usable:
            return 0.0
        if await self._bus.depth(queue) is None:
            raise QueueGone(queue)
        others = (beat for beat in self._peers.alive("operator") if beat.id != self._operator)
        # Another operator that works on the same batch and waits for nothing is the queue's single active consumer.
        working = (beat.detail for beat in others if beat.waits_for is None)
        held = any(isinstance(status, OperatorStatus) and status.ticket == manifest.ticket for status in working)
        return 0.0 if held else IDLE_CHECK
