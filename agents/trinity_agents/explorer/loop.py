"""The explorer's main loop, which connects batches, evaluations, submissions and engines."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from trinity_agents.explorer.benchmark import Benchmark
from trinity_agents.explorer.evaluation import Evaluations
from trinity_agents.explorer.hosted_engines import HostedEngines
from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_agents.explorer.task_source import TaskReader, TaskSource
from trinity_agents.explorer.training_batches import NO_TASKS, TrainingBatches
from trinity_mq.bus import Delivery
from trinity_mq.bus.topology import BY_GATEWAY, DROPPED
from trinity_mq.dispatch.dispatcher import NO_REPLY_QUEUE, Dispatcher
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.messages import (
    BatchCounters,
    ExplorerStatus,
    Heartbeat,
    Outcome,
    RunEnd,
    RunnerStatus,
    SilentAgent,
    SubmissionOutcome,
    TaskBody,
    TaskSubmission,
    Version,
    encode,
)
from trinity_mq.messages.sessions import OF_SESSIONS
from trinity_mq.rewards.outsiders import NotAllowed
from trinity_mq.roles import ROLES
from trinity_mq.runtime.agent import HEARTBEAT_LEASE, Agent
from trinity_mq.runtime.deliveries import (
    acknowledge,
    dead_letter,
    decode_or_dead_letter,
    envelope,
    handle_or_set_aside,
)
from trinity_mq.runtime.errors import FatalError, dead_letter_reason, is_content_error
from trinity_mq.runtime.process import place
from trinity_mq.telemetry.evaluations.log import EvaluationLog
from trinity_mq.telemetry.trace_ids import TRACEPARENT, read_traceparent

log = structlog.get_logger(__name__)

CLOCK_TICK = 1.0
"""Seconds between two checks of the timeouts."""
INTAKE = 64
"""Maximum number of submissions that are accepted together, with a single save."""
OPEN_EVALUATIONS = 512
"""Maximum number of open submitted evaluations: enough to keep runners busy, limited because every heartbeat lists the
ticket of each open evaluation."""
GATEWAYS_NAME = f"submission ids that begin with {OF_SESSIONS!r} belong to the gateway; choose another id"
NO_MORE_BATCHES = "the run has opened its last batch"
KEEP_QUEUES_INTERVAL = 24 * 3600.0
"""Seconds between two declarations of a batch queue; the queue expires after seven days without a declaration or a
reader."""


class ExplorerLoop:
    """Runs one explorer process from the saved state until the run is over or the explorer is drained."""

    def __init__(
        self,
        agent: Agent,
        engines: Sequence[Any],
        auxiliaries: Sequence[Any],
        state: ExplorerState,
        file: StateFile,
        taskset: TaskReader | None,
        eval_sets: Mapping[str, Sequence[TaskBody]],
        checkpoints: Mapping[int, str] | None = None,
    ) -> None:
        self.agent, self.state, self._file = agent, state, file
        self._place, self._chain = place(agent.config.path), agent.config.chain_digest
        self._trainer_movement = (0, 0, 0)
        """(generation, progress, step) that the trainer reported last."""
        config, woken = agent.config, agent.woken
        self.config = config
        if state.consecutive_empty >= config.explorer.max_consecutive_empty:
            state.consecutive_empty = 0  # the limit ended the run, and the user has started the run again
        self.dispatcher = Dispatcher(
            config,
            bus=agent.bus,
            topology=agent.topology,
            owner=agent.id,
            save=self.save,
            next_heartbeat=lambda: agent.heartbeat_seq + 1,
            heartbeat_now=agent.heartbeat_now,
            runners=lambda: agent.peers.alive("runner"),
            holders=lambda: agent.peers.remembered("runner"),
            tickets=state.tickets,
            results_offset=0 if state.results_offset is None else state.results_offset,
            changed=woken,
        )
        self._last_accepted_at = -math.inf
        """Event loop time at which submissions were last accepted."""
        self.hosted = HostedEngines(agent, engines, auxiliaries, on_commit=self._on_commit)
        self.source = TaskSource(config, state, taskset)
        total = self.source.total_batches
        if state.ended and config.mode != "bench" and total is not None and total > state.opened:
            log.info("run_extended", batches=total, before=state.opened)
            state.ended = state.finished = False
        self.evaluations = Evaluations(
            config,
            state,
            self.dispatcher,
            self.hosted,
            eval_sets,
            save=self.save,
            report=agent.report,
            woken=woken,
            answers=EvaluationLog(file.run_folder, config.monitor.eval_answers_max_bytes),
        )
        self.batches = TrainingBatches(
            config,
            state,
            self.dispatcher,
            self.source,
            self.evaluations,
            agent.peers,
            save=self.save,
            report=agent.report,
            woken=woken,
        )
        self.benchmark = None
        """The evaluations of mode ``bench``, None in other modes."""
        if config.mode == "bench":
            self.benchmark = Benchmark(
                agent,
                state,
                self.evaluations,
                checkpoints or {},
                served=lambda: self.hosted.version,
                until=self._until,
                save=self.save,
            )

    async def save(self) -> None:
        """Write the state, after checking that this explorer still holds the run's lock."""
        await self.agent.ensure_lock()
        self.state.results_offset = self.dispatcher.results_offset
        await self._file.save(self.state)
        self.agent.heartbeat_soon()

    def detail(self) -> ExplorerStatus:
        """Return the explorer's status for its heartbeat."""
        counters = self.batches.counters
        return ExplorerStatus(
            open=self.dispatcher.open_tickets,
            run_id=self.state.run_id,
            place=self._place,
            chain=self._chain,
            ready_offset=self.state.ready_offset,
            left_over=self.state.left_over,
            opened=self.state.opened,
            closed=self.state.closed,
            following=list(self.state.following.tickets),
            total_batches=self.source.total_batches if self.benchmark is None else self.benchmark.total,
            counters=BatchCounters(progress=counters.progress, committed_progress=counters.committed_progress),
            wants=self.batches.wants if self.benchmark is None else self.benchmark.label,
            evaluating=self.evaluations.running,
            pending=len(self.state.pending),
            ended=self.state.ended,
            finished=self.state.finished,
            failures=self.dispatcher.failures.listed(),
            dropped_dead=self.state.dropped_dead,
            resent=self.dispatcher.losses.resent,
            lost=self.dispatcher.losses.last,
            empty=self.batches.empty,
            silent=[_silent(beat, seconds) for beat, seconds in self.agent.peers.silent()],
        )

    async def background(self) -> list[Any]:
        """Subscribe to sync events and return the coroutines that run concurrently with :meth:`run`."""
        return [
            *await self.hosted.background(),
            self.dispatcher.follow(),
            self.dispatcher.watch_queues(),
            self.dispatcher.watch_slices(),
            self.evaluations.run(),
            self._close(),
            self._clock(),
            self._keep_queues(),
            self._submissions(),
            self._follow_trainer(),
            self._compare_state(),
            self._count_dropped(),
        ]

    async def run(self) -> None:
        """Open batches when the pacing allows it, and at the end evaluate the final weights; in mode ``bench`` evaluate
        the checkpoints instead. Return early if the explorer is drained.
        """
        agent, state = self.agent, self.state
        await self.dispatcher.caught_up()
        await self.dispatcher.resume()
        if self.benchmark is not None:
            await self._reject_pending()
            if not await self.benchmark.run():
                await self._let_runners_finish()
            return
        if self.config.explorer.eval_on_startup and not state.opened:
            self.evaluations.request(0)
            await self._until("the first evaluation", lambda: self.evaluations.is_done(0))
        while not self.source.is_over and not agent.draining.is_set():
            reason = self.batches.blocked_reason(self.hosted.version is not None)
            if reason is None:
                agent.set_state("working", None)
                await self.batches.open()
            else:
                agent.set_state("idle" if reason == NO_TASKS else "holding", reason)
                await agent.woken.wait()
        if agent.draining.is_set() or not await self._finish():
            await self._let_runners_finish()

    async def _finish(self) -> bool:
        """Announce the end and wait for the last batches and evaluations; return False if drained first."""
        agent, state = self.agent, self.state
        state.ended = True
        await self._reject_pending()
        end = envelope(RunEnd(batches=state.opened), message_id="run-end")
        await agent.bus.publish(agent.topology.exchange("ready"), "end", end)
        if not await self._until("the last batches to be consumed", self._has_final_weights):
            return False
        self.evaluations.request(state.opened)
        if not await self._until("the last evaluation", lambda: self.evaluations.is_done(state.opened)):
            return False
        while self.batches.open_submitted or await self._submissions_wait():
            if agent.draining.is_set():
                return False
            agent.set_state("working", "submitted tasks to be answered")
            await agent.woken.wait(CLOCK_TICK)
        agent.report(state.opened, {"rollout/tasks/left_over": float(state.left_over_tasks)})
        state.left_over_tasks = 0  # a run that is extended later counts from 0
        state.finished = True
        await self.save()
        self.agent.heartbeat_now()
        return True

    async def _until(self, what: str, done: Callable[[], bool]) -> bool:
        """Wait until ``done()`` is true, and report ``what`` as the reason while engines serve; return False if the
        agent is drained first.
        """
        while not done():
            if self.agent.draining.is_set():
                return False
            if self.hosted.version is None:
                self.agent.set_state("holding", "an engine to take the weights")
            else:
                self.agent.set_state("working", what)
            await self.agent.woken.wait()
        return True

    async def _submissions_wait(self) -> bool:
        """Return whether submissions wait in the broker, or whether the last submission arrived only a moment ago.

        After a recent submission, further submissions may follow.
        """
        recent = asyncio.get_running_loop().time() - self._last_accepted_at < CLOCK_TICK
        return recent or bool(await self.agent.bus.depth(self.agent.topology.submitted.name))

    async def _reject_pending(self) -> None:
        """Remove all pending tasks, because no batch will take them. Submitters are told that their tasks are
        cancelled; requeued tasks are counted as left over.
        """
        for pending_task in self.state.pending:
            if pending_task.submission is not None:
                await self._refuse(pending_task.submission, "cancelled", NO_MORE_BATCHES)
        self.source.give_back(self.state.pending)
        self.state.pending = []
        await self.save()

    async def _refuse(self, submission: SubmissionRef, outcome: Outcome, reason: str) -> None:
        """Answer a submission with ``outcome`` and ``reason``, because no batch takes its task."""
        answer = SubmissionOutcome(
            submission_id=submission.submission_id, batch="", ticket="", outcome=outcome, message=reason
        )
        await self.dispatcher.answer(submission, answer)

    def _has_final_weights(self) -> bool:
        trainer = self.agent.peers.trainer
        if not (trainer.finished and self.batches.all_consumed):
            return False
        return self.hosted.version == (trainer.generation, trainer.step)

    async def _let_runners_finish(self) -> None:
        """Keep the engines running while draining runners finish their slices, for at most the drain timeout."""
        agent = self.agent
        agent.set_state("draining", "runners to finish")
        try:
            async with asyncio.timeout(agent.drain_timeout + CLOCK_TICK):
                await agent.woken.until(lambda: not agent.peers.alive("runner"))
        except TimeoutError:
            log.info("runners_not_finished")
        await self.save()

    async def announce_end(self) -> None:
        """Wait, for at most two heartbeat leases, until each living agent whose role is told of the run's end has
        received the end, which the heartbeats of this explorer announce.

        An agent that is restarting or disconnected and cannot read the run's folder would otherwise wait forever.
        """

        def unaware() -> list[str]:
            beats = [beat for role, row in ROLES.items() if row.told_of_end for beat in self.agent.peers.alive(role)]
            return [beat.id for beat in beats if beat.state not in ("draining", "finished")]

        try:
            async with asyncio.timeout(2 * HEARTBEAT_LEASE):
                await self.agent.woken.until(lambda: not unaware())
        except TimeoutError:
            log.warning("agents_not_notified", agents=unaware())

    # -- background work

    async def _close(self) -> None:
        await self.dispatcher.resumed()
        while True:
            await self.agent.woken.until(self.batches.needs_attention)
            self.batches.check()
            await self.batches.close_complete()

    async def _compare_state(self) -> None:
        """Check the state file now and after each outage, until cancelled.

        Another explorer may have continued the run during the outage, even if it has ended since and this explorer has
        the lock again.

        Raises:
            RestartRequested: Another explorer has written the state file.
        """
        bus = self.agent.bus
        while True:
            await bus.wait_usable()
            await self._file.check()
            await self.agent.woken.until(lambda: not bus.usable)

    async def _count_dropped(self) -> None:
        """Count the dead letters that the broker drops because the queue ``dead`` is full, until cancelled."""
        agent = self.agent
        queue = agent.topology.listener(agent.id, f"{agent.incarnation}.dropped", "control", DROPPED)
        await agent.bus.declare(queue)
        async with await agent.bus.consume(queue) as dropped:
            async for _ in dropped:
                if not self.state.dropped_dead:
                    log.warning("dead_letters_dropped", reason="the queue dead is full (broker.dead_max_bytes)")
                self.state.dropped_dead += 1
                agent.heartbeat_soon()

    async def _clock(self) -> None:
        """Advance the batches' clocks while they can make progress; end a run without progress.

        Raises:
            FatalError: Nothing has changed for ``explorer.stall_timeout`` seconds, or the trainer has not answered a
                request for weights in time.
        """
        agent, limit = self.agent, self.config.explorer.stall_timeout
        still, last_movement = 0.0, self._movement()
        while True:
            await asyncio.sleep(CLOCK_TICK)
            if not (agent.bus.usable and self.dispatcher.is_caught_up):
                continue
            await self.batches.tick(CLOCK_TICK, moving=bool(agent.peers.alive("runner")) and self.hosted.any_alive)
            try:
                self.batches.wait_for_answer(CLOCK_TICK)
            except FatalError:
                await self.save()
                raise
            now = self._movement()
            still = still + CLOCK_TICK if now == last_movement and agent.state in {"holding", "working"} else 0.0
            last_movement = now
            if still > limit:
                await self.save()
                raise FatalError(
                    f"nothing has moved for {still:.0f} s (explorer.stall_timeout): waiting for {agent.waits_for}; "
                    f"{self._paused_reason()}the state is saved"
                )

    def _paused_reason(self) -> str:
        """Return advice about lanes that runners have paused, empty without paused lanes."""
        if not (paused := self.batches.paused_lanes()):
            return ""
        return (
            f"the runners wait for {'; '.join(paused.values())}. Restore it and start the run again, which loses no "
            "task, or set runner.circuit_breaker.enable=false to have such slices fail; "
        )

    def _movement(self) -> tuple[object, ...]:
        """Return values that change with each progress of the run, including the trainer's counters.

        After a restart the trainer trains again on the batches after its checkpoint, while no other value changes.
        Commits and late results do not count as progress.
        """
        state, trainer = self.state, self.agent.peers.trainer
        if trainer.generation:  # without a living trainer the last values are kept
            self._trainer_movement = (trainer.generation, trainer.progress or 0, trainer.step)
        outcomes = sum(ticket.decided for ticket in state.tickets.values())
        followed = len(state.following.tickets)
        return (state.opened, state.closed, followed, outcomes, *state.evaluated, *self._trainer_movement)

    async def _keep_queues(self) -> None:
        while True:
            await asyncio.sleep(KEEP_QUEUES_INTERVAL)
            await self.dispatcher.queues.keep()

    async def _submissions(self) -> None:
        """Accept submitted tasks while there is room for them, until cancelled. The other tasks stay in the broker's
        queue.
        """
        agent = self.agent
        await self.dispatcher.resumed()
        while True:
            await agent.woken.until(lambda: self._submission_room > 0)
            async with await agent.bus.consume(
                agent.topology.submitted, prefetch=max(1, self._submission_room)
            ) as consumer:
                async for delivery in consumer:
                    group = [delivery]
                    while not group[-1].deliveries_before and len(group) < self._submission_room:
                        if (more := consumer.get_nowait()) is None:
                            break
                        group.append(more)
                    await self._accept_all(group)
                    if self._submission_room <= 0:
                        break
                else:
                    return

    @property
    def _submission_room(self) -> int:
        """Number of submissions that can be accepted now; 0 or less: none."""
        return min(INTAKE, self.source.room, OPEN_EVALUATIONS - self.batches.open_submitted)

    async def _accept_all(self, group: Sequence[Delivery]) -> None:
        """Accept a group of submissions, but each redelivered submission alone.

        A submission that crashes the process then does not affect other submissions.
        """
        agent = self.agent
        if first := [delivery for delivery in group if not delivery.deliveries_before]:
            await self._accept(first)
        for delivery in group:
            if delivery.deliveries_before:
                work = functools.partial(self._accept, [delivery])
                decide = functools.partial(self._answer_rejected, delivery)
                await handle_or_set_aside(agent.bus, agent.topology, delivery, agent.id, work, decide=decide)

    async def _answer_rejected(self, delivery: Delivery, reason: str) -> None:
        """Answer the submitter of a dead-lettered message, if the message properties identify the submitter."""
        if delivery.message_id and delivery.reply_to and self.agent.topology.is_reply_queue(delivery.reply_to):
            ref = SubmissionRef(
                submission_id=delivery.message_id, reply_to=delivery.reply_to, correlation_id=delivery.correlation_id
            )
            await self._refuse(ref, "failed", reason)

    async def _accept(self, group: Sequence[Delivery]) -> None:
        """Accept or refuse each submission of a group, save once, open the tickets of evaluations, then acknowledge the
        group. Submissions that were accepted before are only acknowledged.
        """
        self._last_accepted_at = asyncio.get_running_loop().time()
        read = [(delivery, await self._read_submission(delivery)) for delivery in group]
        submissions = [(delivery, *submission) for delivery, submission in read if submission is not None]
        known_ids = await self._file.known([ref.submission_id for _, _, ref in submissions])
        evaluations: list[Ticket] = []
        for delivery, message, ref in submissions:
            if ref.submission_id not in known_ids:
                evaluations += await self._submitted(delivery, message, ref)
                known_ids.add(ref.submission_id)
        if self.state.ended:
            await self._reject_pending()
        await self.save()
        async with asyncio.TaskGroup() as opening:
            for ticket in evaluations:
                opening.create_task(self.dispatcher.open(ticket))
        for delivery, _, _ in submissions:
            await acknowledge(delivery)
        self.agent.woken.notify()

    async def _read_submission(self, delivery: Delivery) -> tuple[TaskSubmission, SubmissionRef] | None:
        """Return a submission and its submitter. Return None for a message that was dead-lettered: it does not decode,
        or has no id that its sender may use.
        """
        agent = self.agent
        message = await decode_or_dead_letter(agent.bus, agent.topology, delivery, agent.id, expect=TaskSubmission)
        if not isinstance(message, TaskSubmission):
            return None
        name = message.submission_id or delivery.message_id
        by_gateway = delivery.routing_key == BY_GATEWAY and delivery.reply_to == agent.topology.sessions.name
        if not name or (name.startswith(OF_SESSIONS) and not by_gateway):
            reason = GATEWAYS_NAME if name else "a submission needs a submission_id or a message_id"
            await self._answer_rejected(delivery, reason)
            await dead_letter(agent.bus, agent.topology, delivery, reason, agent.id)
            await acknowledge(delivery)
            return None
        traceparent = delivery.headers.get(TRACEPARENT)
        ref = SubmissionRef(
            submission_id=name,
            reply_to=delivery.reply_to,
            correlation_id=delivery.correlation_id,
            want_experiences=message.want_experiences,
            traceparent=traceparent if isinstance(traceparent, str) and read_traceparent(traceparent) else None,
            by_gateway=by_gateway,
        )
        return message, ref

    async def _submitted(self, delivery: Delivery, message: TaskSubmission, ref: SubmissionRef) -> list[Ticket]:
        """Accept or refuse a submission that is not a repeat. Return a list with its ticket if it is an accepted
        evaluation, else an empty list.
        """
        agent, limit = self.agent, self.config.broker.max_task_bytes
        try:
            task = self._allowed(message, ref)
            if (size := len(encode(task))) > limit:
                raise NotAllowed(
                    f"the task takes {size} bytes in a message; broker.max_message_bytes leaves {limit} for it"
                )
        except Exception as error:
            if not is_content_error(error):
                raise
            reason = str(error) if isinstance(error, NotAllowed) else dead_letter_reason(error)
            self.dispatcher.refused_submissions += 1
            await self._refuse(ref, "failed", reason)
            await dead_letter(agent.bus, agent.topology, delivery, reason, agent.id)
            return []
        self.source.submit(task, ref)
        if not task.is_eval:
            return []
        if self.state.finished:
            await self._refuse(ref, "cancelled", NO_MORE_BATCHES)
            return []
        batch = f"{self.state.closed}/submitted-{self.state.submitted}"
        submission = ref.model_copy(update={"task_id": 0})
        ticket = self.dispatcher.make_ticket([task], batch, deliver="none", lane="eval", submissions=[submission])
        self.dispatcher.tickets[ticket.ticket] = ticket  # the next save stores it together with the submission's id
        return [ticket]

    def _allowed(self, message: TaskSubmission, ref: SubmissionRef) -> TaskBody:
        """Return the completed task of a submission.

        Raises:
            NotAllowed: The submitter may not use the task's settings or the reply queue.
        """
        if not (ref.reply_to is None or ref.by_gateway or self.agent.topology.is_reply_queue(ref.reply_to)):
            raise NotAllowed(NO_REPLY_QUEUE)
        return self.source.completed(message.task, exact_runs=message.exact_runs, by_gateway=ref.by_gateway)

    async def _follow_trainer(self) -> None:
        """Read the trainer's counters from its heartbeats, until cancelled. A lost progress event then delays the
        pacing only until the next heartbeat.
        """
        while True:
            trainer = self.agent.peers.trainer
            if trainer.generation:
                self.batches.update_counters(
                    trainer.generation,
                    progress=trainer.progress,
                    committed=trainer.committed_progress,
                    answered=trainer.answered,
                )
            await self.agent.peers.changed.wait()

    def _on_commit(self, version: Version | None, progress: int) -> None:
        self.batches.update_counters(version[0] if version else self.batches.generation, committed=progress)


def _silent(beat: Heartbeat, seconds: float) -> SilentAgent:
    slices = beat.detail.slices if isinstance(beat.detail, RunnerStatus) else []
    return SilentAgent(id=beat.id, role=beat.role, seconds=round(seconds, 1), slices=slices)
