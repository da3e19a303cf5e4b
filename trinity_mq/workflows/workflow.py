"""What a workflow is: how a model is used on a task, and what that was worth."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper
    from trinity_mq.workflows.task import Task


class Workflow:
    """Runs a task with a model and returns the experiences, rewarded.

    Write either :meth:`run` or, with ``is_async = True``, :meth:`run_async`. Each run of a task has an instance and a
    view of the model to itself, unless ``can_repeat``: then one instance does all runs of a slice in one go.
    """

    can_reset: ClassVar[bool] = False
    """:meth:`reset` readies an instance for another task."""
    can_repeat: ClassVar[bool] = False
    """One call makes all runs: see :meth:`set_repeat_times`."""
    is_async: ClassVar[bool] = False
    """:meth:`run_async` is the one that is written."""
    needs_history: ClassVar[bool] = False
    """The rollout model must record its calls (``explorer.rollout_model.enable_history``)."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = list(auxiliary_models or ())
        self.repeat_times = 1
        self.run_id_base = 0

    @functools.cached_property
    def auxiliary_models(self) -> list[Any]:
        """OpenAI clients of the auxiliary models, asynchronous ones if the workflow is."""
        if self.is_async:
            return [model.get_openai_async_client() for model in self.auxiliary_model_wrappers]
        return [model.get_openai_client() for model in self.auxiliary_model_wrappers]

    @property
    def resettable(self) -> bool:
        """``can_reset``, by its older name."""
        return self.can_reset

    @property
    def repeatable(self) -> bool:
        """``can_repeat``, by its older name."""
        return self.can_repeat

    @property
    def asynchronous(self) -> bool:
        """``is_async``, by its older name."""
        return self.is_async

    def reset(self, task: Task) -> None:
        """Get ready for ``task``; written where ``can_reset``."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(); write it, or leave can_reset False")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Say what the next run is to do, where ``can_repeat``: ``repeat_times`` runs.

        The experiences of the i-th of them carry ``eid.run = run_id_base + i``.
        """
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[Experience]:
        """Do the task and return at least one experience, rewarded. Runs in a thread: it may block."""
        raise NotImplementedError(
            f"{type(self).__name__} has no run(); write it, or write run_async() and set is_async = True"
        )

    async def run_async(self) -> list[Experience]:
        """Do the task and return at least one experience, rewarded. Runs on the event loop: it must not block."""
        raise NotImplementedError(f"{type(self).__name__} has is_async = True but no run_async(); write it")


class MultiTurnWorkflow(Workflow):
    """A workflow that holds a conversation and makes one experience of it, trained on what the assistant wrote."""

    def process_messages_to_experience(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return the conversation as a rewarded experience.

        Args:
            messages: All of it, as in the OpenAI API.
            reward: What it was worth; a conversation that was cut is worth 0.
            info: Kept in the experience; its numbers become metrics.
            truncate_status: ``response_truncated`` if the conversation was ended by a limit.
        """
        experience = self.model.convert_messages_to_experience(messages)
        return _judged(experience, reward, info or {}, truncate_status)

    async def process_messages_to_experience_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        reward: float,
        info: Mapping[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return the conversation as a rewarded experience; see :meth:`process_messages_to_experience`."""
        experience = await self.model.convert_messages_to_experience_async(messages)
        return _judged(experience, reward, info or {}, truncate_status)


class AsyncMultiTurnWorkflow(MultiTurnWorkflow):
    """:class:`MultiTurnWorkflow` on the event loop: write ``run_async`` and await the asynchronous method."""

    is_async = True


def _judged(experience: Experience, reward: float, info: Mapping[str, Any], truncate_status: str | None) -> Experience:
    experience.truncate_status = experience.truncate_status or truncate_status
    experience.reward = 0.0 if experience.truncate_status == RESPONSE_TRUNCATED else reward
    experience.info.update(info)
    experience.metrics.update({name: value for name, value in info.items() if isinstance(value, int | float)})
    return experience
