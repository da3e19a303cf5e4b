"""A task: one record of a taskset, and what is to be done with it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trinity_mq.config import FormatConfig
from trinity_mq.messages import BatchId, TaskBody
from trinity_mq.rewards import REWARDS
from trinity_mq.rewards.lookup import lookup, name_of
from trinity_mq.workflows.registry import WORKFLOWS, load_workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper
    from trinity_mq.workflows.workflow import Workflow


PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Types whose values cannot be changed: a copy of a record may share them."""


class TaskError(ValueError):
    """A task cannot be used as it is; the message says what is missing or wrong."""


@dataclass
class Task:
    """One record of a taskset, and what is to be done with it; :class:`~trinity_mq.messages.TaskBody` on the wire."""

    workflow: type[Workflow] | None = None
    repeat_times: int = 1
    """Runs, the group size of group-relative algorithms."""
    format_args: FormatConfig = field(default_factory=FormatConfig)
    """Where ``raw_task`` keeps its parts."""
    rollout_args: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters over those of the rollout model."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    """A function or class as in :class:`trinity_mq.rewards.RewardFn`; None for the workflow's own."""
    raw_task: dict[str, Any] = field(default_factory=dict)
    """The record as the dataset gave it."""
    batch_id: BatchId = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)
    """``{"taskset": name, "index": position}`` of the record, where it has one."""

    @property
    def task_desc(self) -> str | None:
        """The prompt: ``raw_task[format_args.prompt_key]``."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> str | None:
        """The right answer: ``raw_task[format_args.response_key]``."""
        return self.raw_task.get(self.format_args.response_key)

    def to_workflow(self, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None) -> Workflow:
        """Return a new instance of the workflow for this task.

        Raises:
            TaskError: The task names no workflow.
        """
        if self.workflow is None:
            raise TaskError("the task has no workflow; set Task.workflow to a Workflow class")
        return self.workflow(task=self, model=model, auxiliary_models=auxiliary_models)

    def to_dict(self) -> dict[str, Any]:
        """Return the record."""
        return self.raw_task

    def own_copy(self) -> Task:
        """Return a copy that a workflow may change without another run seeing it."""
        return dataclasses.replace(
            self,
            raw_task=_copied(self.raw_task),
            rollout_args=_copied(self.rollout_args),
            workflow_args=_copied(self.workflow_args),
            reward_fn_args=_copied(self.reward_fn_args),
            index=dict(self.index),
        )

    def to_body(self) -> TaskBody:
        """Return the wire form; ``batch_id`` and ``task_id`` travel beside it.

        Raises:
            UnknownNameError: Workflow or reward function cannot be imported by another process.
        """
        return TaskBody(
            workflow="" if self.workflow is None else name_of("workflow", self.workflow, WORKFLOWS),
            raw_task=self.raw_task,
            repeat_times=self.repeat_times,
            format_args=self.format_args.model_dump(),
            rollout_args=self.rollout_args,
            workflow_args=self.workflow_args,
            reward_fn=None if self.reward_fn is None else name_of("reward function", self.reward_fn, REWARDS),
            reward_fn_args=self.reward_fn_args,
            is_eval=self.is_eval,
            index=self.index,
        )

    @classmethod
    def from_body(cls, body: TaskBody, batch_id: BatchId = "", task_id: int | str = "") -> Task:
        """Return the task in ``body``.

        Raises:
            TaskError: It names no workflow, or ``format_args`` has keys that do not exist.
            UnknownNameError: Its workflow or reward function is not known here.
        """
        if not body.workflow:
            raise TaskError("the task names no workflow; submit it to a run whose taskset has one, or name it")
        try:
            format_args = FormatConfig.model_validate(body.format_args)
        except ValidationError as error:
            first = error.errors()[0]
            raise TaskError(
                f"format_args.{'.'.join(map(str, first['loc']))}: {first['msg']}; "
                f"known keys: {', '.join(FormatConfig.model_fields)}"
            ) from error
        return cls(
            workflow=load_workflow(body.workflow),
            repeat_times=body.repeat_times,
            format_args=format_args,
            rollout_args=dict(body.rollout_args),
            workflow_args=dict(body.workflow_args),
            reward_fn=lookup("reward function", body.reward_fn, REWARDS) if body.reward_fn else None,
            reward_fn_args=dict(body.reward_fn_args),
            is_eval=body.is_eval,
            raw_task=dict(body.raw_task),
            batch_id=batch_id,
            task_id=task_id,
            index=dict(body.index),
        )


def _copied(record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as ``copy.deepcopy`` makes it; where all values are plain, at a tenth of its cost."""
    if all(type(value) in PLAIN for value in record.values()):
        return record.copy()
    return copy.deepcopy(record)
