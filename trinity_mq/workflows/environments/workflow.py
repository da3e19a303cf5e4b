"""Gymnasium environments as workflows: the model sees each observation as text and answers with an action.

Observations and actions of Gymnasium's spaces are converted to text and back. Text written by a model is never
evaluated.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import structlog
from pydantic import Field, field_validator

from trinity_mq.experience import Experience
from trinity_mq.runtime.threads import in_thread
from trinity_mq.workflows.environments.environment import EXTRA, Environment, EnvironmentFailedError
from trinity_mq.workflows.games.game import Episode, EpisodeArguments, EpisodeWorkflow, game_seed
from trinity_mq.workflows.sync_async import run_in_thread_if_async
from trinity_mq.workflows.workflow import Task, TaskError

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

OPENING, CLOSING = "<action>", "</action>"
MOST_SHOWN = 100
"""Maximum characters of an answer, or of a character set, that a comment repeats."""
MOST_NAMED = 50
"""Maximum number of actions that are listed by name."""
_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)


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
        """Execute the action that ``answer`` denotes; return "", or the reason why ``answer`` is not an action.

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
    """One episode of an environment in each run. All runs of a task play the same episode: the task's seed resets the
    environment.

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

    async def _dual_body(self) -> list[Experience]:
        """Play the episode; return the experiences of all steps."""
        try:
            return await super()._dual_body()
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


class IllegalActionError(ValueError):
    """An answer is not an action of the space. The message tells the model so."""


class ActionParser(ABC):
    """Converts an answer into an action."""

    form: str
    """Description of an action, for the model."""
    example: str
    """An example action in the written form."""

    @abstractmethod
    def parse(self, text: str) -> Any:
        """Return the action that ``text`` denotes.

        Raises:
            IllegalActionError: The text is not an action.
        """

    def read(self, answer: str) -> Any:
        """Return the action of an answer: the content of the last ``<action></action>``, else the whole answer.

        Raises:
            IllegalActionError: That text is not an action.
        """
        end = answer.rfind(CLOSING)
        start = answer.rfind(OPENING, 0, max(end, 0))
        return self.parse((answer[start + len(OPENING) : end] if start >= 0 else answer).strip())


class TextActions(ActionParser):
    """Actions that are texts.

    Args:
        space: A ``gymnasium.spaces.Text``.
    """

    example = "..."

    def __init__(self, space: Any) -> None:
        self._space = space
        shown = space.characters if len(space.characters) <= MOST_SHOWN else f"{space.characters[:MOST_SHOWN]}..."
        self.form = f"An action is a text of {space.min_length} to {space.max_length} characters out of {shown}"

    def parse(self, text: str) -> str:
        if not self._space.contains(text):
            raise IllegalActionError(f"{text[:MOST_SHOWN]!r} is no action. {self.form}.")
        return text


class DiscreteActions(ActionParser):
    """Actions that are numbers and may have names.

    Args:
        space: A ``gymnasium.spaces.Discrete``.
        names: A name for each action, in order, case-insensitive. Empty: actions have no names.

    Raises:
        TaskError: The number of names differs from the number of actions, or two names are equal.
    """

    def __init__(self, space: Any, names: Sequence[str]) -> None:
        first, count = int(space.start), int(space.n)
        names = [name.strip() for name in names]
        if names and len(names) != count:
            raise TaskError(
                f"workflow_args.actions names {len(names)} actions ({', '.join(names)}), and the environment has "
                f"{count}; give a name to each, in order"
            )
        self._choices = range(first, first + count)
        self._numbers = dict(zip((name.casefold() for name in names), self._choices, strict=False))
        if len(self._numbers) != len(names):
            raise TaskError(
                f"workflow_args.actions has a name twice: {', '.join(names)}; case does not tell them apart"
            )
        named = names and count <= MOST_NAMED
        self.form = (
            f"The actions are {', '.join(names) if named else f'the numbers from {first} to {first + count - 1}'}"
        )
        self.example = names[0] if names else str(first)

    def parse(self, text: str) -> int:
        bare = text.strip(" \t\r\n.!`'\"")
        number = self._numbers.get(bare.casefold())
        if number is None and _NUMBER.fullmatch(bare):
            number = int(bare)
        if number is None or number not in self._choices:
            raise IllegalActionError(f"{text[:MOST_SHOWN]!r} is no action. {self.form}.")
        return number


def actions_of(space: Any, names: Sequence[str], environment: str) -> ActionParser:
    """Return the converter of answers into actions of a space.

    Args:
        space: The action space of the environment.
        names: Names of discrete actions.
        environment: Name of the environment, for errors.

    Raises:
        TaskError: The space is neither ``Text`` nor ``Discrete``, or the names do not fit it.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return DiscreteActions(space, names)
    if not isinstance(space, spaces.Text):
        raise TaskError(
            f"environment {environment!r} has actions {space}, wanted a gymnasium.spaces.Text or Discrete; put it into "
            "a gymnasium.ActionWrapper that reads them from text, and name a callable that returns that as env"
        )
    if names:
        raise TaskError(f"workflow_args.actions names {', '.join(names)}, and actions of {environment!r} are texts")
    return TextActions(space)


def check_observations(space: Any, environment: str) -> None:
    """Check that observations of a space can be written as text.

    Raises:
        TaskError: An observation of the space cannot be written as text.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces:
            check_observations(part, environment)
    elif not isinstance(space, spaces.Text | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        raise TaskError(
            f"environment {environment!r} has observations {space}, wanted Text, Discrete, MultiDiscrete, MultiBinary, "
            "or a Dict or Tuple of them; put it into a gymnasium.ObservationWrapper that writes them as text, and name "
            "a callable that returns that as env"
        )


def observation_text(observation: Any) -> str:
    """Return an observation as text. A text is unchanged. Whole numbers are separated by spaces, the items of a tuple
    by commas. A map has one line ``name: value`` for each item.
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{name}: {observation_text(value)}" for name, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(map(observation_text, observation))
    plain = observation.tolist() if hasattr(observation, "tolist") else observation  # arrays and numbers of NumPy
    if isinstance(plain, list):
        return " ".join(map(observation_text, plain))
    return str(int(plain))
