"""Sudoku as a task: each step makes entries on a board with exactly one solution. The solved board has reward 1.

A game is immutable; an entry returns a new game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from pydantic import Field

from trinity_mq.workflows.games.game import Game, GameArguments, GameWorkflow, game_seed
from trinity_mq.workflows.workflow import TaskError

MAX_BLANKS = {2: 12, 3: 55}
"""Maximum blanks by box size. A 4 by 4 puzzle needs at least 4 clues; few 9 by 9 grids allow far fewer than 26."""
MAX_GRIDS = 50
MAX_NODES = 200_000
"""Maximum entries tried by the solver before it gives up: about one second."""


class SudokuError(ValueError):
    """An entry against the rules, or an invalid puzzle. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Sudoku:
    """A game: digits row by row, 0 for a blank."""

    box: int
    """Size of a box. 2: a 4 by 4 board. 3: a 9 by 9 board."""
    givens: tuple[int, ...]
    solution: tuple[int, ...]
    board: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of rows and of columns, and the greatest digit."""
        return self.box * self.box

    @property
    def solved(self) -> bool:
        """Whether every digit is right."""
        return self.board == self.solution

    @property
    def blanks(self) -> int:
        """Number of places that were blank at the beginning."""
        return self.givens.count(0)

    @property
    def right(self) -> int:
        """Number of places that were blank at the beginning and now hold the right digit."""
        places = zip(self.givens, self.board, self.solution, strict=True)
        return sum(initial == 0 and digit == solved for initial, digit, solved in places)

    def put(self, row: int, column: int, digit: int) -> Sudoku:
        """Return the game with ``digit`` at a place; 0 erases the player's entry.

        Only an immediate rule violation is refused. A digit that is wrong but breaks no rule yet is accepted.

        Args:
            row: Row from 1, counted from the top.
            column: Column from 1, counted from the left.
            digit: 0 to ``size``.

        Raises:
            SudokuError: A value is out of range, the place was given, or the digit is already in that row, column or
                box.
        """
        size = self.size
        if not (1 <= row <= size and 1 <= column <= size and 0 <= digit <= size):
            raise SudokuError(
                f"row {row}, column {column}, digit {digit}: rows and columns go from 1 to {size}, digits from 0 "
                f"(erase) to {size}"
            )
        place = (row - 1) * size + column - 1
        where = f"row {row}, column {column}"
        if self.givens[place]:
            raise SudokuError(f"{where} was given as {self.givens[place]} and stays")
        if digit:
            for name, unit in zip(("row", "column", "box"), units(self.box)[place], strict=True):
                if any(self.board[peer] == digit for peer in unit if peer != place):
                    raise SudokuError(f"{where}: {digit} stands in that {name} already")
        return replace(self, board=(*self.board[:place], digit, *self.board[place + 1 :]))

    def render(self) -> str:
        """Return the board, one line per row: digits, ``.`` for a blank, separators between boxes."""
        lines = []
        for row in range(self.size):
            digits = [str(digit) if digit else "." for digit in self.board[row * self.size : (row + 1) * self.size]]
            boxes = [" ".join(digits[start : start + self.box]) for start in range(0, self.size, self.box)]
            lines.append(" | ".join(boxes))
            if (row + 1) % self.box == 0 and row + 1 < self.size:
                lines.append("-" * len(lines[0]))
        return "\n".join(lines)


def make_sudoku(box: int, blanks: int, seed: int) -> Sudoku:
    """Return a puzzle with one solution. Equal arguments give the same puzzle.

    Args:
        box: 2 for 4 by 4, 3 for 9 by 9.
        blanks: Number of blank places.
        seed: Seed of the puzzle.

    Raises:
        SudokuError: A value is out of range, or the generated grids do not allow that many blanks.
    """
    if box not in MAX_BLANKS or not 1 <= blanks <= MAX_BLANKS[box]:
        most = MAX_BLANKS.get(box)
        valid_values = "box 2 or 3" if most is None else f"1 to {most} blanks for box {box}"
        raise SudokuError(f"box is {box}, blanks is {blanks}; wanted {valid_values}")
    draw = random.Random(f"sudoku/{box}/{blanks}/{seed}")
    for _ in range(MAX_GRIDS):
        solution = full_grid(box, draw)
        givens = _dig(solution, box, blanks, draw)
        if givens is not None:
            return Sudoku(box, givens, solution, givens)
    raise SudokuError(f"no puzzle with {blanks} blanks from {MAX_GRIDS} grids of box {box}; ask for fewer")


def solutions(board: Sequence[int], box: int, most: int = 2) -> list[tuple[int, ...]]:
    """Return up to ``most`` solutions of a board.

    Raises:
        SudokuError: The search did not end within MAX_NODES entries.
    """
    size = box * box
    peers = [frozenset().union(*units) - {place} for place, units in enumerate(units(box))]
    digits = list(board)
    solved_boards: list[tuple[int, ...]] = []
    nodes = 0

    def fill() -> bool:
        """Fill the place with the fewest choices; return whether ``most`` solutions were found."""
        nonlocal nodes
        best: tuple[int, set[int]] | None = None
        for place, digit in enumerate(digits):
            if digit == 0:
                choices = set(range(1, size + 1)) - {digits[peer] for peer in peers[place]}
                if best is None or len(choices) < len(best[1]):
                    best = place, choices
                if len(choices) <= 1:
                    break
        if best is None:
            solved_boards.append(tuple(digits))
            return len(solved_boards) >= most
        for digit in sorted(best[1]):
            nodes += 1
            if nodes > MAX_NODES:
                raise SudokuError(f"no end after {MAX_NODES} entries; the board is too open, give more digits")
            digits[best[0]] = digit
            enough = fill()
            digits[best[0]] = 0
            if enough:
                return True
        return False

    fill()
    return solved_boards


def full_grid(box: int, draw: random.Random) -> tuple[int, ...]:
    """Return a solved grid: the cyclic grid with shuffled digits, and with rows and columns shuffled within and across
    bands.
    """
    size = box * box

    def lines() -> list[int]:
        return [band * box + line for band in draw.sample(range(box), box) for line in draw.sample(range(box), box)]

    rows, columns, names = lines(), lines(), draw.sample(range(1, size + 1), size)
    return tuple(names[(box * (row % box) + row // box + column) % size] for row in rows for column in columns)


def _dig(solution: tuple[int, ...], box: int, blanks: int, draw: random.Random) -> tuple[int, ...] | None:
    """Return ``solution`` with ``blanks`` blanks and still one solution. Return None if this grid does not allow it."""
    board = list(solution)
    remaining = blanks
    for place in draw.sample(range(len(board)), len(board)):
        if not remaining:
            break
        board[place] = 0
        if len(solutions(board, box)) == 1:
            remaining -= 1
        else:
            board[place] = solution[place]
    return None if remaining else tuple(board)


@cache
def units(box: int) -> tuple[tuple[frozenset[int], frozenset[int], frozenset[int]], ...]:
    """Return for each place its row, its column and its box, as sets of places."""
    size = box * box
    every = range(size * size)

    def unit(place: int) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        row, column = divmod(place, size)
        return (
            frozenset(peer for peer in every if peer // size == row),
            frozenset(peer for peer in every if peer % size == column),
            frozenset(
                peer for peer in every if peer // size // box == row // box and peer % size // box == column // box
            ),
        )

    return tuple(unit(place) for place in every)


INSTRUCTIONS = """\
You solve a Sudoku: every row, every column and every box holds each digit once. A dot is a blank.
In each turn think as long as you need, then make one or more entries: <put>row column digit</put>, rows and columns
counted from 1 from the top left. <put>2 3 4</put> writes 4 into row 2, column 3; digit 0 erases an entry of yours.
Entries after one that breaks a rule are not made."""

_MARKED = re.compile(r"<put>\s{0,10}(\d)[\s,;]{1,5}(\d)[\s,;]{1,5}(\d)\s{0,10}</put>", re.ASCII)
_BARE = re.compile(r"\s{0,10}(\d)[\s,;]{0,5}(\d)[\s,;]{0,5}(\d)\s{0,10}", re.ASCII)
MAX_ENTRIES = 81

Entry = tuple[int, int, int]
"""Row, column, digit."""


class SudokuArguments(GameArguments):
    """Arguments of a Sudoku."""

    box: Literal[2, 3] = 2
    """Size of a box. 2: a 4 by 4 board. 3: a 9 by 9 board."""
    blanks: int = Field(default=4, ge=1)


class SudokuGame(Game):
    """A Sudoku that a model plays."""

    instructions = INSTRUCTIONS

    def __init__(self, state: Sudoku) -> None:
        self.state = state
        self.entries = self.refused = self.unclear = 0
        """Numbers of entries made, of entries refused by the rules, and of answers without an entry."""

    def show(self) -> str:
        return self.state.render()

    def play(self, answer: str) -> str:
        """Make the entries of ``answer``, up to the first refused entry."""
        entries = read_entries(answer)
        if not entries:
            self.unclear += 1
            return "Your answer holds no entry. Make one, such as <put>2 3 4</put>."
        for entry in entries:
            try:
                self.state = self.state.put(*entry)
            except SudokuError as error:
                self.refused += 1
                return f"Refused: {error}."
            self.entries += 1
        return ""

    @property
    def won(self) -> bool:
        return self.state.solved

    @property
    def progress(self) -> float:
        """Share of the places blank at the beginning that now hold the right digit."""
        return self.state.right / self.state.blanks

    def metrics(self) -> dict[str, float]:
        return {
            "entries": self.entries,
            "refused_entries": self.refused,
            "unclear_answers": self.unclear,
            "right_share": self.progress,
        }


def read_entries(answer: str) -> list[Entry]:
    """Return the first MAX_ENTRIES marked entries of an answer, or the entry that is the whole answer: ``2 3 4``."""
    marked = _MARKED.findall(answer)[:MAX_ENTRIES]
    if not marked and (bare := _BARE.fullmatch(answer[:100])) and len(answer) <= 100:
        marked = [bare.groups()]
    return [(int(row), int(column), int(digit)) for row, column, digit in marked]


class SudokuWorkflow(GameWorkflow):
    """A Sudoku with one solution, generated from the task's seed."""

    arguments_kind = SudokuArguments
    arguments: SudokuArguments

    def make_game(self) -> Game:
        arguments = self.arguments
        try:
            return SudokuGame(make_sudoku(arguments.box, arguments.blanks, game_seed(self.task, arguments)))
        except SudokuError as error:
            raise TaskError(f"no Sudoku for this task: {error}") from error


class AsyncSudokuWorkflow(SudokuWorkflow):
    """:class:`SudokuWorkflow` on the event loop."""

    is_async = True
