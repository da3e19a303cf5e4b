"""Games as workflows: small, pure environments that are identical for equal seeds."""

from trinity_mq.workflows.games.frozen_lake import FrozenLake, LakeError, LakeMap, make_lake
from trinity_mq.workflows.games.game import AsyncGameWorkflow, Game, GameWorkflow
from trinity_mq.workflows.games.sudoku import Sudoku, SudokuError, make_sudoku

__all__ = [
    "AsyncGameWorkflow",
    "FrozenLake",
    "Game",
    "GameWorkflow",
    "LakeError",
    "LakeMap",
    "Sudoku",
    "SudokuError",
    "make_lake",
    "make_sudoku",
]
