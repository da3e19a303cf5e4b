"""The life of training batches on the explorer's side: opened when the pacing allows, closed when complete, followed
until consumed.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable

import structlog

from trinity_agents.explorer.evaluation import Evaluations
from trinity_agents.explorer.in_flight import PendingTask, SubmittedTask
from trinity_agents.explorer.state import ExplorerState
from trinity_agents.explorer.task_source import TaskSource
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config, OverRolloutConfig
from trinity_mq.dispatch.batch_ids import sort_batch_id
from trinity_mq.dispatch.batch_metrics import rollout_metrics, submission_outcome
from trinity_mq.dispatch.pacing import Counters, may_open, must_ask, required_answer, required_progress
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchReady, OperatorStatus, Progress, TaskBody
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import Peers
from trinity_mq.scheduler.scheduler import Scheduler

log = structlog.get_logger(__name__)

NO_TASKS = "tasks to be submitted"
GIVEN_UP = {"failed", "gone"}
"""Outcomes of a batch whose operator may not have sent submitters the experiences they wait for."""
NO_MORE = "its batch was given up: experiences that have not come by now will not come"


def enough(ticket: Ticket, config: OverRolloutConfig) -> int:
    """Return how many tasks of a batch must be done before it may be closed without the rest."""
    return math.ceil(round(len(ticket.tasks) * (1 - config.ratio), 9))  # 10 * (1 - 0.9) is 0.9999999999999998


class TrainingBatches:
    """Opens, closes and follows training batches; all decisions are taken from ``state`` and the counters."""

    def __init__(
        self,
        config: Config,
        state: ExplorerState,
        scheduler: Scheduler,
        intake: TaskSource,
        evaluations: Evaluations,
        peers: Peers,
        *,
        save: Callable[[], Awaitable[None]],
        report: Callable[[int, dict[str, float]], None],
        woken: Notifier,
    ) -> None:
        self._config, self._state, self._scheduler, self._intake = config, state, scheduler, intake
        self._evaluations, self._peers = evaluations, peers
        self._save, self._report, self._woken = save, report, woken
        self.generation = 0
        self.counters = Counters()
        self.wants = 0
        """The last batch for which we ask the trainer for its newest weights (explorer_driven); said in our beats."""
        self._asked_for = 0.0
        """Seconds since we asked."""
        self._opened_at: dict[str, float] = {}
        """By ticket; what another life of ours opened is not in it."""
        self._late = 0
        """Late results that a batch's metrics have told of."""
        scheduler.on_progress = self.on_progress

    # -- counters

    def heard(
        self,
        generation: int,
        *,
        progress: int | None = None,
        committed: int | None = None,
        answered: int | None = None,
    ) -> None:
        """Take in what the trainer says of itself; a newer generation may have gone back, the same one only goes on."""
        if generation < self.generation:
            return
        known = self.counters if generation == self.generation else Counters()
        self.generation = generation
        self.counters = Counters(
            progress=max(known.progress, progress or 0),
            committed_progress=max(known.committed_progress, committed or 0),
            answered=max(known.answered, answered or 0),
        )
        self._woken.notify()

    def on_progress(self, progress: Progress) -> None:
        """The trainer has consumed a batch."""
        self.heard(progress.generation, progress=progress.progress)
        closed = self._state.following.tickets.get(progress.ticket)
        if not self._state.following.done(progress.ticket):
            return  # said before: the trainer does again what lay behind its checkpoint
        if closed is not None:
            returned = closed.returned(progress.stale_tasks)
            self._state.pending[:0] = returned
            if returned:
                log.info("stale_tasks_given_back", batch=progress.batch, tasks=len(returned))
        if progress.outcome == "trained":
            self._state.consecutive_empty = 0
            return
        self._state.consecutive_empty += 1
        if closed is not None and progress.outcome in GIVEN_UP:
            self._state.broken += closed.promises
        log.warning("batch_not_trained", batch=progress.batch, outcome=progress.outcome, reason=progress.reason)

    def check(self) -> None:
        """End the run when it only makes empty batches.

        Raises:
            FatalError: ``explorer.max_consecutive_empty`` batches in a row had nothing to train on.
        """
        limit = self._config.explorer.max_consecutive_empty
        if self._state.consecutive_empty >= limit:
            raise FatalError(
                f"{limit} batches in a row had nothing to train on (explorer.max_consecutive_empty). Look at "
                "rollout/slices/* in metrics.jsonl, "
                "the dead letters and the operators' filters"
            )

    # -- opening

    def obstacle(self, engine_current: bool) -> str | None:
        """Say what the next batch waits for, None when it may be opened."""
        batch = self._state.opened + 1
        train = [ticket for ticket in self._scheduler.tickets.values() if ticket.deliver == "pipeline"]
        if not self._scheduler.bus.usable:
            return self._scheduler.bus.trouble or "the broker"
        if not engine_current:
            return "an engine to take the weights"
        if not self._peers.alive("trainer"):
            return "a trainer"
        if (short := self._short_of(batch)) is not None:
            return short
        under_way = {ticket.ticket for ticket in train} | set(self._state.following.tickets)
        if len(under_way) >= self._config.explorer.max_open_batches:
            return f"one of {self._config.explorer.max_open_batches} open batches to be consumed"
        if not self._intake.has_tasks:
            return NO_TASKS
        return None

    def _short_of(self, batch: int) -> str | None:
        """Say what the pacing wants before ``batch`` is opened; may ask for it."""
        config, counters = self._config.synchronizer, self.counters
        if may_open(batch, counters, config):
            return None
        if must_ask(batch, counters, config):
            if self.wants < (asked := required_answer(batch, config)):
                self.wants = asked
                self._scheduler.heartbeat_soon()
            return f"the newest weights, asked for at batch {asked} (answered: {counters.answered})"
        wanted = required_progress(batch, config)
        if config.sync_style == "fixed":
            return f"weights of progress {wanted} (committed: {counters.committed_progress})"
        return f"the trainer to reach progress {wanted} (now: {counters.progress})"

    def wait_for_answer(self, seconds: float) -> None:
        """Let time pass in which the trainer could have given us the weights we asked for.

        Raises:
            FatalError: ``synchronizer.request_timeout`` is over.
        """
        config = self._config.synchronizer
        if self._state.ended or not must_ask(self._state.opened + 1, self.counters, config):
            self._asked_for = 0.0
            return
        if not (trainers := self._peers.alive("trainer")):
            return
        self._asked_for += seconds
        if self._asked_for > config.request_timeout:
            status = self._peers.trainer
            raise FatalError(
                f"the trainer has not given us the weights we asked for at batch {self.wants} in "
                f"{config.request_timeout:g} s (synchronizer.request_timeout). It says: step {status.step}, "
                f"progress {status.progress}, gate {status.phase}, {trainers[-1].state}. If a train step "
                "takes longer, raise the limit; else look at the trainer's log and the engines'. The state is saved"
            )

    async def open(self) -> None:
        """Open the next batch."""
        tasks = self._intake.take()
        self._state.opened += 1
        ticket = self._scheduler.make_ticket(
            [one.task for one in tasks],
            self._state.opened,
            deliver="pipeline",
            submissions=[
                one.submission.model_copy(update={"task_id": i}) for i, one in enumerate(tasks) if one.submission
            ],
        )
        self._opened_at[ticket.ticket] = asyncio.get_running_loop().time()
        self._state.given_back[ticket.ticket] = [i for i, one in enumerate(tasks) if one.given_back]
        await self._scheduler.open(ticket)

    # -- closing and following

    def needs_attention(self) -> bool:
        """Something is to be closed, or too much was empty."""
        return (
            bool(self._closable() or self._state.broken)
            or self._state.consecutive_empty >= self._config.explorer.max_consecutive_empty
        )

    def _closable(self) -> list[Ticket]:
        """Return what is complete: training tickets, and evaluations of single tasks that were submitted."""
        return [
            ticket
            for ticket in self._scheduler.tickets.values()
            if (ticket.deliver == "pipeline" or (ticket.deliver == "none" and ticket.submissions))
            and (ticket.is_complete or ticket.manifest is not None)
        ]

    async def close_complete(self) -> None:
        """Close what is complete, in the order of the batches, and tell whose experiences will not come."""
        for ticket in sorted(self._closable(), key=lambda ticket: sort_batch_id(ticket.batch)):
            await self._close(ticket)
        while self._state.broken:
            one = self._state.broken[0]
            outcome = one.outcome.model_copy(update={"experiences": 0, "message": NO_MORE})
            await self._scheduler.answer(one.submission, outcome, "given-up")
            self._state.broken.remove(one)
            await self._save()

    async def _close(self, ticket: Ticket) -> None:
        is_batch = ticket.deliver == "pipeline"
        fresh = ticket.manifest is None
        metrics = rollout_metrics(ticket, late=self._scheduler.late_results - self._late)
        manifest = ticket.manifest or ticket.make_manifest().model_copy(update={"metrics": metrics})
        if is_batch and fresh:
            self._late = self._scheduler.late_results
            # before it is published: its Progress may come while we still answer submitters, or died doing so
            promises = [
                SubmittedTask(submission=one, outcome=submission_outcome(ticket, one))
                for one in ticket.submissions
                if one.want_experiences and one.reply_to
            ]
            self._state.following.add(manifest, promises, self._stale_may_return(ticket))
            self._give_back(ticket)
            self._state.closed += 1
            if (
                self._state.closed % self._config.explorer.eval_interval == 0
                and self._state.closed != self._intake.total_batches
            ):
                self._evaluations.request(self._state.closed)
        await self._scheduler.close(ticket, manifest)
        self._state.given_back.pop(ticket.ticket, None)
        await self._save()
        if is_batch and isinstance(ticket.batch, int):
            began = self._opened_at.pop(ticket.ticket, None)
            took = {} if began is None else {"time/explore": asyncio.get_running_loop().time() - began}
            self._report(ticket.batch, metrics | took)

    def _give_back(self, ticket: Ticket) -> None:
        """Put tasks without a finished run that counts back once: what is lost otherwise are the longest."""
        if self._config.explorer.unfinished != "requeue":
            return
        before = set(self._state.given_back.get(ticket.ticket, ()))
        answered = {submission.task_id for submission in ticket.submissions}
        for task_id, task in enumerate(ticket.tasks):
            results = ticket.results_of(task_id)
            if any(result.outcome == "poisoned" for result in results):
                continue  # it ends processes: its dead letter is for people to look at
            lost = ticket.whole_tasks_only and ticket.was_cut_off(task_id)
            if (lost or not any(result.runs for result in results)) and task_id not in before | answered:
                self._state.pending.append(PendingTask(task=task, given_back=True))

    def _stale_may_return(self, ticket: Ticket) -> dict[int, TaskBody]:
        """Return the tasks that go to another batch if the trainer finds their groups too old: each once, and none that
        a submitter has been answered for.
        """
        if self._config.synchronizer.stale != "requeue":
            return {}
        never = {*self._state.given_back.get(ticket.ticket, ()), *(one.task_id for one in ticket.submissions)}
        return {task_id: task for task_id, task in enumerate(ticket.tasks) if task_id not in never}

    def _cut_off(self, ticket: Ticket, reason: str, keep: bool) -> None:
        """Cancel what is left of a batch: runners hear of it at once, and where runs are to be kept have a moment to
        send those they have.
        """
        explorer = self._config.explorer
        ticket.grace, ticket.whole_tasks_only = explorer.cancel_grace, not keep
        if not (keep and ticket.keep_partial and explorer.cancel_grace):
            ticket.cancel_rest(reason)
        self._scheduler.heartbeat_soon()
        self._woken.notify()

    def _let_time_pass(self, ticket: Ticket, seconds: float, moving: bool) -> None:
        """Count the time of an open ticket: what its batch has left, what its rest has left once enough tasks are done,
        and what runners have left to send the runs of a batch that was cut off.
        """
        if ticket.is_complete:
            return
        if ticket.grace is not None:
            ticket.grace -= seconds
            if ticket.grace <= 0:
                ticket.cancel_rest("its batch was closed without it")
                self._woken.notify()
            return
        if not moving:
            return
        over_rollout = self._config.explorer.over_rollout
        ticket.time_left -= seconds
        if ticket.time_left <= 0:
            log.warning("batch_timeout", batch=ticket.batch)
            self._cut_off(ticket, "the batch's time is up", True)
        elif (
            over_rollout.ratio
            and ticket.deliver == "pipeline"
            and ticket.finished_count >= enough(ticket, over_rollout)
        ):
            ticket.wait_left = (over_rollout.wait_after_min if ticket.wait_left is None else ticket.wait_left) - seconds
            if ticket.wait_left <= 0:
                log.info("over_rollout", batch=ticket.batch, done=ticket.finished_count, tasks=len(ticket.tasks))
                self._cut_off(ticket, "enough of its batch was done", over_rollout.return_partial_tasks)

    async def tick(self, seconds: float, *, moving: bool = True) -> None:
        """Let time pass for open tickets and for closed ones that nobody works on. ``moving``: there are a runner and
        an engine; without them a batch's time stands still.
        """
        for ticket in list(self._scheduler.tickets.values()):
            if ticket.manifest is None and ticket.deliver != "caller":
                self._let_time_pass(ticket, seconds, moving)
        if not moving:
            return
        if not self._peers.alive("trainer"):
            return
        explorer = self._config.explorer
        operators = [status.ticket for status in self._peers.statuses("operator", OperatorStatus)]
        in_hand = {*operators, *self._peers.trainer.in_hand}
        if operators and all(operators):
            in_hand |= set(self._state.following.tickets)  # they wait their turn: every operator is at work
        remedies = self._state.following.tick(
            seconds,
            {one for one in in_hand if one},
            deadline=explorer.operator_deadline,
            max_tries=explorer.batch_tries,
        )
        for remedy, manifest in remedies:
            log.warning("closed_batch_lost", batch=manifest.batch, remedy=remedy)
            if remedy == "publish again":
                await self._scheduler.announce(manifest)
            else:
                op = uuid.uuid4().hex
                reason = f"no operator has processed it in {explorer.batch_tries} x {explorer.operator_deadline:g} s"
                tomb = BatchReady(batch=manifest.batch, ticket=manifest.ticket, op=op, state="failed", reason=reason)
                exchange = self._scheduler.topology.exchange("ready")
                mail = envelope(tomb, message_id=f"tomb-{manifest.ticket}-{op}")
                await self._scheduler.bus.publish(exchange, batch_key(manifest.batch), mail)

    @property
    def has_submitted(self) -> bool:
        """An evaluation that was submitted is open."""
        return any(ticket.deliver == "none" and ticket.submissions for ticket in self._scheduler.tickets.values())

    @property
    def are_all_consumed(self) -> bool:
        """Every batch opened has been closed and reported on by the trainer."""
        open_ones = any(ticket.deliver == "pipeline" for ticket in self._scheduler.tickets.values())
        return not open_ones and not self._state.following.tickets
