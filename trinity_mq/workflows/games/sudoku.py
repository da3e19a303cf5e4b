"""Sudoku as a task: entries in each step on a board with exactly one solution, reward 1 for the solved board.

A game is a value; an entry makes a new one.
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
"""By the size of a box. 4 clues are the fewest of a 4 by 4; few grids of 9 by 9 go far below 26."""
MAX_GRIDS = 50
MAX_NODES = 200_000
"""Entries tried by the solver before it gives up: a second or so."""


class SudokuError(ValueError):
    """An entry against the rules, or a puzzle that cannot be; the message says why."""


@dataclass(frozen=True, slots=True)
class Sudoku:
    """A game: digits row by row, 0 for a blank."""

    box: int
    """2: 4 by 4. 3: 9 by 9."""
    givens: tuple[int, ...]
    solution: tuple[int, ...]
    board: tuple[int, ...]

    @property
    def size(self) -> int:
        """Rows, columns, and the greatest digit."""
        return self.box * self.box

    @property
    def solved(self) -> bool:
        """Every digit is right."""
        return self.board == self.solution

    @property
    def blanks(self) -> int:
        """Places that were blank at the beginning."""
        return self.givens.count(0)

    @property
    def right(self) -> int:
        """Blanks that hold the right digit now."""
        places = zip(self.givens, self.board, self.solution, strict=True)
        return sum(given == 0 and digit == wanted for given, digit, wanted in places)

    def put(self, row: int, column: int, digit: int) -> Sudoku:
        """Return the game with ``digit`` at a place; 0 takes an own entry back.

        Only what breaks a rule at once is refused: a digit that is merely wrong shows later.

        Args:
            row: From 1, from the top.
            column: From 1, from the left.
            digit: 0 to ``size``.

        Raises:
            SudokuError: Out of range, the place was given, or the digit stands in that row, column or box already.
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
            for name, unit in zip(("row", "column", "box"), _units(self.box)[place], strict=True):
                if any(self.board[other] == digit for other in unit if other != place):
                    raise SudokuError(f"{where}: {digit} stands in that {name} already")
        return replace(self, board=(*self.board[:place], digit, *self.board[place + 1 :]))

    def render(self) -> str:
        """Return the board, a line for each row: digits, ``.`` for a blank, boxes apart."""
        lines = []
        for row in range(self.size):
            digits = [str(digit) if digit else "." for digit in self.board[row * self.size : (row + 1) * self.size]]
            boxes = [" ".join(digits[start : start + self.box]) for start in range(0, self.size, self.box)]
            lines.append(" | ".join(boxes))
            if (row + 1) % self.box == 0 and row + 1 < self.size:
                lines.append("-" * len(lines[0]))
        return "\n".join(lines)


def make_sudoku(box: int, blanks: int, seed: int) -> Sudoku:
    """Return a puzzle with one solution, the same for the same arguments.

    Args:
        box: 2 for 4 by 4, 3 for 9 by 9.
        blanks: Places left blank.
        seed: Which one.

    Raises:
        SudokuError: A value out of range, or too many blanks for the grids that were drawn.
    """
    if box not in MAX_BLANKS or not 1 <= blanks <= MAX_BLANKS[box]:
        most = MAX_BLANKS.get(box)
        wanted = "box 2 or 3" if most is None else f"1 to {most} blanks for box {box}"
        raise SudokuError(f"box is {box}, blanks is {blanks}; wanted {wanted}")
    draw = random.Random(f"sudoku/{box}/{blanks}/{seed}")
    for _ in range(MAX_GRIDS):
        solution = _full_grid(box, draw)
        givens = _dig(solution, box, blanks, draw)
        if givens is not None:
            return Sudoku(box, givens, solution, givens)
    raise SudokuError(f"no puzzle with {blanks} blanks from {MAX_GRIDS} grids of box {box}; ask for fewer")


def solutions(board: Sequence[int], box: int, most: int = 2) -> list[tuple[int, ...]]:
    """Return up to ``most`` solutions of a board.

    Raises:
        SudokuError: The solver tried MAX_NODES entries without an end.
    """
    size = box * box
    peers = [frozenset().union(*units) - {place} for place, units in enumerate(_units(box))]
    digits = list(board)
    found: list[tuple[int, ...]] = []
    nodes = 0

    def fill() -> bool:
        """Fill the place with the fewest choices; say whether enough is known."""
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
            found.append(tuple(digits))
            return len(found) >= most
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
    return found


def _full_grid(box: int, draw: random.Random) -> tuple[int, ...]:
    """Return a solved grid: the cyclic one with digits, and rows and columns within and across bands, shuffled."""
    size = box * box

    def lines() -> list[int]:
        return [band * box + line for band in draw.sample(range(box), box) for line in draw.sample(range(box), box)]

    rows, columns, names = lines(), lines(), draw.sample(range(1, size + 1), size)
    return tuple(names[(box * (row % box) + row // box + column) % size] for row in rows for column in columns)


def _dig(solution: tuple[int, ...], box: int, blanks: int, draw: random.Random) -> tuple[int, ...] | None:
    """Return ``solution`` with so many blanks and still one solution, None if this grid does not allow it."""
    board = list(solution)
    left = blanks
    for place in draw.sample(range(len(board)), len(board)):
        if not left:
            break
        board[place] = 0
        if len(solutions(board, box)) == 1:
            left -= 1
        else:
            board[place] = solution[place]
    return None if left else tuple(board)


@cache
def _units(box: int) -> tuple[tuple[frozenset[int], frozenset[int], frozenset[int]], ...]:
    """Return for each place its row, its column and its box, as places."""
    size = box * box
    every = range(size * size)

    def unit(place: int) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        row, column = divmod(place, size)
        return (
            frozenset(other for other in every if other // size == row),
            frozenset(other for other in every if other % size == column),
            frozenset(
                other for other in every if other // size // box == row // box and other % size // box == column // box
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
    """2: 4 by 4. 3: 9 by 9."""
    blanks: int = Field(default=4, ge=1)


class SudokuGame(Game):
    """A Sudoku in play."""

    instructions = INSTRUCTIONS

    def __init__(self, state: Sudoku) -> None:
        self.state = state
        self.entries = self.refused = self.unclear = 0
        """Made, against the rules, and answers without any."""

    def show(self) -> str:
        return self.state.render()

    def play(self, answer: str) -> str:
        """Make the entries of ``answer``, up to the first one that is refused."""
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
        """The share of the blanks that hold the right digit."""
        return self.state.right / self.state.blanks

    def metrics(self) -> dict[str, float]:
        return {
            "entries": self.entries,
            "refused_entries": self.refused,
            "unclear_answers": self.unclear,
            "right_share": self.progress,
        }


def read_entries(answer: str) -> list[Entry]:
    """Return the marked entries of an answer, the first MAX_ENTRIES; or the one that is all of it: ``2 3 4``."""
    marked = _MARKED.findall(answer)[:MAX_ENTRIES]
    if not marked and (bare := _BARE.fullmatch(answer[:100])) and len(answer) <= 100:
        marked = [bare.groups()]
    return [(int(row), int(column), int(digit)) for row, column, digit in marked]


class SudokuWorkflow(GameWorkflow):
    """The Sudoku that the task's seed draws, with one solution."""

    arguments_kind = SudokuArguments
    arguments: SudokuArguments

    def make_game(self) -> Game:
        given = self.arguments
        try:
            return SudokuGame(make_sudoku(given.box, given.blanks, game_seed(self.task, given)))
        except SudokuError as error:
            raise TaskError(f"no Sudoku for this task: {error}") from error


class AsyncSudokuWorkflow(SudokuWorkflow):
    """:class:`SudokuWorkflow` on the event loop."""

    is_async = True
