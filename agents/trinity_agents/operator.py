"""The operator: a closed batch in, its experiences drained and processed, a processed batch out.

Waits for: manifests on ``closed``, then for every part that the manifest lists. An incomplete set is never published.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import structlog

from trinity_mq.algorithms.registry import ALGORITHMS
from trinity_mq.bus import Bus, Delivery, Envelope, QueueGone, Topology
from trinity_mq.bus.base import HeaderValue
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.experience import DecodeError, Experience
from trinity_mq.messages import BatchClosed, BatchReady
from trinity_mq.operators import AdvantageOperator, ExperienceOperatorV1, create_operators, run_chain
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.mail import EXPERIENCES, envelope, opened, park, settle
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.collector import UNBOUND_BEFORE_DELETE
from trinity_mq.scheduling.parts import split_to_size
from trinity_mq.telemetry import MetricsWriter

log = structlog.get_logger(__name__)

IDLE_CHECK = 2.0
"""Seconds without a part until we ask whether the batch queue still exists."""


PartKey = tuple[str, int]
"""``(attempt, part)``."""


class BatchUnusable(Exception):
    """This batch cannot be processed, by us or anybody; it fails as a batch, not as an operator."""


class Operator(Agent):
    """One batch at a time through the operator chain."""

    role = "operator"

    def __init__(
        self, config: Config, *, bus: Bus, topology: Topology, agent_id: str, metrics: MetricsWriter | None = None
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._metrics = metrics
        self._chain: list[ExperienceOperatorV1] = []
        self._ticket: str | None = None
        self._deletions: asyncio.Queue[tuple[float, str]] = asyncio.Queue()

    def detail(self) -> dict[str, Any]:
        """Return the ticket at work: the explorer's deadline for it does not run meanwhile."""
        return {"ticket": self._ticket}

    async def serve(self) -> None:
        """Process batches until drained or the run is over."""
        self._chain = create_operators(self.config.operator.operators)
        if ALGORITHMS[self.config.algorithm.algorithm_type].where == "operator":
            self._chain.append(AdvantageOperator(self.config.algorithm))
        for operator in self._chain:
            await operator.prepare()
        try:
            async with await self.bus.consume(self.topology.closed, prefetch=1) as feed:
                await self.with_background(self._until_over(), self._work(feed), self._delete_when_due())
        finally:
            for operator in self._chain:
                await operator.close()

    async def _until_over(self) -> None:
        """Return when asked to drain (after the batch at work) or when the run is over."""
        await self.woken.until(lambda: self.draining.is_set() or self.peers.detail("explorer").get("finished", False))
        try:
            async with asyncio.timeout(self.config.runner.drain_timeout):
                await self.woken.until(lambda: self._ticket is None)
        except TimeoutError:
            log.info("batch_given_back", ticket=self._ticket)

    async def _work(self, feed: Any) -> None:
        self.set_state("idle", "a closed batch")
        async for delivery in feed:
            message = await opened(self.bus, self.topology, delivery, self.id, expect=BatchClosed)
            if not isinstance(message, BatchClosed):
                continue
            self._ticket = message.ticket
            self.set_state("working")
            self.beat_soon()
            try:
                await self._batch(delivery, message)
            finally:
                self._ticket = None
                self.set_state("idle", "a closed batch")
                self.beat_soon()
                self.woken.notify()

    async def _batch(self, delivery: Delivery, manifest: BatchClosed) -> None:
        limit = self.config.broker.delivery_limit
        if delivery.deliveries_before >= limit:
            lives = delivery.deliveries_before
            reason = f"{lives} operators did not survive this batch (limit {limit}); its queue is kept for replay"
            await self._tell(manifest, state="failed", reason=reason)
            await park(self.bus, self.topology, delivery, reason, self.id)
            await settle(delivery)
            return
        try:
            parts = await self._drain(manifest)
            await self._send_wanted(manifest, parts)
            experiences = await self._decoded(list(parts.values()))
            started = asyncio.get_running_loop().time()
            experiences, metrics = await run_chain(self._chain, experiences)
            metrics["time/operators"] = asyncio.get_running_loop().time() - started
        except QueueGone:
            await self._tell(
                manifest, state="gone", reason="the batch queue does not exist: another operator has processed it"
            )
            await settle(delivery)
            return
        except BatchUnusable as error:
            await self._tell(manifest, state="failed", reason=str(error))
            await park(self.bus, self.topology, delivery, str(error), self.id)
            await settle(delivery)
            return
        except Exception as error:
            # an operator's bug costs its batch a try, never the daemon; the count ends it
            log.exception("batch_failed", ticket=manifest.ticket, attempt=delivery.deliveries_before + 1)
            if delivery.deliveries_before + 1 >= limit:
                reason = f"the operator chain failed {limit} times, last with {type(error).__name__}: {error}"
                await self._tell(manifest, state="failed", reason=reason)
                await park(self.bus, self.topology, delivery, reason, self.id)
                await settle(delivery)
            else:
                await delivery.requeue()
            return
        await self._publish(manifest, experiences, metrics)
        await settle(delivery)
        due = asyncio.get_running_loop().time() + UNBOUND_BEFORE_DELETE
        self._deletions.put_nowait((due, self.topology.batch_queue(manifest.batch, manifest.ticket).name))

    async def _drain(self, manifest: BatchClosed) -> dict[PartKey, bytes]:
        """Return the bodies that the manifest lists, in its order. Nothing is acknowledged: what we hold comes back if
        we die.
        """
        wanted = [(accepted.attempt, part) for accepted in manifest.accepted for part in range(accepted.parts)]
        if not wanted:
            return {}
        found: dict[PartKey, bytes] = {}
        missing, size = set(wanted), 0
        loop, deadline = asyncio.get_running_loop(), self.config.explorer.operator_deadline
        heard = loop.time()
        queue = self.topology.batch_queue(manifest.batch, manifest.ticket)
        async with await self.bus.consume(queue, prefetch=0) as feed:
            while missing:
                try:
                    async with asyncio.timeout(IDLE_CHECK):
                        delivery = await anext(feed)
                except TimeoutError:
                    if await self.bus.depth(queue.name) is None:
                        raise QueueGone(queue.name) from None
                    if loop.time() - heard > deadline and self.bus.usable:
                        raise BatchUnusable(
                            f"{len(missing)} of {len(wanted)} parts did not come in {deadline:g} s"
                        ) from None
                    self.set_state("working", f"{len(missing)} parts of batch {manifest.batch}")
                    continue
                attempt, part = delivery.headers.get("attempt"), delivery.headers.get("part")
                if not isinstance(attempt, str) or not isinstance(part, int):
                    await park(
                        self.bus,
                        self.topology,
                        delivery,
                        "an experience part needs the headers attempt and part",
                        self.id,
                    )
                    await settle(delivery)
                    continue
                key = (attempt, part)
                heard = loop.time()
                if key in missing:
                    missing.discard(key)
                    found[key] = delivery.body
                    size += len(delivery.body)
                if size > self.config.broker.max_batch_bytes:
                    raise BatchUnusable(
                        f"batch {manifest.batch} is over broker.max_batch_bytes {self.config.broker.max_batch_bytes}"
                    )
        self.set_state("working")
        return {key: found[key] for key in wanted}

    async def _send_wanted(self, manifest: BatchClosed, parts: dict[PartKey, bytes]) -> None:
        """Send submitters the experience parts they asked for, as they are; at least once."""
        for wanted in manifest.wanted:
            for accepted in manifest.accepted:
                if accepted.task_id != wanted.task_id:
                    continue
                for part in range(accepted.parts):
                    mail = Envelope(
                        body=parts[accepted.attempt, part],
                        kind="experience_part",
                        message_id=f"wanted-{accepted.attempt}-{part}",
                        content_type=EXPERIENCES,
                        headers={
                            "ticket": manifest.ticket,
                            "attempt": accepted.attempt,
                            "part": part,
                            "parts": accepted.parts,
                        },
                        correlation_id=wanted.correlation_id,
                    )
                    if not await self.bus.publish("", wanted.reply_to, mail):
                        log.info("submitter_gone", reply_to=wanted.reply_to)

    async def _decoded(self, bodies: Sequence[bytes]) -> list[Experience]:
        def decode() -> tuple[list[Experience], list[tuple[bytes, str]]]:
            good: list[Experience] = []
            bad: list[tuple[bytes, str]] = []
            for body in bodies:
                try:
                    good += Experience.deserialize_many(body)
                except DecodeError as error:
                    bad.append((body, str(error)))
            return good, bad

        good, bad = await asyncio.to_thread(decode)
        for body, reason in bad:
            log.warning("part_lost", reason=reason)
            headers = {
                "dead-reason": f"does not decode: {reason}",
                "dead-by": self.id,
                "dead-queue": f"batch.{self._ticket}",
            }
            copy = Envelope(body=body, kind="experience_part", content_type=EXPERIENCES, headers=headers)
            await self.bus.publish(self.topology.exchange("dead"), "experience_part", copy)
        return good

    async def _publish(self, manifest: BatchClosed, experiences: list[Experience], metrics: dict[str, float]) -> None:
        op = uuid.uuid4().hex
        key = batch_key(manifest.batch)
        bodies = await asyncio.to_thread(split_to_size, experiences, self.bus.max_message_bytes)
        async with asyncio.TaskGroup() as group:
            for n, body in enumerate(bodies):
                headers: dict[str, HeaderValue] = {
                    "kind": "experience_chunk",
                    "version": 1,
                    "batch": manifest.batch,
                    "ticket": manifest.ticket,
                    "op": op,
                    "n": n,
                }
                chunk = Envelope(
                    body=body,
                    kind="experience_chunk",
                    message_id=f"{manifest.ticket}-{op}-{n}",
                    content_type=EXPERIENCES,
                    headers=headers,
                )
                group.create_task(self.bus.publish(self.topology.exchange("ready"), key, chunk))
        await self._tell(
            manifest,
            op=op,
            state="ready" if experiences else "empty",
            chunks=len(bodies),
            experiences=len(experiences),
            metrics={**manifest.metrics, **metrics},
        )
        if self._metrics is not None and isinstance(manifest.batch, int):
            self._metrics.write(
                manifest.batch, {"experience_pipeline/experience_count": float(len(experiences)), **metrics}
            )

    async def _tell(self, manifest: BatchClosed, *, op: str | None = None, **fields: Any) -> None:
        op = op or uuid.uuid4().hex
        ready = BatchReady(batch=manifest.batch, ticket=manifest.ticket, op=op, **fields)
        await self.bus.publish(
            self.topology.exchange("ready"),
            batch_key(manifest.batch),
            envelope(ready, message_id=f"ready-{manifest.ticket}-{op}"),
        )

    async def _delete_when_due(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, name = await self._deletions.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self.bus.delete(name)


def main(config: Config, agent_id: str = "operator-0") -> int:
    """Run one operator until the run is over; returns the exit code."""

    def build(bus: Bus, topology: Topology) -> Operator:
        metrics = MetricsWriter(config.path, "operator", agent_id, config.monitor.tensorboard)
        return Operator(config, bus=bus, topology=topology, agent_id=agent_id, metrics=metrics)

    return run_daemon(config, agent_id, "operator", build)
