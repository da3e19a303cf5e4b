"""Publishes the processed batch, sends submitters their experiences, and deletes the batch queue afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from trinity_agents.operator.chain_run import ProcessedBatch
from trinity_mq.bus import Bus, BusRefused, BusUnavailable, Envelope, MessageTooLarge, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.dispatch.collector import UNBOUND_BEFORE_DELETE
from trinity_mq.messages import BatchClosed, BatchReady
from trinity_mq.runtime.deliveries import REFERENCE, envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.telemetry.group_drops import LEFT_OUT, TOO_FEW_RUNS
from trinity_mq.transport.batch_blobs import delete_blobs
from trinity_mq.transport.blobs import PARTS, BlobStore
from trinity_mq.transport.co_batched_parts import PartKey
from trinity_mq.transport.experience_parts import ReceivedPart, chunk_message, requested_parts

log = structlog.get_logger(__name__)

REASON_LIMIT = 2000
"""Maximum characters of a failure reason in a BatchReady."""


class BatchPublisher:
    """Publishes the processed batches of one operator.

    Args:
        bus: A connected bus.
        topology: The run's names.
        store: Blob store of the run.
        has_other_chain: Returns whether the operator's configuration differs from the explorer's.
    """

    def __init__(
        self, bus: Bus, topology: Topology, store: BlobStore | None, has_other_chain: Callable[[], bool] = lambda: False
    ) -> None:
        self._has_other_chain = has_other_chain
        self._bus, self._topology, self._store = bus, topology, store
        self._referenced_tickets: set[str] = set()
        """Tickets whose submitters were sent references to blobs; the sweep deletes these blobs an hour later."""

    async def send_requested(self, manifest: BatchClosed, parts: Mapping[PartKey, ReceivedPart]) -> None:
        """Send submitters the requested experience parts, at least once."""
        if not manifest.wanted:
            return
        for reply_to, message in await asyncio.to_thread(list, requested_parts(manifest, parts)):
            if not self._topology.is_reply_queue(reply_to):
                log.warning("submitter_not_served", batch=manifest.batch, reason="reply_to names no reply queue")
                continue
            try:
                if not await self._bus.publish("", reply_to, message):
                    log.info("reply_queue_missing", reply_to=reply_to)
                elif message.content_type == REFERENCE:
                    self._referenced_tickets.add(manifest.ticket)
            except (MessageTooLarge, BusRefused) as error:
                log.warning("submitter_not_served", reply_to=reply_to, reason=str(error))

    async def publish(self, manifest: BatchClosed, batch: ProcessedBatch, run_id: str | None = None) -> None:
        """Publish the chunks, and after all confirms the BatchReady that decides the ticket.

        Here and in :meth:`publish_state`, ``run_id`` is the run id of the manifest's message.

        Raises:
            RestartRequested: The ready stream does not exist.
        """
        async with asyncio.TaskGroup() as group:
            for n, content in enumerate(batch.chunks):
                chunk = chunk_message(manifest, batch.processing_id, n, content).of_run(run_id)
                group.create_task(self._to_ready(manifest, chunk))
        await self.publish_state(
            manifest,
            run_id=run_id,
            op=batch.processing_id,
            state="ready" if batch.experiences else "empty",
            chunks=len(batch.chunks),
            experiences=batch.experiences,
            metrics={**manifest.metrics, **batch.metrics},
            filtered_groups=batch.filtered_groups,
            other_chain=self._has_other_chain(),
            reason=None if batch.experiences else empty_reason(manifest, batch.metrics),
        )

    async def publish_state(
        self,
        manifest: BatchClosed,
        *,
        run_id: str | None = None,
        op: str | None = None,
        reason: str | None = None,
        **fields: Any,
    ) -> None:
        """Publish the BatchReady of a batch with these fields.

        Raises:
            RestartRequested: The ready stream does not exist.
        """
        op = op or uuid.uuid4().hex
        reason = reason and reason[:REASON_LIMIT].encode(errors="replace").decode()  # lone surrogates cannot be encoded
        ready = BatchReady(batch=manifest.batch, ticket=manifest.ticket, op=op, reason=reason, **fields)
        await self._to_ready(manifest, envelope(ready, message_id=f"ready-{manifest.ticket}-{op}").of_run(run_id))

    async def _to_ready(self, manifest: BatchClosed, message: Envelope) -> None:
        if not await self._bus.publish(self._topology.exchange("ready"), batch_key(manifest.batch), message):
            # The publish was confirmed but not routed to a queue; the next steps would delete the only copy.
            raise RestartRequested(f"{self._topology.ready.name} does not exist any more; a restart declares it again")

    async def delete_queue(self, manifest: BatchClosed) -> None:
        """Delete the queue of a processed batch and the blobs of its parts."""
        await asyncio.sleep(UNBOUND_BEFORE_DELETE)
        name = self._topology.batch_queue(manifest.batch, manifest.ticket).name
        try:
            await self._bus.delete(name)
        except BusUnavailable as error:
            log.warning("batch_queue_left", queue=name, reason=f"{error}; it expires by itself")
            return
        if manifest.ticket in self._referenced_tickets:
            self._referenced_tickets.discard(manifest.ticket)
        else:
            await delete_blobs(self._store, f"{PARTS}/{manifest.ticket}")


def empty_reason(manifest: BatchClosed, metrics: Mapping[str, float]) -> str:
    """Return the reason why a processed batch is empty, from its manifest and the metrics of the operator chain."""
    if not manifest.accepted:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(manifest.outcomes.items()))
        return f"no slice gave an experience: {counts}"
    names = {"rollout/missing_rewards": "runs without a finite reward", TOO_FEW_RUNS.metric: TOO_FEW_RUNS.lost}
    counts = ", ".join(f"{metrics[name]:.0f} {what}" for name, what in names.items() if metrics.get(name))
    dropped = f"{metrics.get(LEFT_OUT.metric, 0):.0f} groups dropped; look at experience_pipeline/*"
    return f"the operators kept no experience: {counts or f'{dropped} in metrics.jsonl'}"
