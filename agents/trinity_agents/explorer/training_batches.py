"""Opens training batches as the pacing allows, closes complete batches, and follows them until they are consumed."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

import structlog

from trinity_agents.explorer.evaluation import Evaluations
from trinity_agents.explorer.state import ExplorerState, PendingTask, SubmittedTask
from trinity_agents.explorer.task_source import TaskSource
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import rollout_metrics, submission_outcome, taskset_metrics
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.pacing import (
    TrainerCounters,
    last_with_room,
    may_open,
    must_ask,
    required_answer,
    required_progress,
)
from trinity_mq.dispatch.tickets import Ticket, sort_batch_id
from trinity_mq.dispatch.timeouts import pass_time
from trinity_mq.messages import BatchClosed, EmptyBatchStatus, OperatorStatus, Progress, RunnerStatus, TaskBody
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import Peers
from trinity_mq.telemetry import work_for
from trinity_mq.telemetry.trace import record, span

log = structlog.get_logger(__name__)

NO_TASKS = "tasks to be submitted"
GIVEN_UP = {"failed", "gone"}
"""Outcomes of a batch after which submitters may not have received the experiences that they wait for."""
NO_MORE = "its batch was abandoned: experiences that have not arrived by now will not arrive"

MANIFEST_TRIES = 3
"""Number of times that a manifest is published before its batch is reported as failed. If idle operators ignore three
publishes, a further publish will not help.
"""


class TrainingBatches:
    """Opens, closes and follows training batches. It can continue after a restart, because all that must be remembered
    is in ``state`` or in the trainer's counters.
    """

    def __init__(
        self,
        config: Config,
        state: ExplorerState,
        dispatcher: Dispatcher,
        source: TaskSource,
        evaluations: Evaluations,
        peers: Peers,
        *,
        save: Callable[[], Awaitable[None]],
        report: Callable[[int, dict[str, float]], None],
        woken: Notifier,
    ) -> None:
        self._config, self._state, self._dispatcher, self._source = config, state, dispatcher, source
        self._evaluations, self._peers = evaluations, peers
        self._save, self._report, self._woken = save, report, woken
        self.generation = 0
        self.counters = TrainerCounters()
        self.wants = 0
        """The last batch for which the explorer requests the newest weights (style ``explorer_driven``), 0 before the
        first request; sent in heartbeats.
        """
        self._waited = 0.0
        """Seconds for which a living trainer has not answered the request for the newest weights."""
        self._opened_at: dict[str, float] = {}
        """Event loop time of opening, by ticket opened in this process."""
        self._paused_time: defaultdict[str, float] = defaultdict(float)
        """Seconds for which all runners had paused the ticket's lane, by open ticket."""
        self._pauses: dict[str, int] = {}
        """Number of lane pauses already reported in the metrics of closed batches, by incarnation of the runner."""
        self._late = self._refused = 0
        """Numbers of late results and refused submissions already reported in the metrics of closed batches."""
        self.empty: EmptyBatchStatus | None = None
        """The last batch without anything to train on, None after a batch was trained on; sent in the heartbeats."""
        self._opened_before = state.opened
        """Number of the last batch that was opened before this process started."""
        dispatcher.on_progress = self.on_progress

    # -- the trainer's counters

    def update_counters(
        self,
        generation: int,
        *,
        progress: int | None = None,
        committed: int | None = None,
        answered: int | None = None,
    ) -> None:
        """Merge the trainer's counters, which only rise within a generation; a newer generation may start lower.
        Counters of an older generation are ignored, and None means unknown.
        """
        if generation < self.generation:
            return
        current = self.counters if generation == self.generation else TrainerCounters()
        self.generation = generation
        self.counters = TrainerCounters(
            progress=max(current.progress, progress or 0),
            committed_progress=max(current.committed_progress, committed or 0),
            answered=max(current.answered, answered or 0),
        )
        self._woken.notify()

    def on_progress(self, progress: Progress) -> None:
        """Record that the trainer has consumed a batch, with any outcome. If this explorer follows the batch, also
        requeue its stale tasks, add its dropped groups to the refill debt, and count batches in a row without anything
        to train on.
        """
        self.update_counters(progress.generation, progress=progress.progress)
        closed = self._state.following.tickets.pop(progress.ticket, None)
        if closed is None:
            return  # after a restart, the trainer consumes the batches after its checkpoint again
        if returned := closed.returned(progress.stale_tasks):
            self._source.give_back(returned, first=True)
            log.info("stale_tasks_requeued", batch=progress.batch, tasks=len(returned))
        self._source.replace_filtered(progress.filtered_groups)
        if progress.outcome == "trained":
            self._state.consecutive_empty, self.empty = 0, None
            return
        # Batches of an earlier start tell nothing about code and data that the user has mended since.
        # A skipped batch had experiences to train on, and the trainer itself limits how often it skips.
        if progress.outcome != "skipped" and int(progress.batch) > self._opened_before:
            self._state.consecutive_empty += 1
            self.empty = EmptyBatchStatus(
                batch=int(progress.batch),
                reason=progress.reason or progress.outcome,
                in_a_row=self._state.consecutive_empty,
                limit=self._config.explorer.max_consecutive_empty,
            )
            self._dispatcher.heartbeat_now()
        if progress.outcome in GIVEN_UP:
            self._state.broken += closed.promises
        log.warning("batch_not_trained", batch=progress.batch, outcome=progress.outcome, reason=progress.reason)

    def check(self) -> None:
        """End the run if it makes only empty batches.

        Raises:
            FatalError: ``explorer.max_consecutive_empty`` batches in a row had nothing to train on.
        """
        limit = self._config.explorer.max_consecutive_empty
        if self._state.consecutive_empty >= limit:
            last = "" if self.empty is None else f"; batch {self.empty.batch}: {self.empty.reason}"
            failures = self._dispatcher.failures.summary()
            raise FatalError(
                f"{limit} batches in a row had nothing to train on (explorer.max_consecutive_empty){last}. "
                + (failures or "Look at rollout/* in metrics.jsonl and at the operators' filters")
            )

    # -- opening batches

    def blocked_reason(self, engine_current: bool) -> str | None:
        """Return the reason why the next batch has to wait, None if it may be opened. It also requests the newest
        weights from the trainer if the batch waits for them.
        """
        batch = self._state.opened + 1
        if not self._dispatcher.bus.usable:
            return self._dispatcher.bus.trouble or "the broker"
        if not engine_current:
            return "an engine to take the weights"
        if not self._peers.alive("trainer"):
            return "a trainer"
        if (reason := self._pacing_reason(batch)) is not None:
            return reason
        under_way = {ticket.ticket for ticket in self._open_batches} | set(self._state.following.tickets)
        if len(under_way) >= self._config.explorer.max_open_batches:
            return f"one of {self._config.explorer.max_open_batches} open batches to be consumed"
        if not self._source.has_tasks:
            return NO_TASKS
        return None

    def _pacing_reason(self, batch: int) -> str | None:
        """Return what the pacing makes ``batch`` wait for; None if it may be opened. If the batch waits only for the
        newest weights, request them from the trainer.
        """
        config, counters = self._config.synchronizer, self.counters
        if may_open(batch, counters, config):
            return None
        if must_ask(batch, counters, config):
            if self.wants < (asked := required_answer(batch, config)):
                self.wants = asked
                self._dispatcher.heartbeat_now()
            return f"the newest weights, asked for at batch {asked} (answered: {counters.answered})"
        required = required_progress(batch, config)
        if config.sync_style == "fixed":
            return f"weights of progress {required} (committed: {counters.committed_progress})"
        return f"the trainer to reach progress {required} (now: {counters.progress})"

    @property
    def _openable_count(self) -> int:
        """Number of batches that the pacing allows to open before the trainer consumes another batch, at least 1."""
        last = last_with_room(self.counters, self._config.synchronizer)
        return max(1, min(last, self._source.total_batches or last) - self._state.opened)

    def wait_for_answer(self, seconds: float) -> None:
        """Add ``seconds`` to the time that the trainer has had to commit requested weights. Without an open request the
        time is reset; without a living trainer it does not pass.

        Raises:
            FatalError: ``synchronizer.request_timeout`` has passed.
        """
        config = self._config.synchronizer
        if self._state.ended or not must_ask(self._state.opened + 1, self.counters, config):
            self._waited = 0.0
            return
        if not (trainers := self._peers.alive("trainer")):
            return
        self._waited += seconds
        if self._waited > config.request_timeout:
            status = self._peers.trainer
            raise FatalError(
                f"the trainer has not committed the weights that were requested at batch {self.wants} within "
                f"{config.request_timeout:g} s (synchronizer.request_timeout). It reports: step {status.step}, "
                f"progress {status.progress}, gate {status.phase}, {trainers[-1].state}. If a train step "
                "takes longer, raise the limit; else look at the trainer's log and the engines'. The state is saved"
            )

    async def open(self) -> None:
        """Open the next batch."""
        debt = self._state.refill_debt
        with span("make ticket", self._state.opened + 1):
            tasks = self._source.take(self._openable_count)
            self._state.opened += 1
            ticket = self._dispatcher.make_ticket(
                [pending_task.task for pending_task in tasks],
                self._state.opened,
                deliver="pipeline",
                submissions=[
                    pending_task.submission.model_copy(update={"task_id": i})
                    for i, pending_task in enumerate(tasks)
                    if pending_task.submission
                ],
            )
        self._opened_at[ticket.ticket] = asyncio.get_running_loop().time()
        self._state.given_back[ticket.ticket] = [i for i, pending_task in enumerate(tasks) if pending_task.given_back]
        self._state.refilled[ticket.ticket] = debt - self._state.refill_debt
        with work_for(ticket.batch, ticket.ticket):
            await self._dispatcher.open(ticket)
            log.info("batch_opened", tasks=len(ticket.tasks))

    # -- closing batches

    def needs_attention(self) -> bool:
        """Return whether a ticket can be closed, a submitter must be answered, or too many batches were empty."""
        return (
            bool(self._closable() or self._state.broken)
            or self._state.consecutive_empty >= self._config.explorer.max_consecutive_empty
        )

    def _closable(self) -> list[Ticket]:
        """Return the tickets of training batches and of submitted evaluations that are complete, or whose closing was
        interrupted after their manifest was saved.
        """
        return [
            ticket
            for ticket in self._dispatcher.tickets.values()
            if (ticket.deliver == "pipeline" or _is_submitted_evaluation(ticket))
            and (ticket.is_complete or ticket.manifest is not None)
        ]

    async def close_complete(self) -> None:
        """Close complete tickets in batch order; answer submitters whose experiences will not arrive."""
        for ticket in sorted(self._closable(), key=lambda ticket: sort_batch_id(ticket.batch)):
            with work_for(ticket.batch, ticket.ticket):
                await self._close(ticket)
                log.info("batch_closed", done=ticket.finished_count, tasks=len(ticket.tasks))
        while self._state.broken:
            submitted = self._state.broken[0]
            outcome = submitted.outcome.model_copy(update={"experiences": 0, "message": NO_MORE})
            await self._dispatcher.answer(submitted.submission, outcome, "given-up")
            self._state.broken.remove(submitted)
            await self._save()

    async def _close(self, ticket: Ticket) -> None:
        is_batch = ticket.deliver == "pipeline"
        fresh = ticket.manifest is None
        began = time.monotonic()
        metrics = rollout_metrics(ticket, late=self._dispatcher.late_results - self._late)
        metrics["rollout/submissions/refused"] = float(self._dispatcher.refused_submissions - self._refused)
        if is_batch and self._config.max_refill:
            metrics["rollout/refilled_groups"] = float(self._state.refilled.get(ticket.ticket, 0))
            metrics["rollout/refill_debt"] = float(self._state.refill_debt)
        if is_batch:
            metrics |= self._source.observe(ticket)
            if len(self._config.buffer.tasksets) > 1:
                metrics |= taskset_metrics(ticket)
        manifest = ticket.manifest or ticket.make_manifest().model_copy(update={"metrics": metrics})
        if is_batch and fresh:
            self._late = self._dispatcher.late_results
            self._refused = self._dispatcher.refused_submissions
            # Recorded before the manifest is published, because its Progress may arrive while submitters are being
            # answered, or after a crash at that point.
            promises = [
                SubmittedTask(submission=submission, outcome=submission_outcome(ticket, submission))
                for submission in ticket.submissions
                if submission.want_experiences and submission.reply_to
            ]
            tasks = self._requeueable_tasks(ticket) if self._config.synchronizer.stale == "requeue" else {}
            self._state.following.add(manifest, promises, tasks)
            if self._config.explorer.unfinished == "requeue":
                self._requeue_unfinished(ticket)
            self._state.closed += 1
            if (
                self._state.closed % self._config.explorer.eval_interval == 0
                and self._state.closed != self._source.total_batches
            ):
                self._evaluations.request(self._state.closed)
        record("make manifest", began, time.monotonic(), batch=ticket.batch)
        await self._dispatcher.close(ticket, manifest)
        self._state.given_back.pop(ticket.ticket, None)
        self._state.refilled.pop(ticket.ticket, None)
        with span("save state", ticket.batch, wait=True):
            await self._save()
        if is_batch and isinstance(ticket.batch, int):
            opened = self._opened_at.pop(ticket.ticket, None)
            took = {"rollout/lane_pauses": float(self._new_pauses())}
            took["rollout/resent_slices"] = float(ticket.resent)
            took["time/lane_paused"] = self._paused_time.pop(ticket.ticket, 0.0)
            if opened is not None:
                took["time/explore"] = seconds = asyncio.get_running_loop().time() - opened
                if seconds and (tokens := metrics.get("rollout/response_tokens/sum")):
                    took["rollout/tokens_per_second"] = tokens / seconds
            self._report(ticket.batch, metrics | took)

    def _requeue_unfinished(self, ticket: Ticket) -> None:
        """Requeue tasks without a finished run that counts; otherwise the longest tasks would be lost. A task is
        requeued only once. Submitted tasks and tasks that crash processes are not requeued.
        """
        before = set(self._state.given_back.get(ticket.ticket, ()))
        answered = {submission.task_id for submission in ticket.submissions}
        again = []
        for task_id, task in enumerate(ticket.tasks):
            results = ticket.results_of(task_id)
            if any(result.outcome == "poisoned" for result in results):
                continue  # the task crashes processes, so it is only dead-lettered, for inspection
            lost = ticket.whole_tasks_only and ticket.was_cut_off(task_id)
            if (lost or not any(result.runs for result in results)) and task_id not in before | answered:
                again.append(PendingTask(task=task, given_back=True))
        self._source.give_back(again)

    def _requeueable_tasks(self, ticket: Ticket) -> dict[int, TaskBody]:
        """Return the tasks that are requeued if the trainer drops their groups as stale.

        A task is requeued only once, and not if it was submitted, because its submitter has been answered.
        """
        never = {
            *self._state.given_back.get(ticket.ticket, ()),
            *(submission.task_id for submission in ticket.submissions),
        }
        return {task_id: task for task_id, task in enumerate(ticket.tasks) if task_id not in never}

    def paused_lanes(self) -> dict[str, str]:
        """Return the lanes that every living runner has paused, each with the reason of one runner."""
        runners = self._peers.statuses("runner", RunnerStatus)
        lanes_by_runner = [
            {paused_lane.lane: paused_lane.line() for paused_lane in status.paused} for status in runners
        ] or [{}]
        return {
            lane: line for lane, line in lanes_by_runner[0].items() if all(lane in paused for paused in lanes_by_runner)
        }

    def _new_pauses(self) -> int:
        """Return the number of lane pauses of all runners since the last call."""
        current, before = dict[str, int](), self._pauses
        for beat in self._peers.alive("runner"):
            if isinstance(beat.detail, RunnerStatus):
                current[beat.incarnation] = beat.detail.pauses
        self._pauses = {**before, **current}
        return sum(count - before.get(name, 0) for name, count in current.items())

    def _advance_clock(self, ticket: Ticket, seconds: float, moving: bool, paused: bool) -> None:
        if ticket.is_complete:
            return
        if paused and ticket.grace is None:
            self._paused_time[ticket.ticket] += seconds
            return
        if ticket.grace is not None:
            ticket.grace -= seconds
            if ticket.grace <= 0:
                self._dispatcher.cancel_rest(ticket, "its batch was closed without it")
            return
        reason = pass_time(ticket, seconds, self._config.explorer) if moving else None
        if reason == "timeout":
            log.warning("batch_timeout", batch=ticket.batch)
            self._dispatcher.cut_off(ticket, "the batch's time is up", keep=True)
        elif reason == "enough":
            log.info("batch_ended_early", batch=ticket.batch, done=ticket.finished_count, tasks=len(ticket.tasks))
            keep = self._config.explorer.over_rollout.return_partial_tasks
            self._dispatcher.cut_off(ticket, "enough of its batch was done", keep=keep)

    async def tick(self, seconds: float, *, moving: bool = True) -> None:
        """Advance by ``seconds`` the clocks of open tickets and of closed batches that no operator or trainer works on.
        Cut off the tickets for which this is due, and recover the closed batches that may be lost.

        ``moving`` is True if a runner and an engine are alive; otherwise the clocks stop, except for the grace time
        after a cut-off. The clock of a ticket also stops while all runners have paused its lane. The clocks of closed
        batches also stop without a living trainer, and restart at 0 while no operator is idle.
        """
        paused = self.paused_lanes()
        for ticket in list(self._dispatcher.tickets.values()):
            if ticket.manifest is None:
                self._advance_clock(ticket, seconds, moving, ticket.lane in paused)
        if not (moving and self._peers.alive("trainer")):
            return
        explorer = self._config.explorer
        operators = self._peers.alive("operator")
        at_work = [status.ticket for status in self._peers.statuses("operator", OperatorStatus) if status.ticket]
        in_hand = {*at_work, *self._peers.trainer.in_hand}
        if not any(beat.state == "idle" for beat in operators):
            in_hand = set(self._state.following.tickets)  # the manifests wait in `closed` for a free operator
        actions = self._state.following.tick(
            seconds,
            in_hand,
            deadline=explorer.operator_deadline,
            max_tries=MANIFEST_TRIES,
        )
        if unseen := self._state.following.unseen():
            await self._repair_closed(unseen)
        for action, manifest in actions:
            log.warning("closed_batch_lost", batch=manifest.batch, action=action)
            if action == "publish again":
                await self._dispatcher.announce(manifest)
            else:
                waited = f"{MANIFEST_TRIES} x {explorer.operator_deadline:g} s"
                reason = f"an operator was idle for {waited}, but no operator took the batch"
                await self._dispatcher.fail(manifest, reason)

    async def _repair_closed(self, unseen: Sequence[BatchClosed]) -> None:
        """Publish manifests again if the queue ``closed`` is empty, because it was deleted or purged."""
        if not await self._dispatcher.bus.depth(self._dispatcher.topology.closed.name):
            for manifest in unseen:
                log.warning("manifest_lost", batch=manifest.batch, action="publish again")
                await self._dispatcher.announce(manifest)

    @property
    def _open_batches(self) -> list[Ticket]:
        return [ticket for ticket in self._dispatcher.tickets.values() if ticket.deliver == "pipeline"]

    @property
    def open_submitted(self) -> int:
        """Number of open submitted evaluations."""
        return sum(map(_is_submitted_evaluation, self._dispatcher.tickets.values()))

    @property
    def all_consumed(self) -> bool:
        """Whether every opened batch has been closed and consumed by the trainer."""
        return not self._open_batches and not self._state.following.tickets


def _is_submitted_evaluation(ticket: Ticket) -> bool:
    return ticket.deliver == "none" and bool(ticket.submissions)
