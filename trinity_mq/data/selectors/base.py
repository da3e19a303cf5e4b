"""The interface of selectors, and the statistics that they receive."""

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
    """Number of its finished runs."""


@runtime_checkable
class Selector(Protocol):
    """Chooses the tasks of a taskset. A user-defined selector is constructed from the records, a seed and arguments of
    the configuration.

    Its choices must be a function of its arguments, its position and its observations. When an explorer resumes after a
    kill, it constructs a new selector, calls :meth:`observe` with all earlier observations in the same order, and then
    :meth:`restore`.
    """

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks, and advance the position."""

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Learn from the results of a batch's tasks, whether or not operators keep the groups of these tasks."""

    def state(self) -> Mapping[str, Any]:
        """Return the position as a small mapping of plain types. Observations are stored separately."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            ValueError: The position is invalid.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the selector's progress by name."""


class DrawPosition:
    """The position of a selector that draws at random: the number of tasks it returned, which also seeds each draw.

    Args:
        seed: Seed of all draws.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self.given = seed, 0

    def generator(self) -> np.random.Generator:
        """Return the random generator of the draw at this position. Repeated calls return the same random numbers."""
        return np.random.default_rng([self._seed, self.given])

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raises ValueError if it is invalid."""
        self.given = returned_count(state)


def returned_count(state: Mapping[str, Any]) -> int:
    """Return the number of returned tasks in a saved position.

    Raises:
        ValueError: The position holds no such number.
    """
    count = state.get("given")
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"the selector's saved position is {dict(state)!r}, wanted {{'given': a number from 0}}")
    return count
