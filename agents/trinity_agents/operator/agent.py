"""The operator: a closed batch in, its experiences drained and processed, a processed batch out.

Waits for: manifests on ``closed``, then for every part that the manifest lists. An incomplete set is never published.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from trinity_mq.algorithms.registry import ALGORITHMS
from trinity_mq.bus import (
    Bus,
    BusRefused,
    BusUnavailable,
    Consumer,
    Delivery,
    Envelope,
    Incoming,
    MessageTooLarge,
    QueueGone,
    Topology,
)
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.dispatch.collector import UNBOUND_BEFORE_DELETE
from trinity_mq.messages import BatchClosed, BatchReady, DecodeError, Mark, OperatorStatus
from trinity_mq.models.auxiliary_clients import auxiliary_clients
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.operators import AdvantageOperator, ExperienceOperatorV1, OperatorError, create_operators, run_chain
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import REFERENCE, acknowledge, dead_letter, decode_or_dead_letter, envelope, requeue
from trinity_mq.runtime.errors import RestartMe
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.transport.batch_blobs import Content, Sweep, chunk_name, delete_blobs, stored
from trinity_mq.transport.blobs import PARTS, open_store, patiently
from trinity_mq.transport.co_batched_parts import PartKey, shares_of
from trinity_mq.transport.experience_parts import Part, chunk_mail, decode_parts, split_to_size, wanted_mails
from trinity_mq.transport.references import carried_bytes

log = structlog.get_logger(__name__)

IDLE_CHECK = 2.0
"""Seconds without a part until we ask whether the batch queue still exists."""
FIRST_PAUSE = 1.0
"""Seconds before the chain gets a second try at a batch, doubled each time: what it asks may be down for a while."""
LONGEST_PAUSE = 30.0


class BatchUnusable(Exception):
    """This batch cannot be processed, by us or anybody; it fails as a batch, not as an operator."""


@dataclass(frozen=True)
class Processed:
    """What the chain made of a batch."""

    op: str
    """Names this processing."""
    chunks: list[Content]
    experiences: int
    metrics: dict[str, float]
    bad: list[tuple[Incoming, str]]
    """Parts that do not decode, and why."""


class Operator(Agent):
    """One batch at a time through the operator chain."""

    role = "operator"

    def __init__(
        self, config: Config, *, bus: Bus, topology: Topology, agent_id: str, metrics: MetricsWriter | None = None
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)
        self._chain: list[ExperienceOperatorV1] = []
        self._ticket: str | None = None
        self._store = open_store(config.broker, topology.run)
        self._lent: set[str] = set()
        """Tickets of which submitters were sent references: their blobs are left to the sweep, an hour later."""
        self._stopped = asyncio.Event()
        """No further manifest comes to us."""

    def detail(self) -> OperatorStatus:
        """Return the ticket at work: the explorer's deadline for it does not run meanwhile."""
        return OperatorStatus(ticket=self._ticket)

    async def serve(self) -> None:
        """Process batches until drained or the run is over."""
        names = [model.name for model in self.config.explorer.auxiliary_models]
        clients = auxiliary_clients(names, EngineSelector(lambda: self.peers.alive("engine")).auxiliary)
        self._chain = create_operators(self.config.operator.operators, clients)
        if ALGORITHMS[self.config.algorithm.algorithm_type].where == "operator":
            self._chain.append(AdvantageOperator(self.config.algorithm))
        async with contextlib.AsyncExitStack() as stack:
            if self._metrics is not None:
                stack.callback(self._metrics.close)
            for client in (client for each in clients.values() for client in each):
                stack.push_async_callback(client.close)
            for operator in self._chain:
                stack.push_async_callback(operator.close)
                await operator.prepare()
            feed = await stack.enter_async_context(await self.bus.consume(self.topology.closed, prefetch=1))
            deletions = await stack.enter_async_context(asyncio.TaskGroup())
            work = deletions.create_task(self._work(feed, deletions))
            if self._store is not None:
                sweep = deletions.create_task(Sweep(self.bus, self.topology, self._store).run())
                stack.callback(sweep.cancel)
            await self.woken.until(lambda: self.draining.is_set() or self.peers.explorer.finished)
            await feed.stop()
            self._stopped.set()
            await asyncio.wait([work], timeout=self.config.runner.drain_timeout)
            if work.cancel():
                log.info("batch_given_back", ticket=self._ticket)

    async def _work(self, feed: Consumer, deletions: asyncio.TaskGroup) -> None:
        self.set_state("idle", "a closed batch")
        async for delivery in feed:
            manifest = await decode_or_dead_letter(self.bus, self.topology, delivery, self.id, expect=BatchClosed)
            if not isinstance(manifest, BatchClosed):
                continue
            self._ticket = manifest.ticket
            self.set_state("working")
            self.heartbeat_soon()
            try:
                if await self._batch(delivery, manifest):
                    deletions.create_task(self._delete(manifest))
            finally:
                self._ticket = None
                self.set_state("idle", "a closed batch")
                self.heartbeat_soon()

    async def _batch(self, delivery: Delivery, manifest: BatchClosed) -> bool:
        """Do a batch, up to the acknowledgement; True when its queue has served its purpose."""
        limit = self.config.broker.delivery_limit
        if delivery.deliveries_before >= limit:
            lives = delivery.deliveries_before
            reason = f"{lives} operators did not survive this batch (limit {limit}); its queue is kept for replay"
            await self._fail(delivery, manifest, reason)
            return False
        try:
            parts = await self._drain(manifest)
        except QueueGone:
            await self._gone(delivery, manifest)
            return False
        except BatchUnusable as error:
            await self._fail(delivery, manifest, str(error))
            return False
        await self._send_wanted(manifest, parts)
        try:
            processed = await self._processed(manifest, parts.values())
        except QueueGone:
            await self._gone(delivery, manifest)
            return False
        except Exception as error:
            # an operator's bug costs its batch a try, never the daemon; the count ends it
            log.exception("batch_failed", ticket=manifest.ticket, attempt=delivery.deliveries_before + 1)
            await self._try_again(delivery, manifest, error)
            if threads := stuck_threads():
                names = ", ".join(threads)
                raise RestartMe(f"{names} computes on though its time was over: only a new process ends it") from error
            return False
        for part, reason in processed.bad:
            await dead_letter(self.bus, self.topology, part, reason, self.id)
        await self._publish(manifest, processed)
        await acknowledge(delivery)
        if isinstance(manifest.batch, int):
            self.report(manifest.batch, processed.metrics)
        return True

    async def _gone(self, delivery: Delivery, manifest: BatchClosed) -> None:
        reason = "the batch queue does not exist: another operator has processed it"
        await self._tell(manifest, state="gone", reason=reason)
        await acknowledge(delivery)

    async def _fail(
        self, delivery: Delivery, manifest: BatchClosed, reason: str, error: Exception | None = None
    ) -> None:
        """Let the trainer skip the batch, keep its manifest for ``trinity-mq dead replay``, then acknowledge."""
        await self._tell(manifest, state="failed", reason=reason)
        if isinstance(error, OperatorError):
            delivery.headers = {**delivery.headers, "operator": error.operator}
        await dead_letter(self.bus, self.topology, delivery, reason, self.id)
        await acknowledge(delivery)

    async def _try_again(self, delivery: Delivery, manifest: BatchClosed, error: Exception) -> None:
        limit = self.config.broker.delivery_limit
        if delivery.deliveries_before + 1 >= limit:
            reason = f"the operator chain failed {limit} times, last with {type(error).__name__}: {error}"
            await self._fail(delivery, manifest, reason, error)
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**delivery.deliveries_before)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                await self._stopped.wait()
        await requeue(delivery)

    async def _drain(self, manifest: BatchClosed) -> dict[PartKey, Part]:
        """Return the parts that the manifest lists, in its order. Nothing is acknowledged: what we hold comes back if
        we die.
        """
        wanted = [(accepted.attempt, part) for accepted in manifest.accepted for part in range(accepted.parts)]
        if not wanted:
            return {}
        found: dict[PartKey, Part] = {}
        missing, size, idle = set(wanted), 0, 0.0
        limit, deadline = self.config.broker.max_batch_bytes, self.config.explorer.operator_deadline
        queue = self.topology.batch_queue(manifest.batch, manifest.ticket)
        async with await self.bus.consume(queue, prefetch=0) as feed:
            while missing:
                try:
                    async with asyncio.timeout(IDLE_CHECK):
                        delivery = await anext(feed)
                except TimeoutError:
                    self.set_state("working", f"{len(missing)} parts of batch {manifest.batch}")
                    idle += await self._idled(manifest, queue.name)
                    if idle >= deadline:
                        raise BatchUnusable(
                            f"{len(missing)} of {len(wanted)} parts did not come in {deadline:g} s"
                        ) from None
                    continue
                self.set_state("working")
                idle = 0.0
                if delivery.kind == Mark.kind:
                    continue  # its owner has looked whether the queue answers
                try:
                    shares = [share for share in shares_of(delivery) if share.key in missing]
                except DecodeError as error:
                    await dead_letter(self.bus, self.topology, delivery, str(error), self.id)
                    await acknowledge(delivery)
                    continue
                for share in shares:
                    missing.discard(share.key)
                    found[share.key] = Part(delivery, share)
                if shares:
                    size += carried_bytes(self._store, delivery.body, delivery.content_type)
                if size > limit:
                    raise BatchUnusable(f"batch {manifest.batch} is over broker.max_batch_bytes {limit}")
        return {key: found[key] for key in wanted}

    async def _idled(self, manifest: BatchClosed, queue: str) -> float:
        """Return how much of an idle check counts: nothing while a part cannot come to us.

        Raises:
            QueueGone: None will come.
        """
        if not self.bus.usable:
            return 0.0
        if await self.bus.depth(queue) is None:
            raise QueueGone(queue)
        others = (beat for beat in self.peers.alive("operator") if beat.id != self.id)
        # one that has the same batch and waits for nothing is the queue's single active consumer
        working = (beat.detail for beat in others if beat.waits_for is None)
        held = any(isinstance(status, OperatorStatus) and status.ticket == manifest.ticket for status in working)
        return 0.0 if held else IDLE_CHECK

    async def _send_wanted(self, manifest: BatchClosed, parts: Mapping[PartKey, Part]) -> None:
        """Send submitters the experience parts they asked for, at least once."""
        if not manifest.wanted:
            return
        for reply_to, mail in await asyncio.to_thread(list, wanted_mails(manifest, parts)):
            try:
                if not await self.bus.publish("", reply_to, mail):
                    log.info("submitter_gone", reply_to=reply_to)
                elif mail.content_type == REFERENCE:
                    self._lent.add(manifest.ticket)
            except (MessageTooLarge, BusRefused) as error:
                log.warning("submitter_not_served", reply_to=reply_to, reason=str(error))

    async def _processed(self, manifest: BatchClosed, parts: Collection[Part]) -> Processed:
        """Return what the chain makes of the parts, its chunks stored where they are too large.

        Raises:
            QueueGone: Another operator has processed the batch meanwhile, and taken what the parts refer to with it.
            StoreUnavailable: What they refer to cannot be read now, or a chunk not be stored.
        """
        loop, broker, op = asyncio.get_running_loop(), self.config.broker, uuid.uuid4().hex
        is_stored = any(part.incoming.content_type == REFERENCE for part in parts)
        experiences, bad = await (patiently if is_stored else asyncio.to_thread)(decode_parts, parts, self._store)
        if bad and await self.bus.depth(self.topology.batch_queue(manifest.batch, manifest.ticket).name) is None:
            raise QueueGone(manifest.ticket)
        started = loop.time()
        left, metrics = await run_chain(self._chain, experiences, timeout=self.config.operator.timeout)
        metrics["time/operators"] = loop.time() - started
        split = functools.partial(split_to_size, compression=broker.compression, store=self._store)
        bodies = await asyncio.to_thread(split, left, self.bus.max_message_bytes)
        chunks = await stored(
            self._store, bodies, self.bus.max_message_bytes, lambda n: chunk_name(manifest.ticket, op, n)
        )
        metrics["experience_pipeline/chunks_by_reference"] = float(sum(not isinstance(one, bytes) for one in chunks))
        return Processed(op, chunks, len(left), metrics, bad)

    async def _publish(self, manifest: BatchClosed, processed: Processed) -> None:
        """Publish the set, and once all of it is confirmed the BatchReady that decides its ticket."""
        async with asyncio.TaskGroup() as group:
            for n, content in enumerate(processed.chunks):
                group.create_task(self._to_ready(manifest, chunk_mail(manifest, processed.op, n, content)))
        await self._tell(
            manifest,
            op=processed.op,
            state="ready" if processed.experiences else "empty",
            chunks=len(processed.chunks),
            experiences=processed.experiences,
            metrics={**manifest.metrics, **processed.metrics},
        )

    async def _tell(self, manifest: BatchClosed, *, op: str | None = None, **fields: Any) -> None:
        op = op or uuid.uuid4().hex
        ready = BatchReady(batch=manifest.batch, ticket=manifest.ticket, op=op, **fields)
        await self._to_ready(manifest, envelope(ready, message_id=f"ready-{manifest.ticket}-{op}"))

    async def _to_ready(self, manifest: BatchClosed, mail: Envelope) -> None:
        if not await self.bus.publish(self.topology.exchange("ready"), batch_key(manifest.batch), mail):
            # confirmed, yet nobody has it: what follows would delete the only copy
            raise RestartMe(f"{self.topology.ready.name} does not exist any more; a start declares it again")

    async def _delete(self, manifest: BatchClosed) -> None:
        await asyncio.sleep(UNBOUND_BEFORE_DELETE)
        name = self.topology.batch_queue(manifest.batch, manifest.ticket).name
        try:
            await self.bus.delete(name)
        except BusUnavailable as error:
            log.warning("batch_queue_left", queue=name, reason=f"{error}; it expires by itself")
            return
        if manifest.ticket in self._lent:
            self._lent.discard(manifest.ticket)
        else:
            await delete_blobs(self._store, f"{PARTS}/{manifest.ticket}")


def main(config: Config, agent_id: str = "operator-0") -> int:
    """Run one operator until the run is over; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Operator:
        metrics = MetricsWriter(config.path, "operator", agent_id, config.monitor.tensorboard)
        return Operator(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)

    return run_daemon(config, agent_id, "operator", build)
