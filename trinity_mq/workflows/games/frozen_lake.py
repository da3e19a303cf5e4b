"""Frozen Lake as a task: one move a step, reward 1 at the goal."""

from __future__ import annotations

import re

from pydantic import Field

from trinity_mq.workflows.games.frozen_lake_env import MAX_SIZE, MOVES, FrozenLake, LakeError, LakeMap, make_lake
from trinity_mq.workflows.games.game import AsyncGameWorkflow, Game, GameArguments, GameWorkflow, game_seed
from trinity_mq.workflows.task import Task, TaskError

INSTRUCTIONS = """\
You walk over a frozen lake. P is you, F is ice that holds, H is a hole, G is the goal. The map is seen from above.
Reach the goal without stepping into a hole. A move off the map leaves you where you are.
In each turn think as long as you need, then make one move: end your answer with <move>left</move>, <move>down</move>,
<move>right</move> or <move>up</move>."""
SLIPPERY = "\nThe ice is slippery: you often slide to one side of where you wanted to go."

_MARKED = re.compile(r"<move>\s{0,10}(left|down|right|up)\s{0,10}</move>", re.IGNORECASE)
_LETTERS = {move[0]: move for move in MOVES}


class LakeArguments(GameArguments):
    """What a lake takes; ``map`` before ``size`` and ``ice``."""

    map: tuple[str, ...] | None = None
    """Rows of S (start), F (ice), H (hole), G (goal)."""
    size: int = Field(default=4, ge=2, le=MAX_SIZE)
    ice: float = Field(default=0.8, gt=0, le=1)
    """Chance of a place to be ice."""
    slippery: bool = False


class LakeGame(Game):
    """A lake in play."""

    instructions = INSTRUCTIONS

    def __init__(self, state: FrozenLake) -> None:
        self.state = state
        self._whole = state.lake.shortest() or 1
        self.unclear = 0
        """Answers that named no move."""
        if state.slippery:
            self.instructions = INSTRUCTIONS + SLIPPERY

    def show(self) -> str:
        """Return the map with the player on it."""
        return self.state.render()

    def play(self, answer: str) -> str:
        """Make the move that ``answer`` ends with."""
        move = read_move(answer)
        if move is None:
            self.unclear += 1
            return "Your answer names no move. End it with one, such as <move>down</move>."
        before = self.state.place
        self.state = self.state.move(move)
        return "You are where you were." if self.state.place == before else ""

    @property
    def over(self) -> bool:
        """In a hole or at the goal."""
        return self.state.over

    @property
    def won(self) -> bool:
        """At the goal."""
        return self.state.solved

    @property
    def progress(self) -> float:
        """The share of the shortest way that lies behind the player; 0 in a hole."""
        left = None if self.state.fallen else self.state.lake.shortest(self.state.place)
        return 0.0 if left is None else max(0.0, 1.0 - left / self._whole)

    def metrics(self) -> dict[str, float]:
        """Return moves made, answers without a move, and whether it ended in a hole."""
        return {"moves": self.state.moves, "unclear_answers": self.unclear, "fallen": float(self.state.fallen)}


def read_move(answer: str) -> str | None:
    """Return the last marked move of an answer, or the one that is all of it: ``down``, ``D``; None without one."""
    marked = _MARKED.findall(answer)
    if marked:
        return str(marked[-1]).lower()
    bare = answer.strip().strip(".!`'\"").lower() if len(answer) < 20 else ""
    return bare if bare in MOVES else _LETTERS.get(bare)


def make_game(task: Task, arguments: LakeArguments) -> LakeGame:
    """Return the lake of ``task`` at its beginning.

    Raises:
        TaskError: There is no such lake.
    """
    seed = game_seed(task, arguments)
    try:
        if arguments.map is not None:
            lake = LakeMap.of(arguments.map)
        else:
            lake = make_lake(arguments.size, arguments.ice, seed, within=arguments.max_steps)
        if lake.shortest() is None:
            raise LakeError("the map has no way from S to G")
    except LakeError as error:
        raise TaskError(f"no lake for this task: {error}") from error
    return LakeGame(FrozenLake.begin(lake, slippery=arguments.slippery, seed=seed))


class FrozenLakeWorkflow(GameWorkflow):
    """Frozen Lake on a map that the task gives, or on one drawn from the task's seed."""

    arguments_kind = LakeArguments
    arguments: LakeArguments

    def make_game(self) -> Game:
        """Return the task's lake."""
        return make_game(self.task, self.arguments)


class AsyncFrozenLakeWorkflow(AsyncGameWorkflow):
    """:class:`FrozenLakeWorkflow` on the event loop."""

    arguments_kind = LakeArguments
    arguments: LakeArguments

    def make_game(self) -> Game:
        """Return the task's lake."""
        return make_game(self.task, self.arguments)
