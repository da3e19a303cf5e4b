"""Episodes as workflows: the model sees the state and answers with a move, until the episode is over. One reward
follows at the end. A game is an episode that can be won.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.families.thoughts import after_thoughts
from trinity_mq.models.recording.merging import merge_turns
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.step_wise import FinalRewardWorkflow
from trinity_mq.workflows.sync_async import call, run_in_thread_if_async
from trinity_mq.workflows.workflow import Task

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

MAX_SEEN = 4000
"""Number of characters at the end of an answer that are searched for moves."""


class EpisodeArguments(Arguments):
    """Arguments of every episode, in ``workflow_args`` or in the record."""

    max_steps: int = Field(default=10, ge=1, le=1000)
    """Maximum answers of the model in one run."""
    seed: int | None = None
    """Seed of the episode. None: the record's position in its taskset, so each record is a different episode; 0 without
    a position.
    """
    memory: bool = True
    """True: each step sees the whole conversation. False: each step sees only the current state."""
    merge_turns: bool = True
    """With ``memory``: merge steps into one experience where the prompt of a step begins with exactly the tokens of the
    steps before it. The same tokens are trained on, and the shared prefix is processed once.
    """
    terse: bool = False
    """Show only the game, without instructions and comments, as very small models need it."""


class GameArguments(EpisodeArguments):
    """Arguments of every game."""

    partial_credit: float = Field(default=0.0, ge=0, le=1)
    """Factor of the reward of a game that was not won: its reward is this factor times its progress."""


class Episode(ABC):
    """The episode of one run, such as a game or an environment in play, as its workflow sees it."""

    instructions: str = ""
    """The system prompt, unless the taskset's format has a system prompt."""
    longest_answer: int | None = MAX_SEEN
    """Number of characters at the end of an answer that :meth:`play` receives. None: the whole answer."""

    @abstractmethod
    def show(self) -> str:
        """Return the state as the player sees it."""

    @abstractmethod
    def play(self, answer: str) -> str:
        """Make the move of ``answer`` and return a comment on it, or "". An invalid answer must not raise an error."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether no further move is possible."""

    def metrics(self) -> dict[str, float]:
        """Return the episode's metrics, for the experiences of its run."""
        return {}


class Game(Episode):
    """An episode that can be won."""

    @property
    @abstractmethod
    def won(self) -> bool:
        """Whether the game was won: reward 1."""

    @property
    def over(self) -> bool:
        """Whether no further move is possible."""
        return self.won

    @property
    def progress(self) -> float:
        """Progress towards a win, from 0 to 1."""
        return 0.0


def game_seed(task: Task, arguments: EpisodeArguments) -> int:
    """Return the seed of the task's episode: all runs of a task play the same episode."""
    if arguments.seed is not None:
        return arguments.seed
    position = task.index.get("index")
    return position if isinstance(position, int) else 0


E = TypeVar("E", bound=Episode)


class EpisodeWorkflow(FinalRewardWorkflow, Generic[E]):
    """One episode per run. Write :meth:`begin` and :meth:`worth`, and set ``arguments_kind`` to the class of the
    arguments.

    Each step is one request; training uses its recorded tokens.
    """

    stop_on_truncation = False  # a move can be read from a truncated answer
    arguments_kind: ClassVar[type[EpisodeArguments]] = EpisodeArguments
    arguments: EpisodeArguments
    episode: E
    """The episode of this run; set by the first step."""

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.arguments = arguments_of(task, self.arguments_kind, record_keys=self.record_keys())
        self._turns: list[dict[str, str]] = []
        self._comment, self._prompt_too_long = "", False

    @classmethod
    def record_keys(cls) -> Iterable[str]:
        """Return the arguments that a record may set."""
        return cls.arguments_kind.model_fields

    @abstractmethod
    async def begin(self) -> E:
        """Return the task's episode at its beginning.

        Raises:
            TaskError: The task describes an invalid episode.
        """

    @abstractmethod
    def worth(self) -> float:
        """Return the reward of the episode."""

    async def played(self, answer: str) -> str:
        """Make the move of ``answer`` in the episode and return the episode's comment on the move."""
        return self.episode.play(answer)

    @property
    def max_step_num(self) -> int:
        return self.arguments.max_steps

    async def _dual_body(self) -> list[Experience]:
        """Play the episode; return the experiences of all steps."""
        experiences = await super()._dual_body()
        return merge_turns(experiences) if self.arguments.memory and self.arguments.merge_turns else experiences

    async def _agent_step(self, step_num: int) -> bool:
        """Ask for a move and play it; return whether the episode continues."""
        if step_num == 0:
            self.episode = await self.begin()
        (response,) = await call(self.is_async, self.model, "chat", self._conversation(), n=1)
        if step_num == 0:
            check_asked([response], self.model)
        if response.truncate_status == PROMPT_TRUNCATED:  # the model never saw the question, so it made none
            self._prompt_too_long = True
            return False
        answer = response.response_text or ""
        self._turns.append({"role": "assistant", "content": answer})
        move, limit = after_thoughts(answer, response.prompt_text), self.episode.longest_answer
        self._comment = await self.played(move if limit is None else move[-limit:])
        return not self.episode.over

    def _conversation(self) -> list[dict[str, str]]:
        """Return the conversation that asks for the next move."""
        terse = self.arguments.terse
        if not self.arguments.memory:
            self._turns.clear()
        comment = "" if terse or not self._comment else f"{self._comment}\n\n"
        self._turns.append({"role": "user", "content": comment + self.episode.show()})
        system = self.task.format_args.system_prompt or ("" if terse else self.episode.instructions)
        return [{"role": "system", "content": system}, *self._turns] if system else list(self._turns)

    async def _run_reward(self, exps: list[Experience]) -> float:
        """Return the reward of the episode, and add its metrics to the experiences."""
        metrics = {**self.episode.metrics(), "prompt_too_long": float(self._prompt_too_long)}
        for experience in exps:
            experience.metrics.update(metrics)
        return self.worth()


class GameWorkflow(EpisodeWorkflow[Game]):
    """One game per run. Write :meth:`make_game`, and set ``arguments_kind`` to the class of the arguments.

    The reward is 1 for a game that was won, else ``partial_credit`` times its progress.
    """

    arguments_kind: ClassVar[type[EpisodeArguments]] = GameArguments
    arguments: GameArguments

    @abstractmethod
    def make_game(self) -> Game:
        """Return the task's game at its beginning. The asynchronous form calls it in a thread.

        Raises:
            TaskError: The task describes an invalid game.
        """

    async def begin(self) -> Game:
        return await run_in_thread_if_async(self.is_async, self.make_game, "game")

    def worth(self) -> float:
        return 1.0 if self.episode.won else self.arguments.partial_credit * self.episode.progress

    async def _run_reward(self, exps: list[Experience]) -> float:
        """Return the reward of the game, and add its metrics to the experiences."""
        reward = await super()._run_reward(exps)
        for experience in exps:
            experience.metrics["success"] = float(self.episode.won)
        return reward


class AsyncGameWorkflow(GameWorkflow):
    """:class:`GameWorkflow` on the event loop."""

    is_async = True
