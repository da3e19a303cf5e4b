"""Environments of Gymnasium for tests: what they observe, how they fail, what was done with them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

CREATED: list[Counting] = []
"""Environments in the order in which they were made; a test empties it."""


class Counting(gymnasium.Env[str, str]):
    """Shows a number that follows from the seed; the action to take is its last digit, as text. Three steps long.

    Args:
        fails: The method that raises.
        reports: Whether the info says if it went well.
    """

    observation_space: ClassVar[Any] = spaces.Text(20, charset="0123456789")
    action_space: ClassVar[Any] = spaces.Text(2, charset="0123456789")

    def __init__(self, fails: str = "", reports: bool = True) -> None:
        if fails == "make":
            raise RuntimeError("no memory")
        self.fails, self.reports = fails, reports
        self.closed = self.steps = 0
        self.actions: list[str] = []
        self.threads = {threading.current_thread().name}
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        CREATED.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.threads.add(threading.current_thread().name)
        if self.fails == "reset":
            raise ValueError("it cannot be reset")
        self.number = str(self.np_random.integers(10, 10_000))
        return self.number, {"success": False} if self.reports else {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.current_thread().name)
        self.actions.append(action)
        if self.fails == "step":
            raise KeyError("broken door")
        if self.fails == "reward":
            return self.number, None, False, False, {}  # type: ignore[return-value]
        if self.fails == "observation":
            return b"bytes", 0.0, False, False, {}  # type: ignore[return-value]
        if self.fails == "hang":
            self.entered.set()
            assert self.may_go_on.wait(20.0)
        self.steps += 1
        right = action == self.number[-1]
        self.number = str(self.np_random.integers(10, 10_000))
        info = {"success": right} if self.reports else {}
        return self.number, 0.5 if right else -0.25, self.steps == 3, False, info

    def close(self) -> None:
        self.closed += 1
        if self.fails == "close":
            raise OSError("it cannot be closed")


class Boxes(Counting):
    """Has actions that are no text."""

    action_space: ClassVar[Any] = spaces.Box(0.0, 1.0, (2,))


class SeesBoxes(Counting):
    """Has observations that are no text."""

    observation_space: ClassVar[Any] = spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Box(0, 1, (2,), np.float32)})


class Mixed(Counting):
    """Has observations of several parts."""

    observation_space: ClassVar[Any] = spaces.Dict(
        {
            "place": spaces.MultiDiscrete([3, 3]),
            "card": spaces.Tuple((spaces.Discrete(9), spaces.MultiBinary(2))),
            "said": spaces.Text(9),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        place = np.array([1, 2])
        return {"place": place, "card": (np.int64(7), np.array([0, 1], np.int8)), "said": "hello"}, {}


def no_environment() -> object:
    return object()


gymnasium.register(id="Counting-v0", entry_point=Counting)
