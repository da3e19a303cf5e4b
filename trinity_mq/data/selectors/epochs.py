"""Selectors that give every task once an epoch: sequential, shuffle, offline_easy2hard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trinity_mq.data.epochs import EpochOrder
from trinity_mq.data.selectors.base import TaskStats, given_of


class EpochSelector:
    """Every task once an epoch.

    Args:
        count: Number of tasks, at least 1.
        order: ``sequential``, or ``shuffle``: anew in each epoch, by seed + epoch.
        seed: Of the orders.
    """

    def __init__(self, count: int, order: Literal["sequential", "shuffle"], seed: int) -> None:
        self._count, self._order = count, EpochOrder(count, order, seed)

    def next(self, count: int) -> list[int]:
        """Return the next indexes; where an epoch ends the next one begins."""
        return self._order.take(count)

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Do nothing: the order is fixed."""

    def state(self) -> Mapping[str, Any]:
        """Return the position."""
        return {"given": self._order.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position. Raises ValueError."""
        self._order.move_to(*divmod(given_of(state), self._count))

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}


class EasyToHard(EpochSelector):
    """Every task once an epoch, by descending features; equals as they are stored.

    Args:
        features: ``[tasks, keys]``; the later columns decide between equals.
    """

    def __init__(self, features: NDArray[np.float64]) -> None:
        super().__init__(len(features), "sequential", 0)
        self._sorted = np.lexsort([-column for column in features.T[::-1]]).tolist()

    def next(self, count: int) -> list[int]:
        """Return the next indexes, the largest features first."""
        return [self._sorted[place] for place in super().next(count)]
