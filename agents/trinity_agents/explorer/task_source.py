"""The source of a batch's tasks: those given back or submitted first, then those of the taskset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from trinity_agents.explorer.in_flight import PendingTask
from trinity_agents.explorer.state import ExplorerState
from trinity_mq.config import Config
from trinity_mq.data import Taskset, open_taskset
from trinity_mq.dispatch.pacing import Counters, last_with_room
from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import TaskBody

log = structlog.get_logger(__name__)

LEAST_PENDING = 64
"""Pending tasks that are taken in even where batches are small."""


class TaskReader(Protocol):
    """The interface of a taskset that a task source needs."""

    def __len__(self) -> int: ...

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next tasks and advance the position."""

    def state(self) -> dict[str, object]:
        """Return the position."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position."""


class TaskSource:
    """Takes tasks from the state's pending ones and from the taskset (None: submitted tasks only)."""

    def __init__(self, config: Config, state: ExplorerState, taskset: TaskReader | None) -> None:
        self._config, self._state, self._taskset = config, state, taskset
        if taskset is not None and state.taskset:
            taskset.restore(state.taskset)

    @property
    def total_batches(self) -> int | None:
        """Number of batches of the run, as far as it is known now; None: as many as are submitted."""
        return run_length(self._config, self._state, None if self._taskset is None else len(self._taskset))

    @property
    def is_over(self) -> bool:
        """Return whether no further batch is to be opened."""
        total = self.total_batches
        return self._state.ended or (total is not None and self._state.opened >= total)

    @property
    def has_tasks(self) -> bool:
        """Return whether a batch could be made now."""
        return self._taskset is not None or bool(self._state.pending)

    def take(self, among: int = 1) -> list[PendingTask]:
        """Return the tasks of the next batch and move the position; the caller saves it with the batch's ticket.

        What the batch has beyond ``buffer.batch_size`` takes the place of groups that operators dropped from earlier
        ones, and lowers the debt by as much.

        Args:
            among: Batches that can be opened now, this one included: the debt is divided among them.
        """
        state, buffer = self._state, self._config.buffer
        size = buffer.batch_size + min(math.ceil(state.refill_debt / among), self._config.max_refill)
        batch = state.pending[:size]
        del state.pending[:size]
        on_top = 0
        if self._taskset is not None:
            room = size - len(batch)
            if buffer.total_steps is None:
                # epochs give every task of the taskset: what was given back or submitted comes on top
                on_top, room = len(batch), min(size, tasks_left(self._config, state, len(self._taskset)))
            batch += [PendingTask(task=task) for task in self._taskset.next_batch(room)]
            state.taskset = dict(self._taskset.state())
        state.refill_debt -= max(0, len(batch) - on_top - buffer.batch_size)
        return batch

    def replace_filtered(self, groups: int) -> None:
        """Owe the next batches a further task for each of so many dropped groups. Owed are never more than the batches
        that can be under way may take: what operators drop for long is not made up for all at once later.
        """
        under_way = last_with_room(Counters(), self._config.synchronizer)
        most = self._config.max_refill * min(under_way, self._config.explorer.max_open_batches)
        self._state.refill_debt = min(self._state.refill_debt + groups, most)

    def give_back(self, tasks: Sequence[PendingTask], *, first: bool = False) -> None:
        """Put tasks that were given back into the next batch; after the last one they are only counted."""
        if not self._state.ended:
            at = 0 if first else len(self._state.pending)
            self._state.pending[at:at] = tasks
        elif left := sum(one.given_back for one in tasks):
            self._state.left_over_tasks += left
            log.warning("tasks_left_over", tasks=left, reason="given back, and the last batch is opened already")

    @property
    def room(self) -> int:
        """Number of pending tasks that are still taken in, so that the next batches can be made; more wait in the
        broker.
        """
        return max(2 * self._config.buffer.batch_size, LEAST_PENDING) - len(self._state.pending)

    def submit(self, task: TaskBody, ref: SubmissionRef) -> None:
        """Accept a completed task from outside."""
        self._state.submitted += 1
        self._state.accepted.append(ref.submission_id)
        if not task.is_eval:
            self._state.pending.append(PendingTask(task=task, submission=ref))

    def completed(self, task: TaskBody) -> TaskBody:
        """Return a submitted task, its missing fields filled in from the taskset's section."""
        defaults = self._config.buffer.taskset
        grouped = task.is_eval or task.repeat_times > 1
        return task.model_copy(
            update={
                "workflow": task.workflow or defaults.workflow,
                "workflow_args": task.workflow_args or defaults.workflow_args,
                "reward_fn": task.reward_fn or defaults.reward_fn,
                "reward_fn_args": task.reward_fn_args or defaults.reward_fn_args,
                "format_args": task.format_args or defaults.format.model_dump(),
                "rollout_args": task.rollout_args or defaults.rollout_args,
                "repeat_times": task.repeat_times if grouped else self._config.algorithm.repeat_times,
            }
        )


def tasks_left(config: Config, state: ExplorerState, tasks: int) -> int:
    """Return how many tasks ``buffer.total_epochs`` over a taskset of so many tasks still give."""
    position = state.taskset or {}
    given = int(position.get("epoch", 0)) * tasks + int(position.get("cursor", 0))
    return max(0, tasks * config.buffer.total_epochs - given)


def run_length(config: Config, state: ExplorerState, tasks: int | None) -> int | None:
    """Return the number of batches of a run, None for as many as are submitted. Epochs end with their tasks, so they
    have the fewer batches the more tasks take the place of dropped groups.

    Args:
        config: The run's configuration.
        state: How far the run is.
        tasks: Tasks of the taskset; None: there is none.
    """
    if config.buffer.total_steps is not None:
        return config.buffer.total_steps
    if tasks is None:
        return None
    return state.opened + math.ceil(tasks_left(config, state, tasks) / config.buffer.batch_size)


def open_tasksets(config: Config) -> tuple[Taskset | None, dict[str, list[TaskBody]]]:
    """Return the training taskset, at its beginning, and the evaluation tasks by set."""
    training, limit = config.buffer.taskset, config.broker.max_task_bytes
    taskset = None
    if training.storage_type != "queue":
        taskset = open_taskset(training, repeat_times=config.algorithm.repeat_times, seed=config.seed, max_bytes=limit)
    sets = {
        one.name: open_taskset(
            one, repeat_times=one.repeat_times, seed=config.seed, is_eval=True, max_bytes=limit
        ).all_tasks()
        for one in config.buffer.eval_tasksets
    }
    return taskset, sets
