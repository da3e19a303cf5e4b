"""The runner: a slice in, its workflow run against an engine, experiences out, then the outcome, then the ack.

Waits for: slices on ``tasks.train`` and ``tasks.eval``, and for an engine that holds the weights.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from trinity_agents.runner.crash_history import CrashHistory
from trinity_agents.runner.in_flight_slice import CANCELLED, PREEMPTED, InFlightSlice, OpenTickets, SliceKey
from trinity_agents.runner.process_pool import ChildDied, ProcessPool
from trinity_agents.runner.result_publisher import ResultPublisher, end_of
from trinity_agents.runner.slice_executor import STOP_PATIENCE, SliceExecutor
from trinity_agents.runner.watchdog import Watchdog
from trinity_mq.bus import Bus, Consumer, Delivery, Topology
from trinity_mq.config import Config
from trinity_mq.messages import Outcome, RunnerStatus, TaskSlice
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.rollout.workflow_runner import SliceOutcome, WorkflowRunner
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import acknowledge, dead_letter, decode_or_dead_letter, requeue
from trinity_mq.runtime.errors import EXIT_RECYCLE, EXIT_RESTART, RecycleMe, RestartMe
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.transport.blobs import StoreUnavailable, open_store

log = structlog.get_logger(__name__)

REMEMBERED = 10_000
"""Slices whose result is out: an acknowledgement may be lost without our hearing of it."""
STUCK_AFTER = 5.0
"""Seconds that a thread given up has to end until it counts as stuck."""
LAST_WORDS = 5.0
"""Seconds for what is published after ``runner.drain_timeout``."""
LAST_BREATH = 3.0
"""Seconds from the end of a runner to the end of its process, where workflows stand in the way."""
LISTED = 16
"""Slices that a beat names: ``[ticket, task, first run, seconds since it came]``."""
IDLE_AFTER = 0.25
"""Seconds without a slice until the beat says so."""


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
        isolated: ProcessPool | None = None,
        end_process: Callable[[int], None] = lambda code: None,
        watchdog: Watchdog | None = None,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._end_process, self._watchdog = end_process, watchdog
        self._engines = EngineSelector(lambda: self.peers.alive("engine"))
        self._turns = SliceExecutor(
            config,
            self._engines,
            workflows=workflows or WorkflowRunner(config, None, runner_id=agent_id),
            isolated=isolated,
            go_on_without=self._go_on_without,
        )
        self._open = OpenTickets(self.peers)
        self._reports = ResultPublisher(
            bus,
            topology,
            config.broker,
            open_store(config.broker, topology.run),
            runner=agent_id,
            woken=self.woken,
            forgotten=self._open.forgotten,
            in_hand=lambda: len(self._held),
        )
        self._held: dict[SliceKey, InFlightSlice] = {}
        self._reported: dict[SliceKey, None] = {}
        self._deaths = CrashHistory()
        self._tasks: set[asyncio.Task[None]] = set()
        self._given_up: set[asyncio.Task[None]] = set()
        """Tasks in workflows that did not end when they were told to."""
        self._failure: BaseException | None = None
        self._leaving: RestartMe | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._attempts = itertools.count(uuid.uuid4().int >> 1)  # unique, without asking the kernel for each
        self._done = 0
        self._counts: Counter[str] = Counter()

    def detail(self) -> RunnerStatus:
        """Return what runs here (the oldest slices by name) and how many slices ended in which way."""
        oldest = itertools.islice(self._held.values(), LISTED)
        return RunnerStatus(
            running=len(self._held),
            slices=[(*work.key, round(work.seconds, 1)) for work in oldest],
            done=self._done,
        ).model_copy(update=self._counts)

    # -- taking slices

    async def serve(self) -> None:
        """Take slices until drained, worn out or the run is over.

        Raises:
            RestartMe: A fresh process is wanted.
        """
        runner = self.config.runner
        lanes = (
            (self.topology.tasks_train, runner.concurrency),
            (self.topology.tasks_eval, runner.eval_slots),
        )
        # prefetch is the number of free slots: nothing is delivered that is not started
        feeds = [await self.bus.consume(lane, prefetch=slots) for lane, slots in lanes]
        try:
            async with asyncio.TaskGroup() as group:
                watch = [group.create_task(self._watch())]
                if self._watchdog is not None:
                    watch.append(group.create_task(self._watchdog.run()))
                takers = [group.create_task(self._take(feed)) for feed in feeds]
                try:
                    self.set_state("idle", "a slice")
                    await self.woken.until(self._is_over)
                    for feed in feeds:
                        await feed.stop()
                    await asyncio.wait(takers)
                    await self._finish_or_give_back()
                finally:
                    for task in self._tasks:
                        task.cancel()
                for task in watch:
                    task.cancel()
        finally:
            await self._drop()
            await self._reports.close()
            for feed in feeds:
                await feed.close()
            await self._turns.close()
            if self._given_up:
                log.error("workflows_stand_in_the_way", runner=self.id, tasks=len(self._given_up))
                wanted = EXIT_RECYCLE if isinstance(self._leaving, RecycleMe) else EXIT_RESTART
                self._end_process(wanted if self._leaving or self._failure else 0)
        if self._leaving:
            raise self._leaving

    def _is_over(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return bool(self._leaving or self.draining.is_set() or self.peers.explorer.finished)

    async def _take(self, feed: Consumer) -> None:
        async for delivery in feed:
            self._start(self._handle(delivery))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._given_up.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.woken.notify()

    def _leave(self, why: RestartMe) -> None:
        """Give back what cannot be finished, and have a fresh process started."""
        if self._leaving is None:
            log.info("leaving", runner=self.id, reason=str(why))
            self._leaving = why
            self.woken.notify()

    async def _watch(self) -> None:
        """Look at every beat: which engines live, which slices nobody waits for, what is stuck."""
        while True:
            await self.peers.changed.wait()
            self._engines.receive()
            for work in self._held.values():
                if work.running and self._open.forgotten(work.task_slice):
                    self._turns.stop(work, CANCELLED)
            self._check_stuck()

    def _check_stuck(self) -> None:
        stuck = len(self._given_up) + len(stuck_threads(asyncio.get_running_loop().time() - STUCK_AFTER))
        self._counts["stuck"] = stuck
        if not stuck:
            del self._counts["stuck"]
        most = self.config.runner.max_stuck
        if stuck > most:
            self._leave(RestartMe(f"{stuck} workflows that were given up run on (runner.max_stuck {most})"))

    # -- one slice

    async def _handle(self, delivery: Delivery) -> None:
        task_slice = await decode_or_dead_letter(self.bus, self.topology, delivery, self.id, expect=TaskSlice)
        if not isinstance(task_slice, TaskSlice):
            return
        key = (task_slice.ticket, task_slice.task_id, task_slice.run_base)
        while key in self._held:
            # our own work under a void delivery: the new one is its acknowledgement
            await self._held[key].over.wait()
        if key in self._reported:
            self._counts["duplicates"] += 1
            await acknowledge(delivery)
            return
        work = self._held[key] = InFlightSlice(task_slice, delivery, f"{next(self._attempts):032x}")
        self.set_state("working")
        try:
            await self._slice(work)
        finally:
            if not work.given_up:
                self._release(work)

    def _release(self, work: InFlightSlice) -> None:
        del self._held[work.key]
        work.over.set()
        if not self._held and self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(IDLE_AFTER, self._rest)

    def _rest(self) -> None:
        self._resting = None
        if not self._held and self.state == "working":
            self.set_state("idle", "a slice")

    async def _slice(self, work: InFlightSlice) -> None:
        limit = self.config.broker.delivery_limit
        lives = work.delivery.deliveries_before
        if lives >= limit:
            await self._poison(work, f"{lives} runners did not survive this slice (limit {limit})")
        elif self._open.forgotten(work.task_slice):
            self._counts["cancelled"] += 1
            await acknowledge(work.delivery)
        else:
            try:
                outcome = await self._turns.take(work)
            except ChildDied as error:
                await self._again(work, "it killed its process", error)
            else:
                if outcome is not None:
                    await self._finish(work, outcome)

    def _go_on_without(self, work: InFlightSlice) -> None:
        """Leave a workflow that does not end behind, and answer for its slice."""
        if work.task is not None:
            self._tasks.discard(work.task)
            self._given_up.add(work.task)
        self._start(self._finish_without(work))
        self._check_stuck()

    async def _finish_without(self, work: InFlightSlice) -> None:
        try:
            await self._finish(work, work.tally.outcome(work.seconds))
        finally:
            self._release(work)

    # -- answering for it

    async def _finish(self, work: InFlightSlice, outcome: SliceOutcome) -> None:
        """Publish what there is, then what became of the slice, then acknowledge."""
        end: Outcome = end_of(work.task_slice, outcome)
        if work.why == CANCELLED:
            self._counts["cancelled"] += 1
            if not work.task_slice.keep_partial:
                await acknowledge(work.delivery)
                return
            end = end if outcome.runs else "cancelled"
        try:
            result = await self._reports.deliver(work, outcome, end)
        except StoreUnavailable as error:
            await self._again(work, "its experiences could not be stored", error)
            return
        if result.outcome == "late":
            self._counts["late"] += 1
        await self._reports.report(work, result)
        self._remember(work)
        self._done += 1
        await acknowledge(work.delivery)
        if self.config.runner.recycle_after is not None and self._done >= self.config.runner.recycle_after:
            self._leave(RecycleMe(f"{self._done} slices done (runner.recycle_after)"))

    async def _again(self, work: InFlightSlice, what: str, error: Exception) -> None:
        """Give a slice back for another try, somewhere; at the limit its end is told."""
        limit, task_slice = self.config.broker.delivery_limit, work.task_slice
        self._deaths.note(work, self.id, f"{what}: {error}")
        if work.delivery.deliveries_before + 1 < limit:
            log.warning(
                "slice_comes_again", ticket=task_slice.ticket, task=task_slice.task_id, why=what, reason=str(error)
            )
            self._counts["given_back"] += 1
            await requeue(work.delivery)
        else:
            await self._poison(work, f"{what} {limit} times, last: {error}")

    async def _poison(self, work: InFlightSlice, reason: str) -> None:
        """End a slice that nobody survives: its outcome, then a copy for people to look at, then the ack."""
        self._counts["poisoned"] += 1
        await self._reports.report(work, self._reports.result(work, "poisoned", reason))
        self._remember(work)
        history = self._deaths.history(work)
        work.delivery.headers = {**work.delivery.headers, "dead-history": "\n".join(history)}
        await dead_letter(self.bus, self.topology, work.delivery, reason, self.id)
        self._deaths.forget(work)
        await acknowledge(work.delivery)

    def _remember(self, work: InFlightSlice) -> None:
        self._reported[work.key] = None
        while len(self._reported) > REMEMBERED:
            del self._reported[next(iter(self._reported))]

    # -- the end

    async def _finish_or_give_back(self) -> None:
        """Wait for what runs. What is not done in ``drain_timeout`` goes back to the queue for another runner, or
        leaves the runs it has, where that is wanted.
        """
        loop = asyncio.get_running_loop()
        if self._tasks:
            self.set_state("draining", f"{len(self._tasks)} slices")
            await self._wait_for_tasks(loop.time() + self.config.runner.drain_timeout)
        for work in list(self._held.values()):
            if work.running and work.task is not None:
                if work.task_slice.keep_partial and work.tally.experiences:
                    self._turns.stop(work, PREEMPTED)
                else:
                    log.info("slice_given_back", ticket=work.task_slice.ticket, task=work.task_slice.task_id)
                    self._counts["given_back"] += 1
                    work.task.cancel()
        await self._wait_for_tasks(loop.time() + LAST_WORDS)

    async def _wait_for_tasks(self, until: float) -> None:
        while self._tasks and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    async def _drop(self) -> None:
        """See what was cancelled end; what does not is left behind."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_PATIENCE)
        self._given_up |= self._tasks
        if self._resting is not None:
            self._resting.cancel()


def main(config: Config, agent_id: str = "runner-0") -> int:
    """Run one runner until the run is over; returns the exit code."""
    os.environ.update(config.runner.env)
    gc.freeze()  # what the imports made stays for good: a full collection over it costs a fifth of a second

    dog = Watchdog(config.runner.max_block)

    def build(bus: Bus, topology: Topology) -> Runner:
        return Runner(config, bus=bus, topology=topology, agent_id=agent_id, end_process=_end_process, watchdog=dog)

    return run_daemon(config, agent_id, "runner", build)


def _end_process(code: int) -> None:
    """End the process soon, whatever still runs in it: a workflow that ignores its end would keep the loop alive."""
    last = threading.Timer(LAST_BREATH, os._exit, (code,))
    last.daemon = True
    last.start()
