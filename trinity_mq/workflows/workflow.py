"""A task and the workflow that runs it: code that uses a model on a record and rewards the result."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from trinity_mq.config.buffer.taskset import system_prompt_of
from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.messages import BatchId, TaskBody
from trinity_mq.rewards import REWARDS, find_reward
from trinity_mq.runtime.plugins import UnknownNameError, name_of, resolve
from trinity_mq.telemetry import get_logger
from trinity_mq.workflows.attributes import (
    FormatArgs,
    Replaceable,
    RolloutArgs,
    format_args_of,
    rollout_args_of,
)
from trinity_mq.workflows.registry import ENTRY_GROUP, WORKFLOWS

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from trinity_mq.models import ModelWrapper

PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""Immutable types: a record and its copy may share values of these types."""


_OLDER_NAMES = {"resettable": "can_reset", "repeatable": "can_repeat", "asynchronous": "is_async"}
"""Older property names that a workflow may override instead of setting the flag."""


_FORMAT_ARGS = TypeAdapter(FormatArgs)


class TaskError(ValueError):
    """A task cannot be used. The message gives the reason."""


@dataclass
class Task:
    """One record of a taskset and the settings to run it; :class:`~trinity_mq.messages.TaskBody` on the wire."""

    workflow: type[Workflow] | None = None
    repeat_times: int = 1
    """Number of runs: the group size of group-relative algorithms."""
    format_args: FormatArgs = field(default_factory=FormatArgs)
    """Names of the keys of ``raw_task`` (of the prompt, the answer, ...). Any mapping, ``FormatConfig`` or dataclass
    with such fields is accepted.
    """
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    """Sampling parameters that override the rollout model's parameters. Any mapping or dataclass is accepted."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    """A function or class as in :class:`trinity_mq.rewards.RewardFn`. None: the workflow's default reward."""
    raw_task: dict[str, Any] = field(default_factory=dict)
    """The record of the dataset, unchanged."""
    batch_id: BatchId = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)
    """``{"taskset": name, "index": position}`` of the record, if it comes from a taskset."""
    record_args: list[str] | None = None
    """Arguments that ``raw_task`` may set if the task comes from outside. None: all arguments that the workflow reads
    from records.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if convert := _CONVERTED.get(name):
            value = convert(value)
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Set the record's own system prompt, if it has one.

        Raises:
            TaskError: The record's system prompt is not a text.
        """
        if self.format_args.system_prompt_key is None:
            return
        try:
            system_prompt = system_prompt_of(self.raw_task, self.format_args.system_prompt_key)
        except ValueError as error:
            raise TaskError(f"raw_task: {error}") from error
        if system_prompt is not None:
            self.format_args = dataclasses.replace(self.format_args, system_prompt=system_prompt)

    @property
    def task_desc(self) -> str | None:
        """The prompt: ``raw_task[format_args.prompt_key]``. None: the record has no such key."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """The ground truth: ``raw_task[format_args.response_key]``, unchanged. None: the record has no such key."""
        return self.raw_task.get(self.format_args.response_key)

    def to_workflow(self, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None) -> Workflow:
        """Return a new instance of the workflow for this task.

        Raises:
            TaskError: The task names no workflow.
        """
        if self.workflow is None:
            raise TaskError("the task has no workflow; set Task.workflow to a Workflow class")
        self.inherit_sampling(model)
        return self.workflow(task=self, model=model, auxiliary_models=auxiliary_models)

    def inherit_sampling(self, model: ModelWrapper) -> None:
        """Use the sampling parameters of ``model``, if it has any, for parameters that the task does not set."""
        self.rollout_args = RolloutArgs(self.rollout_args, getattr(model, "sampling", None))

    def to_dict(self) -> dict[str, Any]:
        """Return the record."""
        return self.raw_task

    def copy_for_run(self) -> Task:
        """Return a copy that a workflow may change without affecting another run."""
        return dataclasses.replace(
            self,
            raw_task=_copied(self.raw_task),
            format_args=copy.copy(self.format_args),
            rollout_args=RolloutArgs(_copied(self.rollout_args), self.rollout_args.defaults),
            workflow_args=_copied(self.workflow_args),
            reward_fn_args=_copied(self.reward_fn_args),
            index=dict(self.index),
        )

    def to_body(self) -> TaskBody:
        """Return the wire form. ``batch_id`` and ``task_id`` are sent separately.

        Raises:
            UnknownNameError: Another process cannot import the workflow or the reward function.
        """
        return TaskBody(
            workflow="" if self.workflow is None else name_of("workflow", self.workflow, WORKFLOWS),
            raw_task=self.raw_task,
            repeat_times=self.repeat_times,
            format_args=self.format_args.to_wire(),
            rollout_args=self.rollout_args,
            workflow_args=self.workflow_args,
            reward_fn=None if self.reward_fn is None else name_of("reward function", self.reward_fn, REWARDS),
            reward_fn_args=self.reward_fn_args,
            is_eval=self.is_eval,
            index=self.index,
            record_args=self.record_args,
        )

    @classmethod
    def from_body(cls, body: TaskBody, batch_id: BatchId = "", task_id: int | str = "") -> Task:
        """Return the task in ``body``.

        Raises:
            TaskError: The body names no workflow, ``format_args`` has unknown keys or invalid values, or the record's
                system prompt is not a text.
            UnknownNameError: The workflow or the reward function is not known in this process.
        """
        if not body.workflow:
            raise TaskError("the task names no workflow; submit it to a run whose taskset has one, or name it")
        try:
            format_args = _FORMAT_ARGS.validate_python(body.format_args)
        except ValidationError as error:
            first = error.errors()[0]
            raise TaskError(
                f"format_args.{'.'.join(map(str, first['loc']))}: {first['msg']}; "
                f"known keys: {', '.join(field.name for field in dataclasses.fields(FormatArgs))}"
            ) from error
        return cls(
            workflow=load_workflow(body.workflow),
            repeat_times=body.repeat_times,
            format_args=format_args,
            rollout_args=RolloutArgs(body.rollout_args),
            workflow_args=dict(body.workflow_args),
            reward_fn=find_reward(body.reward_fn) if body.reward_fn else None,
            reward_fn_args=dict(body.reward_fn_args),
            is_eval=body.is_eval,
            raw_task=dict(body.raw_task),
            batch_id=batch_id,
            task_id=task_id,
            index=dict(body.index),
            record_args=body.record_args,
        )


_CONVERTED: dict[str, Callable[[Any], Any]] = {"format_args": format_args_of, "rollout_args": rollout_args_of}
"""Fields of a task that accept values of other types, and the functions that convert these values."""


class Workflow:
    """Runs a task with a model and returns experiences with rewards.

    Write either :meth:`run` or, with ``is_async = True``, :meth:`run_async`. Each run of a task has its own instance
    and its own view of the model, with two exceptions. If ``can_repeat`` is set, one instance executes all runs of a
    slice in one call. If ``can_reset`` is set, an instance may be reset and used again after its runs have succeeded.

    ``raw_task``, ``task_desc``, ``truth``, ``format_args``, ``rollout_args``, ``workflow_args``, ``reward_fn_args`` and
    ``is_eval`` are read from the current :attr:`task`. A workflow may assign other values.
    """

    can_reset: ClassVar[bool] = False
    """True: :meth:`reset` can prepare an instance for a further run, of the same task or of another task."""
    can_repeat: ClassVar[bool] = False
    """True: one call executes all runs of a slice; see :meth:`set_repeat_times`."""
    is_async: ClassVar[bool] = False
    """True: the workflow implements :meth:`run_async`, not :meth:`run`."""
    needs_history: ClassVar[bool] = False
    """True: the rollout model must record its calls (``explorer.rollout_model.enable_history``)."""
    arguments_kind: ClassVar[type[BaseModel] | None] = None
    """Pydantic model against which ``workflow_args`` are checked before a run starts. None: any arguments are accepted.
    """

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = list(auxiliary_models or ())
        self.repeat_times = 1
        self.run_id_base = 0

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set the flags of a class that overrides the properties by their older names."""
        super().__init_subclass__(**keywords)
        for older, flag in _OLDER_NAMES.items():
            for base in cls.__mro__[: cls.__mro__.index(Workflow)]:
                if older in vars(base) and (base is cls or not issubclass(base, Workflow)):
                    setattr(cls, flag, _flag(cls, older, vars(base)[older]))
                    break
                if flag in vars(base):
                    break

    raw_task = Replaceable[dict[str, Any]](lambda self: self.task.raw_task)
    task_desc = Replaceable["str | None"](lambda self: self.task.task_desc)
    truth = Replaceable[Any](lambda self: self.task.truth)
    format_args = Replaceable[FormatArgs](lambda self: self.task.format_args)
    workflow_args = Replaceable[dict[str, Any]](lambda self: self.task.workflow_args)
    reward_fn_args = Replaceable[dict[str, Any]](lambda self: self.task.reward_fn_args)
    is_eval = Replaceable[bool](lambda self: self.task.is_eval)

    @Replaceable
    def rollout_args(self) -> RolloutArgs:
        """The sampling parameters of the task, with ``n`` set to the number of requested runs."""
        args = self.task.rollout_args
        return RolloutArgs({**args, "n": self.repeat_times}, args.defaults)

    @Replaceable
    def logger(self) -> BoundLogger:
        """A logger named after the workflow's module."""
        return get_logger(type(self).__module__)

    @functools.cached_property
    def auxiliary_models(self) -> list[Any]:
        """OpenAI clients of the auxiliary models; asynchronous clients if the workflow is asynchronous."""
        if self.is_async:
            return [model.get_openai_async_client() for model in self.auxiliary_model_wrappers]
        return [model.get_openai_client() for model in self.auxiliary_model_wrappers]

    @property
    def resettable(self) -> bool:
        """Older name of ``can_reset``. A class may override it instead of the flag."""
        return self.can_reset

    @property
    def repeatable(self) -> bool:
        """Older name of ``can_repeat``. A class may override it instead of the flag."""
        return self.can_repeat

    @property
    def asynchronous(self) -> bool:
        """Older name of ``is_async``. A class may override it instead of the flag."""
        return self.is_async

    def reset(self, task: Task) -> None:
        """Prepare the instance for ``task``. Required if ``can_reset`` is set."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(); write it, or leave can_reset False")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of runs that the next :meth:`run` or :meth:`run_async` makes. Called if ``can_repeat`` is set.

        The experiences of the i-th run carry ``eid.run = run_id_base + i``.
        """
        self.repeat_times = self.task.rollout_args.defaults["n"] = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[Experience]:
        """Run the task and return at least one experience with a reward. It runs in a thread, so it may block."""
        raise NotImplementedError(
            f"{type(self).__name__} has no run(); write it, or write run_async() and set is_async = True"
        )

    async def run_async(self) -> list[Experience]:
        """Run the task and return at least one experience with a reward. It runs on the event loop, so it must not
        block.
        """
        raise NotImplementedError(f"{type(self).__name__} has is_async = True but no run_async(); write it")


class MultiTurnWorkflow(Workflow):
    """A workflow that holds a conversation and returns it as one experience, trained on the assistant's tokens."""

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return the conversation as an experience with a reward.

        Args:
            messages: The whole conversation, as in the OpenAI API.
            reward: Reward of the conversation; a truncated conversation gets 0 instead.
            info: Facts to add to the experience's ``info``; the numbers among them also become metrics.
            truncate_status: ``response_truncated`` if a limit ended the conversation.
        """
        experience = self.model.convert_messages_to_experience(messages)
        return _rewarded(experience, reward, info or {}, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return the conversation as an experience with a reward; see :meth:`process_messages_to_experience`."""
        experience = await self.model.convert_messages_to_experience_async(messages)
        return _rewarded(experience, reward, info or {}, truncate_status)


class AsyncMultiTurnWorkflow(MultiTurnWorkflow):
    """:class:`MultiTurnWorkflow` on the event loop: write ``run_async`` and await the asynchronous method."""

    is_async = True


def _rewarded(
    experience: Experience, reward: float, info: Mapping[str, Any], truncate_status: str | None
) -> Experience:
    experience.truncate_status = experience.truncate_status or truncate_status
    experience.reward = 0.0 if experience.truncate_status == RESPONSE_TRUNCATED else reward
    experience.info.update(info)
    experience.metrics.update({name: value for name, value in info.items() if isinstance(value, int | float)})
    return experience


def load_workflow(name: str) -> type[Workflow]:
    """Return the workflow class that ``name`` refers to: a registered name, an entry point or a dotted path.

    Raises:
        UnknownNameError: The name does not exist, cannot be imported, or is not a workflow class. The message lists
            similar names.
    """
    workflow = resolve("workflow", name, WORKFLOWS, ENTRY_GROUP)
    if not (inspect.isclass(workflow) and issubclass(workflow, Workflow)):
        raise UnknownNameError(f"workflow {name!r} is {workflow!r}, wanted a subclass of trinity_mq.workflows.Workflow")
    return workflow


def _flag(kind: type[Workflow], name: str, value: Any) -> bool:
    """Return ``value``, the attribute ``name`` of the class ``kind``, as a bool. A property is read without a real
    instance.
    """
    if isinstance(value, property):
        try:
            value = value.__get__(object.__new__(kind))
        except AttributeError as error:
            raise TypeError(
                f"{kind.__qualname__}.{name} depends on the instance ({error}), but runs are planned before an "
                f"instance exists; set {_OLDER_NAMES[name]} = True or False in the class instead"
            ) from error
    return bool(value)


def _copied(record: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of ``record``. If all values are immutable, this takes a tenth of the time of
    ``copy.deepcopy``.
    """
    if all(type(value) in PLAIN for value in record.values()):
        return record.copy()
    return copy.deepcopy(record)
