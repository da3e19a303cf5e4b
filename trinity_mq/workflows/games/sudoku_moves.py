"""Sudoku under the name of Trinity-RFT, with its prompt and rewards: each step makes up to five entries on a board.

The prompt defines the task. It is taken from Trinity-RFT 0.6.0 (Apache-2.0,
https://github.com/agentscope-ai/Trinity-RFT). :mod:`trinity_mq.workflows.games.sudoku` is the project's own game.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import PROMPT_TRUNCATED
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.workflows.games.sudoku import full_grid, units
from trinity_mq.workflows.sync_async import DualWorkflow, call
from trinity_mq.workflows.workflow import Task, TaskError

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

Board = list[list[int]]

MAX_STEPS = 20
MAX_MOVES = 5
"""Maximum entries of one step."""
BLANKS = 40
"""Number of blanks of a random board, for a record without a board: about half of the fields."""

# Prompt of Trinity-RFT 0.6.0, Apache-2.0.
PROMPT = (
    "You are playing a Sudoku game.\n\n"
    "Rules:\n"
    "- The board is 9x9.\n"
    "- 0 means empty.\n"
    "- Numbers 1\u20139 must appear exactly once in every row, column, and 3x3 block.\n"
    "- You may only fill empty cells.\n\n"
    "Task:\n"
    "- In each step, output ONE OR MORE valid moves.\n"
    f"- You may output up to {MAX_MOVES} moves per step.\n\n"
    "Output format (STRICT):\n"
    "row col value\n"
    "row col value\n\n"
    "Example:\n"
    "0 2 4\n"
    "1 3 5\n\n"
    "Current step: {step}\n"
    "Remaining steps: {remaining}\n\n"
    "Current board:\n{board}\n"
)


class SudokuMovesWorkflow(DualWorkflow):
    """Makes one request for each step. Each answer is an experience: reward 1 for the solved board, -1 for an invalid
    answer, which ends the run, and 0 for other steps.

    A record may have ``puzzle`` and ``solution``, each a list of rows with 0 for a blank. Else the board is random.
    """

    can_reset = True

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: ``puzzle`` or ``solution`` of the record is not a board of 9 rows of 9 digits.
        """
        self.task = task
        if {"puzzle", "solution"} <= task.raw_task.keys():
            self._board, self._solution = (_read_board(task.raw_task, key) for key in ("puzzle", "solution"))
        else:
            draw = random.Random(f"{task.batch_id} {task.task_id}")  # the runs of a task get the same board
            grid = full_grid(3, draw)
            self._solution = [list(grid[start : start + 9]) for start in range(0, 81, 9)]
            self._board = [list(row) for row in self._solution]
            for field in draw.sample(range(81), BLANKS):
                self._board[field // 9][field % 9] = 0

    async def _dual_body(self) -> list[Experience]:
        """Play until the board is solved, an answer is invalid, or the steps are used up."""
        experiences: list[Experience] = []
        for step in range(MAX_STEPS):
            messages = [{"role": "user", "content": self._prompt(step)}]
            [answer] = check_asked(await call(self.is_async, self.model, "chat", messages, n=1), self.model)
            is_cut = answer.truncate_status == PROMPT_TRUNCATED  # the model never saw the board, so it made none
            answer.reward = 0.0 if is_cut else self._reward(parse_moves(answer.response_text or ""))
            answer.eid.step = step
            experiences.append(answer)
            if answer.reward or is_cut:
                break
        return experiences

    def _prompt(self, step: int) -> str:
        board = "\n".join(" ".join(map(str, row)) for row in self._board)
        return PROMPT.format(step=step, remaining=MAX_STEPS - step, board=board)

    def _reward(self, moves: list[tuple[int, int, int]] | None) -> float:
        """Make the moves and return the reward of the step."""
        for row, column, value in moves or ():
            if self._board[row][column]:
                return -1.0
            self._board[row][column] = value
        if not moves or not is_valid(self._board):
            return -1.0
        return 1.0 if self._board == self._solution else 0.0


class AsyncSudokuMovesWorkflow(SudokuMovesWorkflow):
    """:class:`SudokuMovesWorkflow` on the event loop."""

    is_async = True


def parse_moves(text: str) -> list[tuple[int, int, int]] | None:
    """Return the entries of an answer, which has a line with row, column and value for each entry. None: a line is not
    such an entry on the board, or the number of lines is not 1 to 5.
    """
    lines = [line.split() for line in text[:10_000].splitlines() if line.strip()]
    if not 0 < len(lines) <= MAX_MOVES or any(len(line) != 3 for line in lines):
        return None
    try:
        moves = [(int(row), int(column), int(value)) for row, column, value in lines]
    except ValueError:
        return None
    is_on_board = all(0 <= row <= 8 and 0 <= column <= 8 and 1 <= value <= 9 for row, column, value in moves)
    return moves if is_on_board else None


def is_valid(board: Board) -> bool:
    """Return whether no row, column or block of a board holds a value twice; blanks may repeat."""
    values = list(chain.from_iterable(board))
    for unit in chain.from_iterable(units(3)):
        entries = [values[place] for place in unit if values[place]]
        if len(entries) != len(set(entries)):
            return False
    return True


def _read_board(record: dict[str, Any], key: str) -> Board:
    board = record[key]
    is_board = (
        isinstance(board, list)
        and len(board) == 9
        and all(
            isinstance(row, list) and len(row) == 9 and all(type(value) is int and 0 <= value <= 9 for value in row)
            for row in board
        )
    )
    if not is_board:
        raise TaskError(f"raw_task[{key!r}] is {board!r:.80}, wanted 9 rows of 9 digits, 0 for a blank")
    return [list(row) for row in board]
