"""Gymnasium environments as workflows: the model sees each observation as text and answers with an action."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import structlog
from pydantic import Field, field_validator

from trinity_mq.experience import Experience
from trinity_mq.runtime.threads import in_thread
from trinity_mq.workflows.environments.environment import EXTRA, Environment, EnvironmentFailedError
from trinity_mq.workflows.environments.spaces import (
    CLOSING,
    OPENING,
    ActionParser,
    IllegalActionError,
    actions_of,
    check_observations,
    observation_text,
)
from trinity_mq.workflows.games.game import Episode, EpisodeArguments, EpisodeWorkflow, game_seed
from trinity_mq.workflows.sync_async import run_in_thread_if_async
from trinity_mq.workflows.workflow import Task

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

log = structlog.get_logger(__name__)

SUCCESS = ("success", "is_success")
"""Keys of an environment's info that tell whether its task is solved."""
CLOSE_SECONDS = 10.0
"""Seconds that an environment has to close. A thread that takes longer is abandoned."""
INSTRUCTIONS = """\
You act in an environment, step by step. Each message shows what you observe.
In each turn think as long as you need, then end your answer with one action, such as {example}.
{form}."""


class GymnasiumArguments(EpisodeArguments):
    """Arguments of an environment. ``seed``, ``max_steps`` and ``env_args`` may also be set in the record."""

    env: str
    """Id of a registered environment (``module:Id-v0`` imports the module that registers it), or the dotted path of a
    callable that creates an environment.
    """
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    actions: tuple[str, ...] = ()
    """Names of discrete actions, in order. Their numbers are accepted too. Empty: numbers only."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of a run: the sum of the environment's rewards, or the last reward."""
    instructions: str = ""
    """Text that precedes the description of actions in the system prompt."""

    @field_validator("env")
    @classmethod
    def _is_installed(cls, env: str) -> str:
        if importlib.util.find_spec("gymnasium") is None:
            raise ValueError(EXTRA)
        return env


class EnvironmentEpisode(Episode):
    """An environment in play. Its methods may block, except :meth:`show`.

    Args:
        environment: The environment.
        arguments: Its settings.
    """

    longest_answer = None  # a shortened text would be another action

    def __init__(self, environment: Environment, arguments: GymnasiumArguments) -> None:
        self._environment, self._arguments = environment, arguments
        self._actions: ActionParser
        self._shown = ""
        self._over = False
        self._success: float | None = None
        self._rewards: list[float] = []
        self.illegal = 0
        """Number of answers that were not an action."""

    def start(self, seed: int) -> None:
        """Reset the environment.

        Args:
            seed: Seed of the episode.

        Raises:
            TaskError: The environment does not exist, or its spaces cannot be written as text.
            EnvironmentFailedError: The environment raised an error.
        """
        observation, info = self._environment.reset(seed)
        arguments, name = self._arguments, self._environment.name
        check_observations(self._environment.observation_space, name)
        self._actions = actions_of(self._environment.action_space, arguments.actions, name)
        form = INSTRUCTIONS.format(example=f"{OPENING}{self._actions.example}{CLOSING}", form=self._actions.form)
        self.instructions = f"{arguments.instructions.strip()}\n\n{form}" if arguments.instructions else form
        self._observe(observation, info)

    def show(self) -> str:
        return self._shown

    def play(self, answer: str) -> str:
        """Execute the action that ``answer`` denotes.

        Raises:
            EnvironmentFailedError: The environment raised an error.
        """
        try:
            action = self._actions.read(answer)
        except IllegalActionError as error:
            self.illegal += 1
            return str(error)
        transition = self._environment.step(action)
        self._rewards.append(transition.reward)
        self._over = transition.over
        self._observe(transition.observation, transition.info)
        return ""

    @property
    def over(self) -> bool:
        return self._over

    @property
    def worth(self) -> float:
        """Sum of the rewards, or the last reward, depending on the arguments. 0 before the first step."""
        return sum(self._rewards) if self._arguments.reward == "sum" else [0.0, *self._rewards][-1]

    def metrics(self) -> dict[str, float]:
        success = {} if self._success is None else {"success": self._success}
        return {
            **success,
            "steps": float(len(self._rewards)),
            "illegal_actions": float(self.illegal),
            "ended": float(self._over),
        }

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> None:
        try:
            self._shown = observation_text(observation)
        except (TypeError, ValueError) as error:
            raise EnvironmentFailedError(
                f"environment {self._environment.name!r} gave the observation {observation!r:.80}, which is not of its "
                f"space: {error}"
            ) from error
        for value in (info[key] for key in SUCCESS if key in info):
            self._success = float(bool(value))


class GymnasiumWorkflow(EpisodeWorkflow[EnvironmentEpisode]):
    """One episode of an environment in each run. All runs of a task play the same episode: the task's seed resets it.

    The environment is created for the run and closed when the run ends, also after an error. On the event loop its
    methods run in threads, one at a time.
    """

    arguments_kind: ClassVar[type[EpisodeArguments]] = GymnasiumArguments
    arguments: GymnasiumArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._environment = Environment(self.arguments.env, self.arguments.env_args)

    @classmethod
    def record_keys(cls) -> Iterable[str]:
        """Return the arguments that a record may set. ``env`` is excluded, because data must not choose code."""
        return ("seed", "max_steps", "env_args")

    async def begin(self) -> EnvironmentEpisode:
        episode = EnvironmentEpisode(self._environment, self.arguments)
        seed = game_seed(self.task, self.arguments)
        await run_in_thread_if_async(self.is_async, lambda: episode.start(seed), "environment")
        return episode

    async def played(self, answer: str) -> str:
        return await run_in_thread_if_async(self.is_async, lambda: self.episode.play(answer), "environment")

    def worth(self) -> float:
        return self.episode.worth

    async def body(self) -> list[Experience]:
        """Play the episode; return the experiences of all steps."""
        try:
            return await super().body()
        finally:
            await self._close()

    async def _close(self) -> None:
        """Close the environment. An error is only logged, because the episode has already been played."""
        try:
            if self.is_async:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await in_thread(self._environment.close, "environment")
            else:
                self._environment.close()
        except TimeoutError:
            log.warning("environment_not_closed", env=self.arguments.env, seconds=CLOSE_SECONDS)
        except EnvironmentFailedError as error:
            log.warning("environment_not_closed", env=self.arguments.env, error=str(error))


class AsyncGymnasiumWorkflow(GymnasiumWorkflow):
    """:class:`GymnasiumWorkflow` on the event loop."""

    is_async = True
