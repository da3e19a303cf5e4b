"""Frozen Lake as a task: one move per step over ice with holes, reward 1 at the goal.

The rules follow FrozenLake-v1 of Gymnasium; the maps are generated here. A game is immutable; a move returns a new
game.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from trinity_mq.workflows.games.game import Game, GameArguments, GameWorkflow, game_seed
from trinity_mq.workflows.workflow import TaskError

Place = tuple[int, int]
"""Row and column, from 0, counted from the top left."""

MOVES: Mapping[str, Place] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""Row and column offsets in the order of Gymnasium: adjacent entries are perpendicular moves."""
_ORDER = tuple(MOVES)

START, ICE, HOLE, GOAL, PLAYER, FALLEN = "S", "F", "H", "G", "P", "X"
MAX_SIZE = 64
MAX_DRAWS = 2000


class LakeError(ValueError):
    """An invalid map or move. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class LakeMap:
    """The map of a lake: one start ``S``, one goal ``G``, ice ``F``, holes ``H``."""

    rows: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[str]) -> LakeMap:
        """Return the map in ``rows``, checked.

        Raises:
            LakeError: The map is not a rectangle, is too large, has other characters, or does not have exactly one
                start and one goal.
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
        """Return the character at a place."""
        return self.rows[place[0]][place[1]]

    def find(self, sign: str) -> Place:
        """Return the first place of a character."""
        return divmod("".join(self.rows).index(sign), len(self.rows[0]))

    def neighbour(self, place: Place, move: str) -> Place:
        """Return the place that a move reaches. At the edge the place stays the same."""
        row, column = place[0] + MOVES[move][0], place[1] + MOVES[move][1]
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
        return (row, column) if inside else place

    def shortest(self, start: Place | None = None) -> int | None:
        """Return the fewest moves to the goal over ice that is not slippery. Return None if the goal cannot be reached.

        Args:
            start: The first place. None: the map's start.
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
    """Return a square map with a path from the top left to the bottom right. Equal arguments give the same map.

    Args:
        size: Rows and columns, at least 2.
        ice: Probability that a place other than start and goal is ice, in (0, 1].
        seed: Seed of the map.
        within: Maximum moves of the shortest path. None: no limit.

    Raises:
        LakeError: A value is out of range, or none of MAX_DRAWS maps has such a path.
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
    """A game: the map, the player's place, and the ice's behaviour."""

    lake: LakeMap
    place: Place
    slippery: bool = False
    """A move goes in the intended direction or to either side of it, with probability 1/3 each."""
    seed: int = 0
    """Seed of the slips."""
    moves: int = 0
    """Number of moves made."""

    @classmethod
    def begin(cls, lake: LakeMap, *, slippery: bool = False, seed: int = 0) -> FrozenLake:
        """Return the game at its start."""
        return cls(lake, lake.find(START), slippery, seed)

    @property
    def fallen(self) -> bool:
        """Whether the player is in a hole."""
        return self.lake.at(self.place) == HOLE

    @property
    def solved(self) -> bool:
        """Whether the player is at the goal."""
        return self.lake.at(self.place) == GOAL

    @property
    def over(self) -> bool:
        """Whether no further move is possible."""
        return self.fallen or self.solved

    def move(self, move: str) -> FrozenLake:
        """Return the game after ``move``.

        Raises:
            LakeError: The game is over, or the move does not exist.
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
        """Return the map with the player on it: ``P``, or ``X`` in a hole."""
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
    """Arguments of a lake. ``map`` overrides ``size`` and ``ice``."""

    map: tuple[str, ...] | None = None
    """Rows of S (start), F (ice), H (hole), G (goal)."""
    size: int = Field(default=4, ge=2, le=MAX_SIZE)
    ice: float = Field(default=0.8, gt=0, le=1)
    """Probability that a place other than start and goal is ice."""
    slippery: bool = False


class LakeGame(Game):
    """A game of Frozen Lake that a model plays."""

    instructions = INSTRUCTIONS

    def __init__(self, state: FrozenLake) -> None:
        self.state = state
        self._shortest_path = state.lake.shortest() or 1
        self.unclear = 0
        """Number of answers that did not name a move."""
        if state.slippery:
            self.instructions = INSTRUCTIONS + SLIPPERY

    def show(self) -> str:
        return self.state.render()

    def play(self, answer: str) -> str:
        """Make the last move that ``answer`` names."""
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
        """Share of the shortest path that the player has covered; 0 in a hole."""
        remaining_moves = None if self.state.fallen else self.state.lake.shortest(self.state.place)
        return 0.0 if remaining_moves is None else max(0.0, 1.0 - remaining_moves / self._shortest_path)

    def metrics(self) -> dict[str, float]:
        return {"moves": self.state.moves, "unclear_answers": self.unclear, "fallen": float(self.state.fallen)}


def read_move(answer: str) -> str | None:
    """Return the last marked move of an answer, or the move that is the whole answer, such as ``down`` or ``D``. Return
    None if the answer names no move.
    """
    marked = _MARKED.findall(answer)
    if marked:
        return str(marked[-1]).lower()
    bare = answer.strip().strip(".!`'\"").lower() if len(answer) < 20 else ""
    return bare if bare in MOVES else _LETTERS.get(bare)


class FrozenLakeWorkflow(GameWorkflow):
    """Frozen Lake on the map of the task, or on a map generated from the task's seed."""

    arguments_kind = LakeArguments
    arguments: LakeArguments

    def make_game(self) -> Game:
        arguments, seed = self.arguments, game_seed(self.task, self.arguments)
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


class AsyncFrozenLakeWorkflow(FrozenLakeWorkflow):
    """:class:`FrozenLakeWorkflow` on the event loop."""

    is_async = True
