"""Sudoku as a task: entries in each step, reward 1 for the solved board."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from trinity_mq.workflows.games.game import AsyncGameWorkflow, Game, GameArguments, GameWorkflow, game_seed
from trinity_mq.workflows.games.sudoku_env import Sudoku, SudokuError, make_sudoku
from trinity_mq.workflows.task import Task, TaskError

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
    """What a Sudoku takes."""

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
        """Return the board."""
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
    def over(self) -> bool:
        """Solved."""
        return self.state.solved

    @property
    def won(self) -> bool:
        """Solved."""
        return self.state.solved

    @property
    def progress(self) -> float:
        """The share of the blanks that hold the right digit."""
        return self.state.right / self.state.blanks

    def metrics(self) -> dict[str, float]:
        """Return entries made, refused, answers without one, and the share of blanks that are right."""
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


def make_game(task: Task, arguments: SudokuArguments) -> SudokuGame:
    """Return the Sudoku of ``task`` at its beginning.

    Raises:
        TaskError: There is no such Sudoku.
    """
    try:
        return SudokuGame(make_sudoku(arguments.box, arguments.blanks, game_seed(task, arguments)))
    except SudokuError as error:
        raise TaskError(f"no Sudoku for this task: {error}") from error


class SudokuWorkflow(GameWorkflow):
    """The Sudoku that the task's seed draws, with one solution."""

    arguments_kind = SudokuArguments
    arguments: SudokuArguments

    def make_game(self) -> Game:
        """Return the task's Sudoku."""
        return make_game(self.task, self.arguments)


class AsyncSudokuWorkflow(AsyncGameWorkflow):
    """:class:`SudokuWorkflow` on the event loop."""

    arguments_kind = SudokuArguments
    arguments: SudokuArguments

    def make_game(self) -> Game:
        """Return the task's Sudoku."""
        return make_game(self.task, self.arguments)
