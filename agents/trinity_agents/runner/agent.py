"""The runner: takes a task slice, runs its workflow with an engine, publishes experiences and outcome, acknowledges it.

Waits for: slices on ``tasks.train`` and ``tasks.eval``, and an engine that holds the weights.
A watchdog ends the process if a workflow blocks the event loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import os
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from trinity_agents.runner.circuit import CircuitBreaker
from trinity_agents.runner.in_flight_slice import (
    CANCELLED,
    PREEMPTED,
    InFlightSlice,
    OpenTickets,
    SliceGroup,
    SliceKey,
)
from trinity_agents.runner.lane_intake import LaneIntake
from trinity_agents.runner.process_pool import ChildDied, ProcessPool
from trinity_agents.runner.result_publisher import ResultPublisher
from trinity_agents.runner.slice_executor import STOP_PATIENCE, SliceExecutor
from trinity_mq.bus import Bus, Delivery, Topology
from trinity_mq.config import Config
from trinity_mq.messages import Lane, Outcome, RunnerStatus, TaskSlice, TaskSlices
from trinity_mq.models.engine_selection import EngineSelector
from trinity_mq.rollout.workflow_runner import SliceOutcome, WorkflowRunner
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.deliveries import (
    CrashLog,
    DeliveryHistory,
    acknowledge,
    dead_letter,
    decode_or_dead_letter,
    put_back,
    return_delivery,
)
from trinity_mq.runtime.errors import (
    EXIT_RECYCLE,
    EXIT_RESTART,
    RecycleRequested,
    RestartRequested,
    dead_letter_reason,
    is_content_error,
)
from trinity_mq.runtime.serve import run_daemon
from trinity_mq.runtime.threads import stuck_threads
from trinity_mq.telemetry.durations import UsualDuration
from trinity_mq.telemetry.trace import BATCH, TASK, span
from trinity_mq.transport.blobs import StoreUnavailable, open_store

log = structlog.get_logger(__name__)

SEEN_TICKETS = 1000
"""Maximum number of tickets that are remembered, so that the first slice of each ticket is logged once."""
REMEMBERED = 10_000
"""Maximum number of reported slices that are remembered, because a slice is redelivered if its acknowledgement is lost.
"""
MAX_STUCK = 16
"""Maximum number of abandoned workflows that may still be running. With more, the runner drains and restarts: only the
end of the process ends such threads and returns their memory.
"""
MAX_BLOCK = 30.0
"""Seconds for which a workflow may block the event loop. After that the runner ends its own process, since it can
neither send heartbeats nor be drained meanwhile.
"""
STUCK_AFTER = 5.0
"""Seconds after which an abandoned thread counts as stuck."""
FINAL_FLUSH = 5.0
"""Maximum seconds, after ``runner.drain_timeout``, to publish the last results and return the last slices."""
EXIT_GRACE = 3.0
"""Seconds from the end of the runner to the forced end of its process, if workflows ignore their cancellation."""
LISTED = 4
"""Maximum number of slices that a heartbeat lists, as ``[ticket, task, first run, seconds since the start]``."""
IDLE_AFTER = 0.25
"""Seconds without a slice after which the heartbeat reports ``idle``."""

TICK = 1.0
"""Seconds between two checks of the event loop by the watchdog."""


class Runner(Agent):
    """Executes up to ``runner.concurrency`` training slices and ``runner.eval_slots`` evaluation slices at a time."""

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
        crash_notes: CrashLog | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        super().__init__(config, bus=bus, topology=topology, agent_id=agent_id)
        self._end_process, self._watchdog, self._remembered = end_process, watchdog, remembered
        self._crash_notes = crash_notes or CrashLog()
        self._engines = EngineSelector(lambda: self.peers.alive("engine"))
        self._executor = SliceExecutor(
            config,
            self._engines,
            workflows=workflows or WorkflowRunner(config, None, runner_id=agent_id),
            isolated=isolated,
            on_detached=self._take_over,
            crash_notes=self._crash_notes,
        )
        self._open = OpenTickets(self.peers)
        self._seen_tickets: deque[str] = deque(maxlen=SEEN_TICKETS)
        """Tickets whose first slice has been logged."""
        self._publisher = ResultPublisher(
            bus,
            topology,
            config.broker,
            open_store(config.broker, topology.run),
            runner=agent_id,
            woken=self.woken,
            abandoned=self._open.abandoned,
            in_flight_count=lambda: len(self._held),
            keeps_answers=config.monitor.eval_answers_max_bytes > 0,
        )
        self._held: dict[SliceKey, InFlightSlice] = {}
        slots: dict[Lane, int] = {"train": config.runner.concurrency, "eval": config.runner.eval_slots}
        self._slots = {lane: asyncio.Semaphore(count) for lane, count in slots.items()}
        queues = {"train": topology.tasks_train, "eval": topology.tasks_eval}
        self._intakes: dict[Lane, LaneIntake] = {
            lane: LaneIntake(
                bus,
                queues[lane],
                count,
                CircuitBreaker(config.runner.circuit_breaker),
                start=lambda delivery: self._start(self._handle(delivery)),
                woken=self.woken,
                is_over=self._is_over,
            )
            for lane, count in slots.items()
        }
        self._waiting: dict[asyncio.Task[None], tuple[Delivery, SliceKey]] = {}
        """Delivery and key of each slice that waits for a slot, by the slice's asyncio task."""
        self._reported: dict[SliceKey, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._detached: set[asyncio.Task[None]] = set()
        """Asyncio tasks of slices whose workflow ignored its cancellation."""
        self._failure: BaseException | None = None
        self._restart_reason: RestartRequested | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._attempts = itertools.count(uuid.uuid4().int >> 1)  # unique ids without a system call for each
        self._done = 0
        self._usual = UsualDuration()
        self._slot_count = sum(slots.values())
        self._counts: Counter[str] = Counter()

    def detail(self) -> RunnerStatus:
        """Return the runner's status: its slices, the number of slices by outcome, and paused lanes."""
        oldest = itertools.islice(self._held.values(), LISTED)
        changed: dict[str, Any] = dict(self._counts)
        if pauses := sum(intake.circuit.pauses for intake in self._intakes.values()):
            now = asyncio.get_running_loop().time()
            statuses = (intake.circuit.status(lane, now) for lane, intake in self._intakes.items())
            changed |= {"pauses": pauses, "paused": [status for status in statuses if status is not None]}
        return RunnerStatus(
            running=len(self._held),
            slices=[(*work.key, round(work.seconds, 1)) for work in oldest],
            holds=self._holds(),
            done=self._done,
            grouped_slices=True,
            slots=self._slot_count,
            usual_seconds=self._usual.seconds,
        ).model_copy(update=changed)

    def _holds(self) -> dict[str, list[tuple[int, int]]]:
        """Return the (task, first run) of all slices in flight in this runner or waiting for a slot, by ticket.

        The explorer sends a slice again if no runner lists it.
        """
        holds = dict[str, list[tuple[int, int]]]()
        for ticket, task, base in {**self._held, **dict.fromkeys(key for _, key in self._waiting.values())}:
            holds.setdefault(ticket, []).append((task, base))
        return holds

    # -- taking slices

    async def serve(self) -> None:
        """Take slices until the runner is drained, must restart or has failed, or the run is over.

        Raises:
            RestartRequested: The runner needs a fresh process.
            Exception: The error by which the runner failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                watch = [group.create_task(self._watch())]
                if self._watchdog is not None:
                    watch.append(group.create_task(self._watchdog.run()))
                takers = [group.create_task(intake.run()) for intake in self._intakes.values()]
                try:
                    self.set_state("idle", "a slice")
                    await self.woken.until(self._is_over)
                    await asyncio.wait(takers)
                    await self._finish_or_give_back()
                    if self._failure is not None:
                        raise self._failure
                finally:
                    for task in self._tasks:
                        task.cancel()
                for task in watch:
                    task.cancel()
        finally:
            await self._await_cancelled()
            await self._publisher.close()
            for intake in self._intakes.values():
                await intake.close()
            await self._executor.close()
            if self._detached:
                log.error("workflows_ignore_cancellation", runner=self.id, tasks=len(self._detached))
                exit_code = EXIT_RECYCLE if isinstance(self._restart_reason, RecycleRequested) else EXIT_RESTART
                self._end_process(exit_code if self._restart_reason or self._failure else 0)
        if self._restart_reason:
            raise self._restart_reason

    def _is_over(self) -> bool:
        return bool(self._failure or self._restart_reason or self.draining.is_set() or self.peers.explorer.finished)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._detached.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.woken.notify()

    def restart(self, why: RestartRequested) -> None:
        """Finish the slices in flight or return them to the queue, as when drained, and then request a restart of the
        process.
        """
        if self._restart_reason is None:
            log.info("restart_requested", runner=self.id, reason=str(why))
            self._restart_reason = why
            self.woken.notify()

    async def _watch(self) -> None:
        """After each received heartbeat, update the engines, stop the slices that are abandoned or belong to another
        run, and count stuck workflows; until cancelled.
        """
        while True:
            await self.peers.changed.wait()
            self._engines.receive()
            for in_flight in self._held.values():
                abandoned = self._open.abandoned(in_flight.task_slice) or self.bus.is_foreign(in_flight.delivery)
                if in_flight.running and abandoned:
                    self._executor.stop(in_flight, CANCELLED)
            self._check_stuck()

    def _check_stuck(self) -> None:
        stuck = len(self._detached) + len(stuck_threads(asyncio.get_running_loop().time() - STUCK_AFTER))
        self._counts["stuck"] = stuck
        if not stuck:
            del self._counts["stuck"]
        if stuck > MAX_STUCK:
            self.restart(RestartRequested(f"{stuck} abandoned workflows are still running (at most {MAX_STUCK} may)"))

    # -- executing a slice

    async def _handle(self, delivery: Delivery) -> None:
        if await self.drop_foreign(delivery):
            return
        with span("decode slices", size=len(delivery.body)) as traced:
            expected = TaskSlices if delivery.kind == TaskSlices.kind else TaskSlice
            message = await decode_or_dead_letter(self.bus, self.topology, delivery, self.id, expect=expected)
            if isinstance(message, TaskSlice):
                traced.batch = message.batch
            elif isinstance(message, TaskSlices) and message.slices:
                traced.batch, traced.count = message.slices[0].batch, len(message.slices)
        if isinstance(message, TaskSlice):
            await self._execute_when_free(message, delivery)
        elif isinstance(message, TaskSlices):
            await self._start_group(delivery, message.slices)

    async def _start_group(self, delivery: Delivery, slices: list[TaskSlice]) -> None:
        """Start each slice of a message separately, as soon as it has a slot.

        A redelivered message, or a message during a pause of the lane, is published again as one message per slice: a
        slice that crashes runners is then identified, and a paused lane can try a single slice. An empty message is
        acknowledged.
        """
        group = SliceGroup(delivery, slices)
        if not slices:
            await acknowledge(delivery)
        elif DeliveryHistory.of(delivery).count or not self._intakes[slices[0].lane].circuit.is_closed:
            await group.publish_separately(self.bus)
        else:
            for task_slice, slice_delivery in group.deliveries:
                self._intakes[task_slice.lane].track(self._start(self._execute_when_free(task_slice, slice_delivery)))

    async def _execute_when_free(self, task_slice: TaskSlice, delivery: Delivery) -> None:
        """Wait for a slot and execute a slice. Its delivery is acknowledged or requeued. A slice that this runner has
        already reported is only acknowledged.
        """
        # These context variables are local to the slice's own asyncio task.
        BATCH.set(task_slice.batch)
        TASK.set((task_slice.task_id, task_slice.run_base))
        structlog.contextvars.bind_contextvars(batch=task_slice.batch, ticket=task_slice.ticket)
        if task_slice.ticket not in self._seen_tickets:  # a line per slice would cost more than many slices themselves
            self._seen_tickets.append(task_slice.ticket)
            log.info("batch_begun", lane=task_slice.lane)
        slot, intake, task = self._slots[task_slice.lane], self._intakes[task_slice.lane], asyncio.current_task()
        assert task is not None
        key = (task_slice.ticket, task_slice.task_id, task_slice.run_base)
        self._waiting[task] = delivery, key
        try:
            await slot.acquire()
        finally:
            del self._waiting[task]
        in_flight: InFlightSlice | None = None
        try:
            while key in self._held:
                # The held delivery of the same slice is stale; only the new delivery can be acknowledged.
                await self._held[key].over.wait()
            if key in self._reported:
                self._counts["duplicates"] += 1
                await acknowledge(delivery)
                return
            if not intake.circuit.begin(key, asyncio.get_running_loop().time()):
                await self.woken.until(lambda: not intake.taking)  # otherwise the slice is redelivered here at once
                self._counts["given_back"] += 1
                await return_delivery(self.bus, delivery)
                return
            in_flight = self._held[key] = InFlightSlice(task_slice, delivery, f"{next(self._attempts):032x}")
            self._show_state()
            await self._slice(in_flight)
        finally:
            if in_flight is None:
                slot.release()
            elif not in_flight.detached:
                self._release(in_flight)

    def _report_to_circuit(self, in_flight: InFlightSlice, outcome: SliceOutcome | None) -> bool:
        """Report the result of an attempt to the lane's circuit breaker; return whether to retry the slice later.
        ``outcome`` None: the attempt has ended without another report of its result.
        """
        lane, circuit = in_flight.task_slice.lane, self._intakes[in_flight.task_slice.lane].circuit
        before = circuit.describe(lane)
        again = circuit.end(in_flight.key, outcome, in_flight.past.put_back, asyncio.get_running_loop().time())
        if (paused := circuit.describe(lane)) != before:
            if paused is None:
                log.info("lane_resumed", runner=self.id, lane=lane, worked=in_flight.name)
            elif before is None or paused.pause != before.pause:
                log.warning("lane_paused", runner=self.id, lane=lane, **paused.model_dump(exclude={"lane"}))
            self._show_state()
            self.heartbeat_now()
        if before is not None or paused is not None:
            self.woken.notify()
        return again

    def _release(self, in_flight: InFlightSlice) -> None:
        del self._held[in_flight.key]
        in_flight.over.set()
        self._slots[in_flight.task_slice.lane].release()
        self._report_to_circuit(in_flight, None)
        if not self._held and self._idle_timer is None:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_AFTER, self._become_idle)

    def _become_idle(self) -> None:
        self._idle_timer = None
        if not self._held and self.state == "working":
            self._show_state()

    def _show_state(self) -> None:
        """Update the state and the reason of waiting in the heartbeats."""
        if self.state == "draining":
            return
        paused = [
            status for lane, intake in self._intakes.items() if (status := intake.circuit.describe(lane)) is not None
        ]
        if paused:
            self.set_state("working" if self._held else "holding", "; ".join(status.line() for status in paused))
        elif self._held:
            self.set_state("working")
        else:
            self.set_state("idle", "a slice")

    async def _slice(self, in_flight: InFlightSlice) -> None:
        """Execute a slice. Report it as poisoned if its content is invalid or too many attempts failed or were lost.
        Only acknowledge it if its ticket is not open any more.
        """
        limit, past = self.config.broker.delivery_limit, in_flight.past
        try:
            if past.poisoned(limit, self._crash_notes.crashes(in_flight.name)):
                reason = f"{past.suspect} attempts at this slice failed or were lost (limit {limit})"
                await self._poison(in_flight, past, reason)
            elif self._open.abandoned(in_flight.task_slice):
                self._counts["cancelled"] += 1
                await acknowledge(in_flight.delivery)
            else:
                try:
                    outcome = await self._executor.execute(in_flight)
                except ChildDied as error:
                    await self._retry(in_flight, "it killed its process", error)
                else:
                    if outcome is not None:
                        await self._finish(in_flight, outcome)
        except Exception as error:
            if not is_content_error(error):
                raise
            log.exception("slice_rejected", slice=in_flight.name)
            await self._poison(in_flight, past, dead_letter_reason(error))

    def _take_over(self, in_flight: InFlightSlice) -> None:
        """Detach the asyncio task of a slice whose workflow ignores its cancellation, and report the slice in another
        asyncio task.
        """
        intake = self._intakes[in_flight.task_slice.lane]
        intake.track(self._start(self._finish_detached(in_flight)))
        if in_flight.task is not None:
            intake.forget(in_flight.task)
            self._tasks.discard(in_flight.task)
            self._detached.add(in_flight.task)
        self._check_stuck()

    async def _finish_detached(self, in_flight: InFlightSlice) -> None:
        try:
            await self._finish(in_flight, in_flight.results.outcome(in_flight.seconds))
        finally:
            self._release(in_flight)

    # -- reporting a slice

    async def _finish(self, in_flight: InFlightSlice, outcome: SliceOutcome) -> None:
        """Publish the experiences, then the outcome, then acknowledge the slice. A slice to retry later is requeued
        instead. A slice that was stopped because nobody needs it any more is only acknowledged, unless its finished
        runs count. If the experiences cannot be stored, the slice gets another attempt.
        """
        is_whole = len(outcome.runs) == in_flight.task_slice.repeat_times
        end: Outcome = "finished" if is_whole else "partial" if outcome.runs else "failed"
        log.debug("slice_done", task=in_flight.task_slice.task_id, outcome=end, seconds=round(outcome.seconds, 3))
        again = self._report_to_circuit(in_flight, outcome)
        if in_flight.why == CANCELLED:
            self._counts["cancelled"] += 1
            if not in_flight.task_slice.keep_partial:
                await acknowledge(in_flight.delivery)
                return
            end = end if outcome.runs else "cancelled"
        elif again:
            log.info("slice_requeued", runner=self.id, slice=in_flight.name, reason=outcome.message)
            self._counts["given_back"] += 1
            await put_back(self.bus, in_flight.delivery)
            return
        try:
            with span("hand over experiences", wait=True):
                result = await self._publisher.deliver(in_flight, outcome, end)
        except StoreUnavailable as error:
            await self._retry(in_flight, "its experiences could not be stored", error)
            return
        if result.outcome == "late":
            self._counts["late"] += 1
        with span("hand over result", wait=True):
            await self._publisher.report(in_flight, result)
        self._remember(in_flight)
        self._done += 1
        self._usual.add(in_flight.seconds)
        with span("acknowledge", wait=True):
            await acknowledge(in_flight.delivery)
        if self.config.runner.recycle_after is not None and self._done >= self.config.runner.recycle_after:
            self.restart(RecycleRequested(f"{self._done} slices done (runner.recycle_after)"))

    async def _retry(self, in_flight: InFlightSlice, what: str, error: Exception) -> None:
        """Requeue a slice for another attempt on any runner; at the delivery limit report it as poisoned."""
        task_slice, failure = in_flight.task_slice, f"attempt {in_flight.attempt} of {self.id}: {what}: {error}"
        past = in_flight.past.then(failure)
        if past.poisoned(self.config.broker.delivery_limit):
            await self._poison(in_flight, past, f"{what}; {past.suspect} attempts failed or were lost, last: {error}")
        else:
            log.warning("slice_retried", ticket=task_slice.ticket, task=task_slice.task_id, why=what, reason=str(error))
            self._counts["given_back"] += 1
            await return_delivery(self.bus, in_flight.delivery, failure)

    async def _poison(self, in_flight: InFlightSlice, past: DeliveryHistory, reason: str) -> None:
        """Report a poisoned slice, dead-letter a copy, then acknowledge it."""
        self._counts["poisoned"] += 1
        await self._publisher.report(
            in_flight, self._publisher.result(in_flight, "poisoned", message=reason, kind="process")
        )
        self._remember(in_flight)
        await dead_letter(self.bus, self.topology, in_flight.delivery, reason, self.id, past=past)
        await acknowledge(in_flight.delivery)

    def _remember(self, in_flight: InFlightSlice) -> None:
        self._crash_notes.forget(in_flight.name)
        self._reported[in_flight.key] = None
        while len(self._reported) > self._remembered:
            del self._reported[next(iter(self._reported))]

    # -- the end of the runner

    async def _finish_or_give_back(self) -> None:
        """Return the slices that wait for a slot to the queue, and wait for the slices in flight.

        After ``drain_timeout``, or at once after a failure, slices in flight are returned to the queue for another
        runner, or report their finished runs if partial results are requested.
        """
        loop = asyncio.get_running_loop()
        for task, (delivery, _) in list(self._waiting.items()):
            self._counts["given_back"] += 1
            task.cancel()
            self._start(self._give_back(delivery, task))
        if self._tasks and self._failure is None:
            self.set_state("draining", f"{len(self._tasks)} slices")
            await self._wait_for_tasks(loop.time() + self.drain_timeout)
        for in_flight in list(self._held.values()):
            if in_flight.running and in_flight.task is not None:
                if in_flight.task_slice.keep_partial and in_flight.results.experiences:
                    self._executor.stop(in_flight, PREEMPTED)
                else:
                    log.info("slice_requeued", ticket=in_flight.task_slice.ticket, task=in_flight.task_slice.task_id)
                    self._counts["given_back"] += 1
                    in_flight.task.cancel()
                    self._start(self._give_back(in_flight.delivery, in_flight.task))
        await self._wait_for_tasks(loop.time() + FINAL_FLUSH)

    async def _give_back(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        await asyncio.wait([task], timeout=STOP_PATIENCE)
        await return_delivery(self.bus, delivery)

    async def _wait_for_tasks(self, until: float) -> None:
        while self._tasks and (remaining_s := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)

    async def _await_cancelled(self) -> None:
        """Wait up to :data:`STOP_PATIENCE` seconds for cancelled tasks to end. Tasks that still run are detached."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_PATIENCE)
        self._detached |= self._tasks
        if self._idle_timer is not None:
            self._idle_timer.cancel()


class Watchdog:
    """Ends this process if its event loop is blocked for too long, which nothing else in the process can do.

    The broker redelivers the held slices once the connection is closed; a redelivered slice runs in a separate process.
    The stacks of all threads are written to stderr.

    Args:
        limit: Maximum seconds for which the loop may be blocked.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._alive = threading.Event()

    async def run(self) -> None:
        """Watch the running loop until cancelled."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="watchdog", daemon=True).start()
        try:
            while True:
                self._alive.set()
                await asyncio.sleep(TICK)
        finally:
            over.set()
            self._alive.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.is_set():
            self._alive.clear()
            # Two waits, because after a suspension of the whole process the first wait ends before the loop resumes.
            if not self._alive.wait(self._limit) and not self._alive.wait(2 * TICK):
                log.error("event_loop_blocked", seconds=self._limit, hint="an asynchronous workflow must not block")
                faulthandler.dump_traceback()
                os._exit(EXIT_RESTART)


def main(config: Config, agent_id: str = "runner-0") -> int:
    """Run one runner until the run is over or the runner is drained; returns the exit code."""
    os.environ.update(config.runner.env)
    gc.freeze()  # imported objects stay for good, and a full collection over them takes 0.2 s

    dog = Watchdog(MAX_BLOCK)

    def build(bus: Bus, topology: Topology) -> Runner:
        return Runner(
            config,
            bus=bus,
            topology=topology,
            agent_id=agent_id,
            end_process=_end_process,
            watchdog=dog,
            crash_notes=CrashLog(config.path / f"{agent_id}.at-work.json"),
        )

    return run_daemon(config, agent_id, "runner", build)


def _end_process(code: int) -> None:
    """Force the end of the process after :data:`EXIT_GRACE` seconds.

    A workflow that ignores its cancellation would otherwise keep the event loop alive.
    """
    last = threading.Timer(EXIT_GRACE, os._exit, (code,))
    last.daemon = True
    last.start()
