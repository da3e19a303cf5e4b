"""The operator: runs the operator chain on the experiences of a closed batch and publishes the processed batch.

Waits for: manifests on ``closed``, then all parts that the manifest lists. An incomplete set is never published.
:class:`BatchReader` reads the parts without acknowledging them. :class:`BatchPublisher` publishes the processed batch,
sends submitters their experiences, and deletes the batch queue afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from trinity_agents.operator.chain_run import ChainRun, ProcessedBatch
from trinity_mq.bus import (
    Bus,
    BusRefused,
    BusUnavailable,
    Consumer,
    Delivery,
    Envelope,
    MessageTooLarge,
    QueueGone,
    Topology,
)
from trinity_mq.bus.retry import exponential_pause
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.dispatch.collector import UNBOUND_BEFORE_DELETE
from trinity_mq.messages import BatchClosed, BatchReady, DecodeError, Mark, OperatorStatus
from trinity_mq.operators import OperatorError
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import (
    REFERENCE,
    CrashLog,
    DeliveryHistory,
    acknowledge,
    dead_letter,
    decode_or_dead_letter,
    envelope,
    return_delivery,
)
from trinity_mq.runtime.errors import RestartRequested, dead_letter_reason, is_content_error
from trinity_mq.runtime.peers import Peers
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.telemetry import MetricsWriter, work_for
from trinity_mq.telemetry.durations import WorkUnderWay
from trinity_mq.telemetry.group_drops import LEFT_OUT, TOO_FEW_RUNS
from trinity_mq.telemetry.trace import span, works_on
from trinity_mq.transport.batch_blobs import BlobSweep, delete_blobs
from trinity_mq.transport.blobs import PARTS, BlobStore, open_store, resolved_size
from trinity_mq.transport.experience_parts import (
    AttemptRows,
    PartKey,
    ReceivedPart,
    attempt_rows_of,
    chunk_message,
    requested_parts,
)

log = structlog.get_logger(__name__)

FIRST_PAUSE = 1.0
"""Maximum seconds before the second attempt at a batch, doubled with each further attempt, because an auxiliary model
may be down for a while."""
LONGEST_PAUSE = 30.0
"""Maximum seconds between two attempts."""

IDLE_CHECK = 2.0
"""Seconds without a part after which the existence of the batch queue is checked."""
REASON_LIMIT = 2000
"""Maximum characters of a failure reason in a BatchReady."""


class Operator(Agent):
    """Processes one batch at a time with the operator chain."""

    role = "operator"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str,
        metrics: MetricsWriter | None = None,
        crash_notes: CrashLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self._crash_notes = crash_notes or CrashLog()
        self._ticket: str | None = None
        self._work = WorkUnderWay()
        self._delivery: Delivery | None = None
        """Delivery of the manifest in progress, None while idle."""
        self._restart_reason: RestartRequested | None = None
        self._store = store = open_store(config.broker, topology.run)
        self._chain = ChainRun(config, bus, topology, store, self.peers, clock)
        self._publisher = BatchPublisher(bus, topology, store, self._has_other_chain)
        self._digest = config.chain_digest
        self._warned_other_chain = False
        self._reader = BatchReader(
            bus,
            topology,
            config,
            store,
            operator=agent_id,
            peers=self.peers,
            waiting=lambda missing: self.set_state("working", missing),
        )
        self._stopped = asyncio.Event()
        """Set when no further manifest can arrive."""

    def detail(self) -> OperatorStatus:
        """Return the ticket in progress with its times, and its open reviews. The explorer suspends the deadline of a
        ticket that an operator reports in progress.
        """
        reviews, review_seconds = self._chain.unanswered()
        return OperatorStatus(
            ticket=self._ticket,
            seconds=self._work.seconds,
            usual_seconds=self._work.usual_seconds,
            reviews=reviews,
            review_seconds=review_seconds,
        )

    async def serve(self) -> None:
        """Process batches until drained, the run is over, or a restart was requested."""
        async with contextlib.AsyncExitStack() as stack:
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            await self._chain.open(stack)
            manifests = await stack.enter_async_context(await self.bus.consume(self.topology.closed, prefetch=1))
            deletions = await stack.enter_async_context(asyncio.TaskGroup())
            batches = deletions.create_task(self._process_all(manifests, deletions))
            if self._store is not None:
                sweep = deletions.create_task(BlobSweep(self.bus, self.topology, self._store).run())
                stack.callback(sweep.cancel)
            await self.woken.until(self._is_over)
            await manifests.stop()
            self._stopped.set()
            await asyncio.wait([batches], timeout=self.drain_timeout)
            if batches.cancel() and self._delivery is not None:
                log.info("batch_requeued", ticket=self._ticket)
                await asyncio.wait([batches])
                await return_delivery(self.bus, self._delivery)
        if self._restart_reason is not None:
            raise self._restart_reason

    def _has_other_chain(self) -> bool:
        """Return whether the explorer announces a different configuration of operators and estimator."""
        differs = self.peers.explorer.chain not in {"", self._digest}
        if differs and not self._warned_other_chain:
            self._warned_other_chain = True
            do = (
                "start this operator with the configuration of the run, or restart the explorer with this configuration"
            )
            log.warning(
                "other_chain", operator=self.id, reason="operator.operators or algorithm.estimator differ", do=do
            )
        return differs

    def _is_over(self) -> bool:
        return self._restart_reason is not None or self.draining.is_set() or self.peers.explorer.finished

    def restart(self, why: RestartRequested) -> None:
        """Finish the batch in progress or return it to the queue, as when drained, and then restart the process."""
        self._restart_reason = self._restart_reason or why
        self.woken.notify()

    async def _process_all(self, manifests: Consumer, deletions: asyncio.TaskGroup) -> None:
        self.set_state("idle", "a closed batch")
        async for delivery in manifests:
            if await self.drop_foreign(delivery):
                continue
            manifest = await decode_or_dead_letter(self.bus, self.topology, delivery, self.id, expect=BatchClosed)
            if not isinstance(manifest, BatchClosed):
                continue
            self._ticket, self._delivery = manifest.ticket, delivery
            works_on(manifest.batch)
            self.set_state("working")
            self.heartbeat_soon()
            try:
                doing = self._work.doing("batch", f"batch {manifest.batch}")
                with work_for(manifest.batch, manifest.ticket), doing:
                    if await self._process(delivery, manifest):
                        deletions.create_task(self._publisher.delete_queue(manifest))
                self._delivery = None
            finally:
                self._ticket = None
                self.set_state("idle", "a closed batch")
                self.heartbeat_soon()

    async def _process(self, delivery: Delivery, manifest: BatchClosed) -> bool:
        """Process a batch and answer the delivery of its manifest; return whether its queue can be deleted.

        If the batch's content is invalid, or too many attempts failed or were lost, the batch is published as failed,
        which decides its ticket.
        """
        limit = self.config.broker.delivery_limit
        try:
            past = DeliveryHistory.of(delivery)
            if not past.poisoned(limit, self._crash_notes.crashes(manifest.ticket)):
                with self._crash_notes.at_work(manifest.ticket):
                    return await self._processed(delivery, manifest)
            reason = f"{past.suspect} attempts at this batch failed or were lost (limit {limit})"
            await self._fail(delivery, manifest, f"{reason}; its queue is kept for replay")
        except Exception as error:
            if not is_content_error(error):
                raise
            log.exception("batch_rejected", ticket=manifest.ticket)
            await self._fail(delivery, manifest, dead_letter_reason(error))
        return False

    async def _processed(self, delivery: Delivery, manifest: BatchClosed) -> bool:
        try:
            with span("read parts", wait=True) as traced:
                parts = await self._reader.read(manifest)
                traced.count = len(parts)
        except QueueGone:
            await self._skip(delivery, manifest)
            return False
        except UnusableBatch as error:
            await self._fail(delivery, manifest, str(error))
            return False
        if manifest.wanted:
            await self._publisher.send_requested(manifest, parts)
        try:
            batch = await self._chain.process(manifest, parts.values())
        except QueueGone:
            await self._skip(delivery, manifest)
            return False
        except Exception as error:
            # An error of an operator costs the batch one attempt but never ends the daemon; the delivery limit bounds
            # the attempts.
            log.exception("batch_failed", ticket=manifest.ticket, attempt=DeliveryHistory.of(delivery).count + 1)
            await self._try_again(delivery, manifest, error)
            if threads := stuck_threads():
                names = ", ".join(threads)
                raise RestartRequested(
                    f"{names} exceeded its time limit and still computes: only a new process ends it"
                ) from error
            return False
        for part, reason in batch.bad:
            await dead_letter(self.bus, self.topology, part, reason, self.id)
        await self._publisher.publish(manifest, batch, delivery.run_id)
        with span("acknowledge", wait=True):
            await self._decided(delivery, manifest)
        seconds = round(batch.metrics["time/operators"], 3)
        log.info(
            "batch_processed", experiences=batch.experiences, filtered_groups=batch.filtered_groups, seconds=seconds
        )
        if isinstance(manifest.batch, int):
            with span("write metrics"):
                self.report(manifest.batch, batch.metrics)
        return True

    async def _skip(self, delivery: Delivery, manifest: BatchClosed) -> None:
        reason = "the batch queue does not exist: another operator has processed it"
        await self._publisher.publish_state(manifest, run_id=delivery.run_id, state="gone", reason=reason)
        await self._decided(delivery, manifest)

    async def _fail(
        self, delivery: Delivery, manifest: BatchClosed, reason: str, error: Exception | None = None
    ) -> None:
        """Publish the batch as failed, dead-letter its manifest for ``trinity-mq dead replay``, then acknowledge it."""
        await self._publisher.publish_state(manifest, run_id=delivery.run_id, state="failed", reason=reason)
        if isinstance(error, OperatorError):
            delivery.headers = {**delivery.headers, "operator": error.operator}
        await dead_letter(self.bus, self.topology, delivery, reason, self.id)
        await self._decided(delivery, manifest)

    async def _decided(self, delivery: Delivery, manifest: BatchClosed) -> None:
        self._crash_notes.forget(manifest.ticket)
        await acknowledge(delivery)

    async def _try_again(self, delivery: Delivery, manifest: BatchClosed, error: Exception) -> None:
        failure = f"{type(error).__name__}: {error}"
        past = DeliveryHistory.of(delivery).then(failure)
        if past.poisoned(self.config.broker.delivery_limit):
            reason = f"the operator chain failed; {past.suspect} attempts failed or were lost, the last with {failure}"
            await self._fail(delivery, manifest, reason, error)
            return
        pause = exponential_pause(FIRST_PAUSE, LONGEST_PAUSE, past.suspect)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                await self._stopped.wait()
        await return_delivery(self.bus, delivery, f"{self.id}: {failure}")


class UnusableBatch(Exception):
    """No operator can process this batch: the batch is at fault, not the operator."""


class BatchReader:
    """Collects the parts that a manifest lists.

    Args:
        bus: A connected bus.
        topology: Names of the run's queues and exchanges.
        config: Limits of size and time.
        store: Blob store of the parts that are sent by reference.
        operator: Id of the operator, for its dead letters.
        peers: Received heartbeats, which tell the work of the other operators.
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


class BatchPublisher:
    """Publishes the processed batches of one operator.

    Args:
        bus: A connected bus.
        topology: Names of the run's queues and exchanges.
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
        """Send submitters the requested experience parts, at least once. Skip submitters that cannot be reached."""
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
        """Delete the queue of a processed batch, and the blobs of its parts unless submitters were sent references to
        them.
        """
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


def main(config: Config, agent_id: str = "operator-0") -> int:
    """Run one operator until the run is over or the operator is drained; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Operator:
        metrics = MetricsWriter(config.path, "operator", agent_id, config.monitor.tensorboard)
        notes = CrashLog(config.path / f"{agent_id}.at-work.json")
        return Operator(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics, crash_notes=notes)

    return run_daemon(config, agent_id, "operator", build)
