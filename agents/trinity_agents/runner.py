"""The runner: a slice in, its workflow run against an engine, experiences out, then the outcome, then the ack.

Waits for: slices on ``tasks.train`` and ``tasks.eval``, and for an engine that holds the weights.
"""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
from typing import Any

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, Envelope, MessageTooLarge, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.experience import EncodeError
from trinity_mq.messages import DecodeError, Outcome, TaskResult, TaskSlice, decode
from trinity_mq.models import InferenceModel
from trinity_mq.models.errors import EngineLost
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.mail import EXPERIENCES, envelope, park, settle
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.isolated import ChildDied, IsolatedPool
from trinity_mq.scheduling.parts import split_to_size
from trinity_mq.scheduling.workflow_runner import SliceOutcome, WorkflowRunner

log = structlog.get_logger(__name__)

SliceKey = tuple[str, int, int]
REMEMBERED = 10_000
"""Slices whose result is out although their acknowledgement was void."""


class Runner(Agent):
    """Does slices, as many at a time as ``runner.concurrency``, evaluation beside training."""

    role = "runner"

    def __init__(self, config: Config, *, bus: Bus, topology: Topology, agent_id: str) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._workflows = WorkflowRunner(config, None, runner_id=agent_id)
        self._isolated = IsolatedPool(config.runner.max_isolated)
        self._running: dict[SliceKey, asyncio.Event] = {}
        self._reported: dict[SliceKey, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = 0

    def detail(self) -> dict[str, Any]:
        """Return what runs here."""
        return {"running": len(self._running), "done": self._done}

    async def serve(self) -> None:
        """Take slices until drained or the run is over."""
        feeds = [
            # prefetch is the number of free slots: nothing is delivered that is not started
            await self.bus.consume(lane, prefetch=self.config.runner.concurrency)
            for lane in (self.topology.tasks_train, self.topology.tasks_eval)
        ]
        try:
            async with asyncio.TaskGroup() as slices:
                takers = [slices.create_task(self._take(feed, slices)) for feed in feeds]
                self.set_state("idle", "a slice")
                await self.woken.until(
                    lambda: self.draining.is_set() or self.peers.detail("explorer").get("finished", False)
                )
                for feed in feeds:
                    await feed.stop()
                await asyncio.wait(takers)
                await self._finish_or_give_back()
        finally:
            for feed in feeds:
                await feed.close()
            await self._isolated.close()
            await self._workflows.close()

    async def _take(self, feed: Consumer, slices: asyncio.TaskGroup) -> None:
        async for delivery in feed:
            task = slices.create_task(self._handle(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, delivery: Delivery) -> None:
        try:
            piece = decode(delivery.body, TaskSlice, delivery.content_type)
        except DecodeError as error:
            await park(self.bus, self.topology, delivery, f"does not decode: {error}", self.id)
            await settle(delivery)
            return
        key = (piece.ticket, piece.task_id, piece.run_base)
        if key in self._running:
            # our own work under a void delivery: the new one is its acknowledgement
            await self._running[key].wait()
        if key in self._reported:
            await settle(delivery)
            del self._reported[key]
            return
        self._running[key] = over = asyncio.Event()
        self.set_state("working")
        try:
            await self._slice(delivery, piece)
        finally:
            del self._running[key]
            over.set()
            if not self._running:
                self.set_state("idle", "a slice")
            self.woken.notify()

    async def _slice(self, delivery: Delivery, piece: TaskSlice) -> None:
        attempt = uuid.uuid4().hex
        limit = self.config.broker.delivery_limit
        if delivery.deliveries_before >= limit:
            await self._poison(
                delivery,
                piece,
                attempt,
                f"{delivery.deliveries_before} runners did not survive this slice (limit {limit})",
            )
            return
        if self._is_forgotten(piece):
            await settle(delivery)
            return
        started = asyncio.get_running_loop().time()
        try:
            outcome = await self._run(delivery, piece)
        except ChildDied as error:
            if delivery.deliveries_before + 1 < limit:
                log.warning("slice_killed_its_process", ticket=piece.ticket, task=piece.task_id, reason=str(error))
                await delivery.requeue()
            else:
                await self._poison(delivery, piece, attempt, f"it killed its process {limit} times, last: {error}")
            return
        parts = 0
        if outcome.experiences and piece.deliver != "none":
            try:
                published = await self._publish_parts(piece, attempt, outcome)
            except (EncodeError, MessageTooLarge) as error:
                # nothing of it is out: a part is only published when all of them can be encoded
                outcome, published = SliceOutcome.failure(str(error)), 0
            if published is None:
                await self._report(piece, self._result(piece, attempt, "late", message="its batch is closed"))
                await settle(delivery)
                return
            parts = published
        state: Outcome = (
            "finished" if len(outcome.runs) == piece.repeat_times else "partial" if outcome.runs else "failed"
        )
        result = self._result(
            piece,
            attempt,
            state,
            runs=list(outcome.runs),
            parts=parts,
            metrics=outcome.metrics,
            message=outcome.message,
            seconds=asyncio.get_running_loop().time() - started,
            version_min=outcome.version_min,
            version_max=outcome.version_max,
        )
        await self._report(piece, result)
        self._done += 1
        if not await settle(delivery):
            # the broker delivers it again; while we live we know that it is done
            self._reported[piece.ticket, piece.task_id, piece.run_base] = attempt
            while len(self._reported) > REMEMBERED:
                del self._reported[next(iter(self._reported))]

    async def _run(self, delivery: Delivery, piece: TaskSlice) -> SliceOutcome:
        if delivery.deliveries_before == 0:
            return await self._workflows.run_slice(piece, self._engine)
        # it has come back before: what it kills now is a child
        log.info("isolated", ticket=piece.ticket, task=piece.task_id, deliveries=delivery.deliveries_before)
        return await self._isolated.run(piece, self.config, self._engine)

    async def _poison(self, delivery: Delivery, piece: TaskSlice, attempt: str, reason: str) -> None:
        """End a slice that nobody survives: its outcome, then a copy for people to look at, then the ack."""
        await self._report(piece, self._result(piece, attempt, "poisoned", message=reason))
        await park(self.bus, self.topology, delivery, reason, self.id)
        await settle(delivery)

    def _engine(self) -> InferenceModel:
        """Return the engine to use now: the least loaded living one."""
        engines = [beat for beat in self.peers.alive("engine") if beat.detail.get("role") == "rollout"]
        if not engines:
            raise EngineLost("no living rollout engine is known")
        least = min(beat.detail.get("load", 0) for beat in engines)
        chosen = random.choice([beat for beat in engines if beat.detail.get("load", 0) == least])
        return InferenceModel.from_dict(chosen.detail)

    def _is_forgotten(self, piece: TaskSlice) -> bool:
        """Say whether its explorer, at a time when it must have known of the ticket, did not list it: nobody waits for
        it.
        """
        beat = self.peers.latest(piece.explorer) if piece.explorer else None
        return beat is not None and beat.seq >= piece.opened_beat and piece.ticket not in beat.detail.get("open", ())

    async def _publish_parts(self, piece: TaskSlice, attempt: str, outcome: SliceOutcome) -> int | None:
        """Publish the experiences, confirmed; None when their batch queue is gone."""
        bodies = await asyncio.to_thread(split_to_size, outcome.experiences, self.bus.max_message_bytes)
        queue = self.topology.batch_queue(piece.batch, piece.ticket)
        key = self.topology.batch_routing_key(piece.batch, piece.ticket)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + piece.slice_timeout
        for part, body in enumerate(bodies):
            headers: dict[str, Any] = {
                "kind": "experience_part",
                "version": 1,
                "batch": piece.batch,
                "ticket": piece.ticket,
                "attempt": attempt,
                "part": part,
                "parts": len(bodies),
            }
            if outcome.version_min:
                headers["policy_version"] = f"{outcome.version_min[0]}.{outcome.version_min[1]}"
            mail = Envelope(
                body=body,
                kind="experience_part",
                message_id=f"{attempt}-{part}",
                content_type=EXPERIENCES,
                headers=headers,
            )
            while not await self.bus.publish(self.topology.exchange("experiences"), key, mail):
                if await self.bus.depth(queue.name) is None or self._is_forgotten(piece) or loop.time() > give_up:
                    return None
                await asyncio.sleep(
                    0.2
                )  # it exists unbound: about to be closed, and then missing from the explorer's next beat
        return len(bodies)

    def _result(self, piece: TaskSlice, attempt: str, outcome: Outcome, **fields: Any) -> TaskResult:
        return TaskResult(
            batch=piece.batch,
            ticket=piece.ticket,
            task_id=piece.task_id,
            run_base=piece.run_base,
            repeat_times=piece.repeat_times,
            attempt=attempt,
            outcome=outcome,
            runner=self.id,
            **fields,
        )

    async def _report(self, piece: TaskSlice, result: TaskResult) -> None:
        await self.bus.publish(
            self.topology.exchange("results"),
            batch_key(piece.batch),
            envelope(result, message_id=f"result-{result.attempt}"),
        )

    async def _finish_or_give_back(self) -> None:
        """Wait for what runs; what is not done in ``drain_timeout`` goes back to the queue for another runner."""
        if self._tasks:
            self.set_state("draining", f"{len(self._tasks)} slices")
            await asyncio.wait(self._tasks, timeout=self.config.runner.drain_timeout)
        for task in list(self._tasks):
            log.info("slice_given_back", task=task.get_name())
            task.cancel()


def main(config: Config, agent_id: str = "runner-0") -> int:
    """Run one runner until the run is over; returns the exit code."""
    gc.freeze()  # what the imports made stays for good: a full collection over it costs a fifth of a second
    return run_daemon(
        config, agent_id, "runner", lambda bus, topology: Runner(config, bus=bus, topology=topology, agent_id=agent_id)
    )
