"""The operator: runs the operator chain on the experiences of a closed batch and publishes the processed batch.

Waits for: manifests on ``closed``, then all parts that the manifest lists. An incomplete set is never published.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

import structlog

from trinity_agents.operator.batch_publisher import BatchPublisher
from trinity_agents.operator.batch_reader import BatchReader, UnusableBatch
from trinity_agents.operator.chain_run import ChainRun
from trinity_mq.bus import Bus, Consumer, Delivery, QueueGone, Topology
from trinity_mq.bus.retry import exponential_pause
from trinity_mq.config import Config
from trinity_mq.messages import BatchClosed, OperatorStatus
from trinity_mq.operators import OperatorError
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import (
    CrashLog,
    DeliveryHistory,
    acknowledge,
    dead_letter,
    decode_or_dead_letter,
    return_delivery,
)
from trinity_mq.runtime.errors import RestartRequested, dead_letter_reason, is_content_error
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.telemetry import MetricsWriter, work_for
from trinity_mq.telemetry.durations import WorkUnderWay
from trinity_mq.telemetry.trace import span, works_on
from trinity_mq.transport.batch_blobs import BlobSweep
from trinity_mq.transport.blobs import open_store

log = structlog.get_logger(__name__)

FIRST_PAUSE = 1.0
"""Seconds before the second attempt at a batch, doubled with each attempt, because an auxiliary model may be down for a
while."""
LONGEST_PAUSE = 30.0
"""Maximum seconds between two attempts."""


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
        """Return the ticket in progress, for which the explorer's deadline is suspended, and the state of reviews."""
        reviews, review_seconds = self._chain.unanswered()
        return OperatorStatus(
            ticket=self._ticket,
            seconds=self._work.seconds,
            usual_seconds=self._work.usual_seconds,
            reviews=reviews,
            review_seconds=review_seconds,
        )

    async def serve(self) -> None:
        """Process batches until drained or the run is over."""
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
        """Process a batch up to the acknowledgement; return whether its queue can be deleted.

        A batch that cannot be processed because of its content is published as failed, which decides its ticket.
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


def main(config: Config, agent_id: str = "operator-0") -> int:
    """Run one operator until the run is over; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Operator:
        metrics = MetricsWriter(config.path, "operator", agent_id, config.monitor.tensorboard)
        notes = CrashLog(config.path / f"{agent_id}.at-work.json")
        return Operator(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics, crash_notes=notes)

    return run_daemon(config, agent_id, "operator", build)
