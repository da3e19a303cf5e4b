"""Frozen Lake as a task: one move a step over ice with holes, reward 1 at the goal.

The rules are those of FrozenLake-v1 of Gymnasium; the maps are drawn here. A game is a value; a move makes a new one.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from trinity_mq.workflows.games.game import Game, GameArguments, GameWorkflow, game_seed
from trinity_mq.workflows.workflow import TaskError

Place = tuple[int, int]
"""Row and column, from 0, from the top left."""

MOVES: Mapping[str, Place] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""In the order of Gymnasium: neighbours in it are at right angles."""
_ORDER = tuple(MOVES)

START, ICE, HOLE, GOAL, PLAYER, FALLEN = "S", "F", "H", "G", "P", "X"
MAX_SIZE = 64
MAX_DRAWS = 2000


class LakeError(ValueError):
    """A map that cannot be, or a move that does not exist; the message says why."""


@dataclass(frozen=True, slots=True)
class LakeMap:
    """The map of a lake: one start ``S``, one goal ``G``, ice ``F``, holes ``H``."""

    rows: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[str]) -> LakeMap:
        """Return the map in ``rows``, checked.

        Raises:
            LakeError: It is no rectangle, too large, has other signs, or not exactly one start and one goal.
        """
        text = "".join(rows)
        if not 0 < len(rows) <= MAX_SIZE or not 0 < len(rows[0]) <= MAX_SIZE:
            raise LakeError(f"the map has {len(rows)} rows; wanted 1 to {MAX_SIZE} rows of 1 to {MAX_SIZE} places")
        if {len(row) for row in rows} != {len(rows[0])}:
            raise LakeError("the rows of the map are not of one length; give a rectangle such as ['SF', 'HG']")
        strange = sorted(set(text) - {START, ICE, HOLE, GOAL})
        if strange:
            raise LakeError(f"the map holds {''.join(strange)[:20]!r}; wanted S (start), F (ice), H (hole), G (goal)")
        if text.count(START) != 1 or text.count(GOAL) != 1:
            raise LakeError(f"the map has {text.count(START)} S and {text.count(GOAL)} G; wanted exactly one of each")
        return cls(tuple(rows))

    def at(self, place: Place) -> str:
        """Return the sign at a place."""
        return self.rows[place[0]][place[1]]

    def find(self, sign: str) -> Place:
        """Return where a sign stands first."""
        return next(place for place in self.places() if self.at(place) == sign)

    def places(self) -> Iterator[Place]:
        """Yield every place, row by row."""
        return ((row, column) for row in range(len(self.rows)) for column in range(len(self.rows[0])))

    def neighbour(self, place: Place, move: str) -> Place:
        """Return where a move leads: the place itself at the edge."""
        row, column = place[0] + MOVES[move][0], place[1] + MOVES[move][1]
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return (row, column) if inside else place

    def shortest(self, start: Place | None = None) -> int | None:
        """Return the fewest moves to the goal, over ice that is not slippery; None if there is no way.

        Args:
            start: From where; None: from the start.
        """
        start = self.find(START) if start is None else start
        far = {start: 0}
        todo = deque([start])
        while todo:
            here = todo.popleft()
            if self.at(here) == GOAL:
                return far[here]
            for there in (self.neighbour(here, move) for move in MOVES):
                if there not in far and self.at(there) != HOLE:
                    far[there] = far[here] + 1
                    todo.append(there)
        return None


def make_lake(size: int, ice: float, seed: int, *, within: int | None = None) -> LakeMap:
    """Return a square map with a way from the top left to the bottom right, the same for the same arguments.

    Args:
        size: Rows and columns, from 2.
        ice: Chance of each place in between to be ice, in (0, 1].
        seed: Which one.
        within: The goal can be reached in so many moves.

    Raises:
        LakeError: A value out of range, or no such map among MAX_DRAWS.
    """
    least = 2 * (size - 1)
    if not 2 <= size <= MAX_SIZE or not 0 < ice <= 1:
        raise LakeError(f"size is {size}, ice is {ice}; wanted a size from 2 to {MAX_SIZE} and ice above 0, at most 1")
    if within is not None and within < least:
        raise LakeError(f"a lake of size {size} needs at least {least} moves; {within} are allowed: raise that")
    draw = random.Random(f"lake/{size}/{ice}/{seed}")
    for _ in range(MAX_DRAWS):
        signs = [ICE if draw.random() < ice else HOLE for _ in range(size * size)]
        signs[0], signs[-1] = START, GOAL
        lake = LakeMap(tuple("".join(signs[row * size : (row + 1) * size]) for row in range(size)))
        moves = lake.shortest()
        if moves is not None and (within is None or moves <= within):
            return lake
    raise LakeError(f"none of {MAX_DRAWS} maps of size {size} with ice {ice} has a way to the goal; raise ice")


@dataclass(frozen=True, slots=True)
class FrozenLake:
    """A game: the map, where the player stands, and how the ice behaves."""

    lake: LakeMap
    place: Place
    slippery: bool = False
    """A move goes where it was meant to, or to either side of it, with a chance of a third each."""
    seed: int = 0
    """Seed of the slips."""
    moves: int = 0
    """Made so far."""

    @classmethod
    def begin(cls, lake: LakeMap, *, slippery: bool = False, seed: int = 0) -> FrozenLake:
        """Return the game at its start."""
        return cls(lake, lake.find(START), slippery, seed)

    @property
    def fallen(self) -> bool:
        """The player is in a hole."""
        return self.lake.at(self.place) == HOLE

    @property
    def solved(self) -> bool:
        """The player is at the goal."""
        return self.lake.at(self.place) == GOAL

    @property
    def over(self) -> bool:
        """No move changes anything any more."""
        return self.fallen or self.solved

    def move(self, move: str) -> FrozenLake:
        """Return the game after ``move``.

        Raises:
            LakeError: The game is over, or there is no such move.
        """
        if move not in MOVES:
            raise LakeError(f"no move {move!r}; wanted one of {', '.join(MOVES)}")
        if self.over:
            raise LakeError("the game is over; begin another one")
        if self.slippery:
            turn = random.Random(f"slip/{self.seed}/{self.moves}").choice((-1, 0, 1))
            move = _ORDER[(_ORDER.index(move) + turn) % len(_ORDER)]
        return replace(self, place=self.lake.neighbour(self.place, move), moves=self.moves + 1)

    def render(self) -> str:
        """Return the map with the player on it: ``P``, ``X`` in a hole."""
        rows = [list(row.replace(START, ICE)) for row in self.lake.rows]
        rows[self.place[0]][self.place[1]] = FALLEN if self.fallen else PLAYER
        return "\n".join("".join(row) for row in rows)


INSTRUCTIONS = """\
You walk over a frozen lake. P is you, F is ice that holds, H is a hole, G is the goal. The map is seen from above.
Reach the goal without stepping into a hole. A move off the map leaves you where you are.
In each turn think as long as you need, then make one move: end your answer with <move>left</move>, <move>down</move>,
<move>right</move> or <move>up</move>."""
SLIPPERY = "\nThe ice is slippery: you often slide to one side of where you wanted to go."

_MARKED = re.compile(r"<move>\s{0,10}(left|down|right|up)\s{0,10}</move>", re.IGNORECASE)
_LETTERS = {move[0]: move for move in MOVES}


class LakeArguments(GameArguments):
    """Arguments of a lake; ``map`` comes before ``size`` and ``ice``."""

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
        return self.state.over

    @property
    def won(self) -> bool:
        return self.state.solved

    @property
    def progress(self) -> float:
        """The share of the shortest way that lies behind the player; 0 in a hole."""
        left = None if self.state.fallen else self.state.lake.shortest(self.state.place)
        return 0.0 if left is None else max(0.0, 1.0 - left / self._whole)

    def metrics(self) -> dict[str, float]:
        return {"moves": self.state.moves, "unclear_answers": self.unclear, "fallen": float(self.state.fallen)}


def read_move(answer: str) -> str | None:
    """Return the last marked move of an answer, or the one that is all of it: ``down``, ``D``; None without one."""
    marked = _MARKED.findall(answer)
    if marked:
        return str(marked[-1]).lower()
    bare = answer.strip().strip(".!`'\"").lower() if len(answer) < 20 else ""
    return bare if bare in MOVES else _LETTERS.get(bare)


class FrozenLakeWorkflow(GameWorkflow):
    """Frozen Lake on a map that the task gives, or on one drawn from the task's seed."""

    arguments_kind = LakeArguments
    arguments: LakeArguments

    def make_game(self) -> Game:
        given, seed = self.arguments, game_seed(self.task, self.arguments)
        try:
            if given.map is not None:
                lake = LakeMap.of(given.map)
            else:
                lake = make_lake(given.size, given.ice, seed, within=given.max_steps)
            if lake.shortest() is None:
                raise LakeError("the map has no way from S to G")
        except LakeError as error:
            raise TaskError(f"no lake for this task: {error}") from error
        return LakeGame(FrozenLake.begin(lake, slippery=given.slippery, seed=seed))


class AsyncFrozenLakeWorkflow(FrozenLakeWorkflow):
    """:class:`FrozenLakeWorkflow` on the event loop."""

    is_async = True
