"""The interface of selectors, and the statistics that they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


class TaskStats(NamedTuple):
    """The statistics of a task in one batch."""

    task: int
    """Index of the task in its taskset."""
    reward: float
    """Mean reward of its finished runs."""
    runs: int
    """Number of these runs."""


@runtime_checkable
class Selector(Protocol):
    """Chooses the tasks of a taskset; made of its records, a seed and what the configuration gives.

    What it chooses follows from its arguments, its position and what it observed. An explorer that goes on where
    another was killed makes a new one, calls :meth:`observe` with all that was observed, in the same order, and then
    :meth:`restore`.
    """

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks, and move the position."""

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Learn what came of the tasks of a batch, whether or not operators keep their groups."""

    def state(self) -> Mapping[str, Any]:
        """Return the position, small and of plain types; what was observed is kept for it."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position.

        Raises:
            ValueError: It is none.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return what shows how far it is, by name."""


class Draws:
    """The position of a selector that draws: how many tasks it gave, which also seeds each draw.

    Args:
        seed: Of all draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self.given = seed, 0

    def generator(self) -> np.random.Generator:
        """Return the random numbers of the draw at this position: the same each time that it is asked for."""
        return np.random.default_rng([self._seed, self.given])

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position. Raises ValueError."""
        self.given = given_of(state)


def given_of(state: Mapping[str, Any]) -> int:
    """Return how many tasks a saved position has given.

    Raises:
        ValueError: It says none.
    """
    given = state.get("given")
    if not isinstance(given, int) or given < 0:
        raise ValueError(f"the selector's saved position is {dict(state)!r}, wanted {{'given': a number from 0}}")
    return given
