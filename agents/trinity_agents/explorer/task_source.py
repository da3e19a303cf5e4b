"""The source of a batch's tasks: first requeued and submitted tasks, then tasks of the taskset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import structlog

from trinity_agents.explorer.state import ExplorerState, PendingTask, TicketStatistics
from trinity_mq.config import Config
from trinity_mq.data import Taskset, TasksetMixture, TaskStats, open_taskset
from trinity_mq.dispatch.pacing import TrainerCounters, last_with_room
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.gateway.recorded_call import RECORDED_SESSIONS
from trinity_mq.messages import TaskBody
from trinity_mq.rewards.outsiders import restrict_task
from trinity_mq.runtime.event_loop import loop_time

log = structlog.get_logger(__name__)

LEAST_PENDING = 64
"""Lower bound of the limit on pending tasks, which otherwise is twice the batch size."""


class TaskReader(Protocol):
    """Interface of a taskset for the task source."""

    def __len__(self) -> int: ...

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next ``size`` tasks and advance the position."""

    def state(self) -> dict[str, object]:
        """Return the position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position."""


@runtime_checkable
class LearningReader(TaskReader, Protocol):
    """A taskset whose selectors may learn from the rewards of finished tasks."""

    @property
    def learns(self) -> bool:
        """Whether a selector learns from rewards."""

    def observe(self, stats: Mapping[str, Sequence[TaskStats]]) -> None:
        """Pass statistics of finished tasks to the selectors, by taskset name."""

    def metrics(self) -> Mapping[str, float]:
        """Return the ``selector/*`` metrics."""


class TaskSource:
    """Takes tasks from the state's pending tasks and from the taskset (None: only submitted tasks)."""

    def __init__(self, config: Config, state: ExplorerState, taskset: TaskReader | None) -> None:
        self._config, self._state, self._taskset = config, state, taskset
        self._learning = taskset if isinstance(taskset, LearningReader) and taskset.learns else None
        self._pending_since = -math.inf
        """Time of the loop in seconds since which pending tasks of mode ``serve`` have waited for a complete batch."""
        self._observed = {observation.ticket for observation in state.observations}
        """Tickets whose statistics the selectors have received."""
        if self._learning is not None:
            for observation in state.observations:
                self._learning.observe(observation.stats)
        state.observations = []  # the file already has them
        if taskset is not None and state.taskset:
            taskset.restore(state.taskset)

    @property
    def total_batches(self) -> int | None:
        """Number of batches of the run by present knowledge; None if it depends on the submitted tasks."""
        return run_length(self._config, self._state, None if self._taskset is None else len(self._taskset))

    @property
    def is_over(self) -> bool:
        """Whether no further batch may be opened."""
        total = self.total_batches
        return self._state.ended or (total is not None and self._state.opened >= total)

    @property
    def has_tasks(self) -> bool:
        """Whether a batch can be made now. In mode ``serve`` an incomplete batch waits up to ``gateway.batch_wait``
        seconds for further sessions.
        """
        pending = len(self._state.pending)
        if self._taskset is not None or not pending or self._config.mode != "serve":
            return self._taskset is not None or pending > 0
        waited = loop_time() - self._pending_since
        return pending >= self._config.buffer.batch_size or waited >= self._config.gateway.batch_wait

    def take(self, among: int = 1) -> list[PendingTask]:
        """Return the tasks of the next batch and advance the position; the caller saves it with the batch's ticket.

        Tasks beyond ``buffer.batch_size`` replace groups that operators dropped from earlier batches, and reduce the
        refill debt by their number. In a run by epochs (without ``buffer.total_steps``), requeued and submitted tasks
        are taken in addition and do not reduce the debt.

        Args:
            among: Number of batches that can be opened now, including this batch; the debt is divided among them.
        """
        state, buffer = self._state, self._config.buffer
        size = buffer.batch_size + min(math.ceil(state.refill_debt / among), self._config.max_refill)
        batch = state.pending[:size]
        del state.pending[:size]
        self._pending_since = loop_time()
        on_top = 0
        if self._taskset is not None:
            room = size - len(batch)
            if buffer.total_steps is None:
                # Epochs must use every task of the taskset, so requeued and submitted tasks are extra.
                on_top, room = len(batch), min(size, tasks_left(self._config, state, len(self._taskset)))
            batch += [PendingTask(task=task) for task in self._taskset.next_batch(room)]
            state.taskset = dict(self._taskset.state())
        state.refill_debt -= max(0, len(batch) - on_top - buffer.batch_size)
        return batch

    def replace_filtered(self, groups: int) -> None:
        """Increase the refill debt by the number of dropped groups.

        The debt is limited to the extra tasks of the batches that can be in flight, so that long periods of dropped
        groups are not compensated all at once later.
        """
        under_way = last_with_room(TrainerCounters(), self._config.synchronizer)
        most = self._config.max_refill * min(under_way, self._config.explorer.max_open_batches)
        self._state.refill_debt = min(self._state.refill_debt + groups, most)

    def observe(self, ticket: Ticket) -> dict[str, float]:
        """Pass the statistics of a complete ticket to the selectors, once per ticket; return the selectors' metrics.
        Without a selector that learns, do nothing and return no metrics.

        The caller saves the observation with the ticket's manifest, so that a restart does not repeat it. Selectors
        also learn from experiences that operators or the trainer drop later.
        """
        if self._learning is None:
            return {}
        if ticket.ticket not in self._observed and (stats := task_stats(ticket)):
            self._observed.add(ticket.ticket)
            self._learning.observe(stats)
            self._state.observations.append(TicketStatistics(ticket=ticket.ticket, stats=stats))
        return dict(self._learning.metrics())

    def give_back(self, tasks: Sequence[PendingTask], *, first: bool = False) -> None:
        """Add requeued tasks to the pending tasks, at the front if ``first`` is set. After the last batch was opened,
        requeued tasks are only counted as left over, and submitted tasks are ignored.
        """
        if not self._state.ended:
            at = 0 if first else len(self._state.pending)
            self._state.pending[at:at] = tasks
        elif requeued := sum(task.given_back for task in tasks):
            self._state.left_over_tasks += requeued
            log.warning("tasks_unused", tasks=requeued, reason="returned after the last batch was opened")

    @property
    def room(self) -> int:
        """Number of further pending tasks that are accepted, 0 or less if no task is; other submissions wait in the
        broker's queue.
        """
        return max(2 * self._config.buffer.batch_size, LEAST_PENDING) - len(self._state.pending)

    def submit(self, task: TaskBody, ref: SubmissionRef) -> None:
        """Record the submission of a task from outside, which :meth:`completed` has returned. A training task becomes
        pending; the caller opens the ticket of an evaluation.
        """
        self._state.submitted += 1
        self._state.accepted.append(ref.submission_id)
        if not task.is_eval:
            if not self._state.pending:
                self._pending_since = loop_time()
            self._state.pending.append(PendingTask(task=task, submission=ref))

    def completed(self, task: TaskBody, *, exact_runs: bool = False, by_gateway: bool = False) -> TaskBody:
        """Return a submitted task. Each value that the submitter may not set comes from the configuration of the task's
        taskset. A task with ``repeat_times`` 1 gets ``algorithm.repeat_times`` runs, unless it is an evaluation.

        Args:
            task: The submitted task.
            exact_runs: Keep ``repeat_times`` even if it is 1.
            by_gateway: True if the run's own gateway submitted the task; only then it may have recorded sessions.

        Raises:
            NotAllowed: The task uses a name or a setting that ``outsiders`` does not allow.
        """
        if not (by_gateway and task.workflow == RECORDED_SESSIONS):
            task = restrict_task(self._config, task)
        grouped = exact_runs or task.is_eval or task.repeat_times > 1
        return task if grouped else task.model_copy(update={"repeat_times": self._config.algorithm.repeat_times})


def tasks_left(config: Config, state: ExplorerState, tasks: int) -> int:
    """Return the number of remaining tasks in ``buffer.total_epochs`` epochs over a taskset of ``tasks`` tasks."""
    position = state.taskset or {}
    taken = int(position.get("epoch", 0)) * tasks + int(position.get("cursor", 0))
    return max(0, tasks * config.buffer.total_epochs - taken)


def run_length(config: Config, state: ExplorerState, tasks: int | None) -> int | None:
    """Return the number of batches of a run, None if it depends on the submitted tasks.

    The number of tasks in the epochs is fixed, so a run by epochs has fewer batches if tasks replace dropped groups.

    Args:
        config: The run's configuration.
        state: The state of the run.
        tasks: Number of tasks in the taskset; None without a taskset.
    """
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    if tasks is None:
        return None
    return state.opened + math.ceil(tasks_left(config, state, tasks) / config.buffer.batch_size)


def task_stats(ticket: Ticket) -> dict[str, list[TaskStats]]:
    """Return the statistics of a ticket's tasks, by taskset name.

    Three kinds of tasks are left out: submitted tasks, tasks without a place in a taskset, and tasks without a counted
    run that has a finite reward.
    """
    stats: dict[str, list[TaskStats]] = {}
    submitted = {submission.task_id for submission in ticket.submissions}
    for task_id, task in enumerate(ticket.tasks):
        name, index = task.index.get("taskset"), task.index.get("index")
        if task_id in submitted or not (isinstance(name, str) and isinstance(index, int)):
            continue
        if ticket.whole_tasks_only and ticket.was_cut_off(task_id):
            continue
        runs = [run.get("reward", math.nan) for result in ticket.results_of(task_id) for run in result.metrics]
        rewards = [reward for reward in runs if math.isfinite(reward)]
        if rewards:
            stats.setdefault(name, []).append(TaskStats(index, math.fsum(rewards) / len(rewards), len(rewards)))
    return stats


def open_training(config: Config) -> Taskset | TasksetMixture | None:
    """Return the training taskset at its first task; None if all tasks are submitted, or in mode ``bench``."""
    limit = config.broker.max_task_bytes
    opened = [
        open_taskset(settings, repeat_times=config.algorithm.repeat_times, seed=config.seed, max_bytes=limit)
        for settings in (() if config.mode == "bench" else config.buffer.training_tasksets)
        if settings.storage.holds_records
    ]
    if config.buffer.tasksets and opened:
        return TasksetMixture(opened, config.seed)
    return opened[0] if opened else None


def open_tasksets(config: Config) -> tuple[Taskset | TasksetMixture | None, dict[str, list[TaskBody]]]:
    """Return the training taskset at its first task, and the evaluation tasks by set."""
    sets = {
        settings.name: open_taskset(
            settings,
            repeat_times=settings.repeat_times,
            seed=config.seed,
            is_eval=True,
            max_bytes=config.broker.max_task_bytes,
        ).all_tasks()
        for settings in config.buffer.eval_tasksets
    }
    return open_training(config), sets
