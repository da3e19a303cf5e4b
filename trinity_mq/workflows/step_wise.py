"""Workflows of several steps whose model calls are recorded, with a reward at each step or at the end.

Each class has an asynchronous twin, which uses the asynchronous client and has ``step_async`` and ``reward_async``
instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.workflows.errors import causes
from trinity_mq.workflows.sync_async import DualWorkflow, call
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper


TOO_LONG = "context_length_exceeded"
ENDED_TRUNCATED = "ended_truncated"
"""Metric of the run of a workflow with steps: 1 if an answer that was cut at a limit ended the run, else 0."""


class HistoryOffError(TaskError, AssertionError):
    """The recording of the model's calls, from which the experiences come, is off. It is an ``AssertionError`` too, as
    in Trinity-RFT.
    """


class RecordedWorkflow(DualWorkflow, ABC):
    """A workflow of steps. Its experiences are the model calls recorded during the steps.

    A step whose prompt is too long for the model ends the run, and the run keeps its earlier experiences: a retry would
    fail in the same way. The recorded experience of such a prompt is masked. A run whose first prompt is too long has
    failed. A step with an answer that was cut at a limit is rewarded and is the last step, unless
    :attr:`stop_on_truncation` is False.
    """

    needs_history = True
    stop_on_truncation: ClassVar[bool] = True
    """True: a step with an answer that is ``response_truncated`` ends the run. False suits answers that are cut on
    purpose, such as answers to calls with ``max_tokens=1``.
    """

    client: Any
    """The rollout model's OpenAI client. Its calls are recorded, so existing agents need no change. None if
    ``use_openai_client`` is False.
    """

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
            raise HistoryOffError(  # a retry cannot help
                f"{type(self).__name__} collects experiences from the recorded history, which is off; set "
                "explorer.rollout_model.enable_history: true in the configuration"
            )
        self.client = None
        if use_openai_client:
            self.client = model.get_openai_async_client() if self.is_async else model.get_openai_client()

    @property
    @abstractmethod
    def max_step_num(self) -> int:
        """Maximum number of steps of a run."""

    async def _agent_step(self, step_num: int) -> bool:
        """Run one step; return whether the run continues."""
        continues: bool = await call(self.is_async, self, "step", step_num=step_num)
        return continues

    async def _recorded_step(self, step_num: int) -> tuple[list[Experience], bool, bool]:
        """Run one step; return its recorded experiences, whether another step may follow, and whether its prompt was
        too long.

        Raises:
            PromptTooLong: The step is the first, and every prompt of it was too long, so the model did not answer.
        """
        continues = too_long = False
        try:
            continues = await self._agent_step(step_num)
        except Exception as error:
            if not prompt_too_long(error):
                raise
            too_long = True
        experiences = self.model.extract_experience_from_history()
        if step_num == 0:
            check_asked(experiences, None if too_long else self.model)
        for experience in experiences:
            experience.eid.step = step_num
        return experiences, continues and not (_is_cut(experiences) and self.stop_on_truncation), too_long

    def _with_end(self, experiences: list[Experience], last: list[Experience]) -> list[Experience]:
        """Return the experiences of a run with the metric :data:`ENDED_TRUNCATED`.

        Args:
            experiences: The experiences of the run.
            last: The experiences of its last step.
        """
        value = float(_is_cut(last) and self.stop_on_truncation)
        for experience in experiences:
            experience.metrics = {**(experience.metrics or {}), ENDED_TRUNCATED: value}
        return experiences


def _is_cut(experiences: Sequence[Experience]) -> bool:
    """Return whether an answer was cut at a limit. A test's stand-in for an experience may lack the status."""
    return any(getattr(experience, "truncate_status", None) == RESPONSE_TRUNCATED for experience in experiences)


def prompt_too_long(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes has the API's code for a prompt that is too long for the model."""
    return any(getattr(cause, "code", None) == TOO_LONG for cause in causes(error))


class _StepRewards(RecordedWorkflow):
    """Base of the two forms of workflows with a reward for each step."""

    async def _dual_body(self) -> list[Experience]:
        """Run steps until a step ends the run or ``max_step_num`` is reached; return the experiences of all steps."""
        experiences: list[Experience] = []
        recorded: list[Experience] = []
        for step in range(self.max_step_num):
            recorded, continues, too_long = await self._recorded_step(step)
            reward = 0.0 if too_long else await call(self.is_async, self, "reward", recorded, step_num=step)
            for experience in recorded:
                experience.reward = reward
            experiences += recorded
            if not continues:
                break
        return self._with_end(experiences, recorded)


class FinalRewardWorkflow(RecordedWorkflow):
    """Base of workflows with one reward at the end, which is given to the experiences of all steps."""

    async def _dual_body(self) -> list[Experience]:
        """Run steps until a step ends the run or ``max_step_num`` is reached; return the experiences of all steps."""
        experiences: list[Experience] = []
        recorded: list[Experience] = []
        steps = 0
        for step in range(self.max_step_num):
            recorded, continues, _ = await self._recorded_step(step)
            experiences += recorded
            steps = step + 1
            if not continues:
                break
        reward = await self._run_reward(experiences)
        for experience in experiences:
            experience.reward = reward
            experience.metrics = {**(experience.metrics or {}), "actual_env_steps": steps}
        return self._with_end(experiences, recorded)

    async def _run_reward(self, exps: list[Experience]) -> float:
        """Return the reward of the whole run; ``exps`` is empty if no step asked the model."""
        reward: float = await call(self.is_async, self, "reward", exps)
        return reward


class StepWiseRewardWorkflow(_StepRewards):
    """A workflow of several steps, each with its own reward."""

    @abstractmethod
    def step(self, step_num: int) -> bool:
        """Run one step of the agent; return whether the run continues. ``self.client`` is an ``OpenAI``."""

    @abstractmethod
    def reward(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of step ``step_num``, which produced ``exps``."""


class AsyncStepWiseRewardWorkflow(_StepRewards):
    """:class:`StepWiseRewardWorkflow` on the event loop."""

    is_async = True

    @abstractmethod
    async def step_async(self, step_num: int) -> bool:
        """Run one step of the agent; return whether the run continues. ``self.client`` is an ``AsyncOpenAI``."""

    @abstractmethod
    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        """Return the reward of step ``step_num``, which produced ``exps``."""


class RewardPropagationWorkflow(FinalRewardWorkflow):
    """A workflow of several steps with one reward at the end, given to all steps."""

    @abstractmethod
    def step(self, step_num: int) -> bool:
        """Run one step of the agent; return whether the run continues. ``self.client`` is an ``OpenAI``."""

    @abstractmethod
    def reward(self, exps: list[Experience]) -> float:
        """Return the reward of the whole run, which produced ``exps``."""


class AsyncRewardPropagationWorkflow(FinalRewardWorkflow):
    """:class:`RewardPropagationWorkflow` on the event loop."""

    is_async = True

    @abstractmethod
    async def step_async(self, step_num: int) -> bool:
        """Run one step of the agent; return whether the run continues. ``self.client`` is an ``AsyncOpenAI``."""

    @abstractmethod
    async def reward_async(self, exps: list[Experience]) -> float:
        """Return the reward of the whole run, which produced ``exps``."""
