"""A Gymnasium environment with observations and actions as text: take the digits of a row, the largest first."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text


class LargestFirst(gymnasium.Env[str, str]):
    """A row of different digits such as ``3,7,2=``. The action is one of them; it leaves the row if it is the largest.

    A wrong digit ends the episode. Each right digit has the reward 1 divided by ``digits``.

    Args:
        digits: Digits in the row at the beginning, from 2 to 9.
    """

    def __init__(self, digits: int = 3) -> None:
        self.digits = digits
        self.observation_space = Text(2 * digits, min_length=0, charset=string.digits + ",=")
        self.action_space = Text(1, charset=string.digits)
        self.row: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return a row that follows from the seed."""
        super().reset(seed=seed)
        self.row = self.np_random.permutation(10)[: self.digits].tolist()
        return self._shown(), {"success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take ``action`` from the row if it is the largest digit; otherwise end the episode."""
        is_right = int(action) == max(self.row)
        if is_right:
            self.row.remove(max(self.row))
        is_done = is_right and not self.row
        return self._shown(), is_right / self.digits, is_done or not is_right, False, {"success": is_done}

    def _shown(self) -> str:
        return ",".join(map(str, self.row)) + "=" if self.row else ""


gymnasium.register(id="LargestFirst-v0", entry_point="gym_digits:LargestFirst")
