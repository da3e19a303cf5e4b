"""The runner: a slice in, its workflow run against an engine, experiences out, then the outcome, then the ack.

Waits for: slices on ``tasks.train`` and ``tasks.eval``, and for an engine that holds the weights.
"""

from __future__ import annotations

import asyncio
import gc
import uuid
from typing import Any

import structlog
from pydantic import ValidationError

from trinity_mq.bus import Bus, Consumer, Delivery, MessageTooLarge, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.experience import EncodeError
from trinity_mq.messages import TaskResult, TaskSlice, Version
from trinity_mq.models import InferenceModel
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import RestartMe
from trinity_mq.runtime.mail import envelope, give_back, opened, park, settle
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.scheduling.engine_choice import choose_engine
from trinity_mq.scheduling.isolated import GRACE, START_LIMIT, ChildDied, IsolatedPool
from trinity_mq.scheduling.parts import end_of, part_mail, slice_result, split_to_size
from trinity_mq.scheduling.workflow_runner import SliceOutcome, WorkflowRunner

log = structlog.get_logger(__name__)

SliceKey = tuple[str, int, int]
REMEMBERED = 10_000
"""Slices whose result is out: an acknowledgement may be lost without our hearing of it."""
ISOLATED_MARGIN = START_LIMIT + 2 * GRACE
"""Seconds over a slice's own time that a process of its own may take."""
RETURNED_PAUSE = 0.2
"""Seconds between tries of a part that came back although its queue exists, unless a beat comes first."""


class Runner(Agent):
    """Does slices, as many at a time as ``runner.concurrency``, evaluation beside training."""

    role = "runner"

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        agent_id: str,
        workflows: WorkflowRunner | None = None,
        isolated: IsolatedPool | None = None,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._workflows = workflows or WorkflowRunner(config, None, runner_id=agent_id)
        self._isolated = isolated or IsolatedPool(config.runner.max_isolated)
        self._running: dict[SliceKey, asyncio.Event] = {}
        self._reported: dict[SliceKey, None] = {}
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
        piece = await opened(self.bus, self.topology, delivery, self.id, expect=TaskSlice)
        if not isinstance(piece, TaskSlice):
            return
        key = (piece.ticket, piece.task_id, piece.run_base)
        while key in self._running:
            # our own work under a void delivery: the new one is its acknowledgement
            await self._running[key].wait()
        if key in self._reported:
            log.info("slice_known", ticket=piece.ticket, task=piece.task_id)
            await settle(delivery)
            return
        self._running[key] = over = asyncio.Event()
        self.set_state("working")
        try:
            await self._slice(delivery, piece)
        finally:
            del self._running[key]
            over.set()
            if not self._running and self.state == "working":
                self.set_state("idle", "a slice")
            self.woken.notify()

    async def _slice(self, delivery: Delivery, piece: TaskSlice) -> None:
        attempt = uuid.uuid4().hex
        limit = self.config.broker.delivery_limit
        if delivery.deliveries_before >= limit:
            lives = delivery.deliveries_before
            await self._poison(delivery, piece, attempt, f"{lives} runners did not survive this slice (limit {limit})")
            return
        if self._is_forgotten(piece):
            log.info("slice_forgotten", ticket=piece.ticket, task=piece.task_id)
            await settle(delivery)
            return
        started = asyncio.get_running_loop().time()
        try:
            outcome = await self._run(delivery, piece)
        except ChildDied as error:
            if delivery.deliveries_before + 1 < limit:
                log.warning("slice_killed_its_process", ticket=piece.ticket, task=piece.task_id, reason=str(error))
                await give_back(delivery)
            else:
                await self._poison(delivery, piece, attempt, f"it killed its process {limit} times, last: {error}")
            return
        seconds = asyncio.get_running_loop().time() - started
        bodies, result = await self._prepared(piece, attempt, outcome, seconds)
        if not await self._publish_parts(piece, attempt, bodies, outcome.version_min):
            result = slice_result(piece, attempt, self.id, "late", message="its batch is closed", seconds=seconds)
        await self._report(piece, result)
        self._done += 1
        await settle(delivery)

    async def _run(self, delivery: Delivery, piece: TaskSlice) -> SliceOutcome:
        if delivery.deliveries_before == 0:
            return await self._workflows.run_slice(piece, self._engine)
        # it has come back before: what it kills now is a child
        log.info("isolated", ticket=piece.ticket, task=piece.task_id, deliveries=delivery.deliveries_before)
        try:
            # the wait for a free process is the slice's time too: the broker takes back what is held for too long
            async with asyncio.timeout(piece.slice_timeout + ISOLATED_MARGIN):
                return await self._isolated.run(piece, self.config, self._engine)
        except TimeoutError:
            return SliceOutcome.failure(
                f"not done within the {piece.slice_timeout:g} s of the slice, the wait for one of "
                f"{self.config.runner.max_isolated} isolated processes (runner.max_isolated) included"
            )

    async def _prepared(
        self, piece: TaskSlice, attempt: str, outcome: SliceOutcome, seconds: float
    ) -> tuple[list[bytes], TaskResult]:
        """Return the experience parts and the result. Nothing is out before all of it is known to be fit to travel."""
        try:
            bodies: list[bytes] = []
            if piece.deliver != "none":
                bodies = await asyncio.to_thread(split_to_size, outcome.experiences, self.bus.max_message_bytes)
            result = slice_result(
                piece,
                attempt,
                self.id,
                end_of(piece, outcome),
                outcome=outcome,
                parts=len(bodies),
                seconds=seconds,
            )
        except (EncodeError, MessageTooLarge, ValidationError) as error:
            log.warning("slice_unfit", ticket=piece.ticket, task=piece.task_id, reason=str(error))
            return [], slice_result(piece, attempt, self.id, "failed", message=str(error), seconds=seconds)
        return bodies, result

    async def _poison(self, delivery: Delivery, piece: TaskSlice, attempt: str, reason: str) -> None:
        """End a slice that nobody survives: its outcome, then a copy for people to look at, then the ack."""
        await self._report(piece, slice_result(piece, attempt, self.id, "poisoned", message=reason))
        await park(self.bus, self.topology, delivery, reason, self.id)
        await settle(delivery)

    def _engine(self) -> InferenceModel:
        """Return the engine to use now: the least loaded living one."""
        return choose_engine(self.peers.alive("engine"))

    def _is_forgotten(self, piece: TaskSlice) -> bool:
        """Say whether its explorer, at a time when it must have known of the ticket, did not list it: nobody waits for
        it.
        """
        beat = self.peers.latest(piece.explorer) if piece.explorer else None
        return beat is not None and beat.seq >= piece.opened_beat and piece.ticket not in beat.detail.get("open", ())

    async def _publish_parts(self, piece: TaskSlice, attempt: str, bodies: list[bytes], oldest: Version | None) -> bool:
        """Publish the experiences, confirmed; False when their batch is closed."""
        queue = self.topology.batch_queue(piece.batch, piece.ticket)
        key = self.topology.batch_routing_key(piece.batch, piece.ticket)
        exchange = self.topology.exchange("experiences")
        loop = asyncio.get_running_loop()
        give_up = loop.time() + piece.slice_timeout
        for part, body in enumerate(bodies):
            mail = part_mail(piece, attempt, part, len(bodies), body, oldest)
            while not await self.bus.publish(exchange, key, mail):
                if await self.bus.depth(queue.name) is None or self._is_forgotten(piece) or loop.time() > give_up:
                    return False
                # it exists unbound: about to be closed, and then missing from the explorer's next beat
                await self.woken.wait(RETURNED_PAUSE)
        return True

    async def _report(self, piece: TaskSlice, result: TaskResult) -> None:
        mail = envelope(result, message_id=f"result-{result.attempt}")
        if not await self.bus.publish(self.topology.exchange("results"), batch_key(piece.batch), mail):
            raise RestartMe(f"{self.topology.results.name} does not exist any more; a start declares it again")
        self._reported[piece.ticket, piece.task_id, piece.run_base] = None
        while len(self._reported) > REMEMBERED:
            del self._reported[next(iter(self._reported))]

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
