"""Selectors that return every task once per epoch: sequential, shuffle, offline_easy2hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trinity_mq.data.epochs import EpochOrder
from trinity_mq.data.selectors.base import TaskStats, returned_count


class EpochSelector:
    """Chooses every task once per epoch.

    Args:
        count: Number of tasks, at least 1.
        order: ``sequential``, or ``shuffle``: a new order in each epoch, with seed + epoch.
        seed: Seed of the orders.
    """

    def __init__(self, count: int, order: Literal["sequential", "shuffle"], seed: int) -> None:
        self._count, self._order = count, EpochOrder(count, order, seed)

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks. At the end of an epoch the next epoch begins."""
        return self._order.take(count)

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Do nothing: the order is fixed."""

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"given": self._order.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position. Raises ValueError if it is invalid."""
        self._order.move_to(*divmod(returned_count(state), self._count))

    def metrics(self) -> Mapping[str, float]:
        """Return an empty mapping."""
        return {}


class EasyToHard(EpochSelector):
    """Chooses every task once per epoch, by descending features. Tasks with equal features keep their stored order.

    Args:
        features: ``[tasks, keys]``; later columns break ties.
    """

    def __init__(self, features: NDArray[np.float64]) -> None:
        super().__init__(len(features), "sequential", 0)
        self._sorted = np.lexsort([-column for column in features.T[::-1]]).tolist()

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks, the largest features first."""
        return [self._sorted[place] for place in super().next(count)]
