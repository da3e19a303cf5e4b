"""Workflows of several steps, rewarded at each step or at the end, whose model calls are recorded.

Each has an async twin, which uses the asynchronous client and has ``step_async`` and ``reward_async`` instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity_mq.experience import Experience
from trinity_mq.workflows.workflow import Task, TaskError, Workflow

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


TOO_LONG = "context_length_exceeded"


class RecordedWorkflow(Workflow, ABC):
    """A workflow whose experiences are the model calls that were recorded during it.

    A step whose prompt is too long for the model ends the run, which keeps what there is: nothing would be different
    in another try. The recorded experience of such a prompt is masked.
    """

    needs_history = True

    client: Any
    """The rollout model's OpenAI client, whose calls are recorded: existing agents need no change. None if unwanted."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: Sequence[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        if not model.enable_history:
            raise TaskError(  # which no retry cures
                f"{type(self).__name__} collects experiences from the recorded history, which is off; set "
                "explorer.rollout_model.enable_history: true in the configuration"
            )
        self.client = None
        if use_openai_client:
            self.client = model.get_openai_async_client() if self.is_async else model.get_openai_client()

    @property
    @abstractmethod
    def max_step_num(self) -> int:
        """Most steps of a run."""

    def _take(self, step: int) -> list[Experience]:
        """Return what was recorded since the last call, as experiences of ``step``."""
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.eid.step = step
        return experiences


def prompt_too_long(error: BaseException) -> bool:
    """Say whether a model was asked for more than it takes: the error or a cause of it has the API's code for that."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "code", None) == TOO_LONG:
            return True
        cause = cause.__cause__
    return False


def _give(experiences: list[Experience], reward: float) -> list[Experience]:
    for experience in experiences:
        experience.reward = reward
    return experiences


def _propagate(experiences: list[Experience], reward: float, steps: int) -> list[Experience]:
    for experience in _give(experiences, reward):
        experience.metrics["actual_env_steps"] = steps
    return experiences


class StepWiseRewardWorkflow(RecordedWorkflow):
    """Several steps, each with a reward of its own."""

    def run(self) -> list[Experience]:
        """Step until :meth:`step` says enough or ``max_step_num`` is reached; return the experiences of all steps."""
        experiences: list[Experience] = []
        for step in range(self.max_step_num):
            try:
                goes_on = self.step(step_num=step)
            except Exception as error:
                if not prompt_too_long(error):
                    raise
                return experiences + _give(self._take(step), 0.0)
            recorded = self._take(step)
            experiences += _give(recorded, self.reward(recorded, step_num=step))
            if not goes_on:
                break
        return experiences

    @abstractmethod
    def step(self, step_num: int) -> bool:
        """Run one step of the agent; return whether to go on. ``self.client`` serves agents that exist already."""

    @abstractmethod
    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return what the step ``step_num``, which made ``exps``, is worth."""


class RewardPropagationWorkflow(RecordedWorkflow):
    """Several steps with one reward at the end, which all of them get."""

    def run(self) -> list[Experience]:
        """Step until :meth:`step` says enough or ``max_step_num`` is reached; return the experiences of all steps."""
        experiences: list[Experience] = []
        steps = 0
        for step in range(self.max_step_num):
            try:
                goes_on = self.step(step_num=step)
            except Exception as error:
                if not prompt_too_long(error):
                    raise
                goes_on = False
            experiences += self._take(step)
            steps = step + 1
            if not goes_on:
                break
        return _propagate(experiences, self.reward(experiences), steps) if experiences else []

    @abstractmethod
    def step(self, step_num: int) -> bool:
        """Run one step of the agent; return whether to go on. ``self.client`` serves agents that exist already."""

    @abstractmethod
    def reward(self, exps: list[Experience]) -> float:
        """Return what the whole run, which made ``exps``, is worth."""


class AsyncStepWiseRewardWorkflow(RecordedWorkflow):
    """:class:`StepWiseRewardWorkflow` on the event loop."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Step until :meth:`step_async` says enough or ``max_step_num`` is reached; return all experiences."""
        experiences: list[Experience] = []
        for step in range(self.max_step_num):
            try:
                goes_on = await self.step_async(step_num=step)
            except Exception as error:
                if not prompt_too_long(error):
                    raise
                return experiences + _give(self._take(step), 0.0)
            recorded = self._take(step)
            experiences += _give(recorded, await self.reward_async(recorded, step_num=step))
            if not goes_on:
                break
        return experiences

    @abstractmethod
    async def step_async(self, step_num: int) -> bool:
        """Run one step of the agent; return whether to go on. ``self.client`` is an ``AsyncOpenAI``."""

    @abstractmethod
    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return what the step ``step_num``, which made ``exps``, is worth."""


class AsyncRewardPropagationWorkflow(RecordedWorkflow):
    """:class:`RewardPropagationWorkflow` on the event loop."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        """Step until :meth:`step_async` says enough or ``max_step_num`` is reached; return all experiences."""
        experiences: list[Experience] = []
        steps = 0
        for step in range(self.max_step_num):
            try:
                goes_on = await self.step_async(step_num=step)
            except Exception as error:
                if not prompt_too_long(error):
                    raise
                goes_on = False
            experiences += self._take(step)
            steps = step + 1
            if not goes_on:
                break
        return _propagate(experiences, await self.reward_async(experiences), steps) if experiences else []

    @abstractmethod
    async def step_async(self, step_num: int) -> bool:
        """Run one step of the agent; return whether to go on. ``self.client`` is an ``AsyncOpenAI``."""

    @abstractmethod
    async def reward_async(self, exps: list[Experience]) -> float:
        """Return what the whole run, which made ``exps``, is worth."""
