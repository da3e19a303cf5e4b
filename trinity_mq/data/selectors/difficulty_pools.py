"""The selector that draws tasks by the pool which their latest mean reward puts them into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trinity_mq.config.buffer.selectors import DifficultyPoolsSelector
from trinity_mq.data.selectors.base import Draws, TaskStats


class DifficultyPools(Draws):
    """Tasks drawn with replacement, each as likely as its pool's weight says.

    Where every weight is 0, as when all tasks are in pools that are off, every task is as likely as any other: a run
    does not end for want of a suitable one.

    Args:
        count: Number of tasks, at least 1.
        config: The settings; pools by ascending threshold.
        seed: Of the draws.
    """

    def __init__(self, count: int, config: DifficultyPoolsSelector, seed: int) -> None:
        super().__init__(seed)
        self._thresholds = np.array([pool.threshold for pool in config.pools])
        self._weights = np.array([*(pool.weight for pool in config.pools), config.unseen_weight])
        self._pools = np.full(count, len(config.pools), dtype=np.int64)
        """Pool of each task; the last number: it has not been run."""

    def next(self, count: int) -> list[int]:
        """Return the next indexes."""
        weights = self._weights[self._pools]
        if not weights.any():
            weights = np.ones(len(weights))
        found: list[int] = self.generator().choice(len(weights), size=count, p=weights / weights.sum()).tolist()
        self.given += count
        return found

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Put each task into the pool with the highest threshold that its mean reward reaches."""
        for one in stats:
            place = int(np.searchsorted(self._thresholds, one.reward, side="right")) - 1
            self._pools[one.task] = max(0, place)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of tasks in each pool, by threshold, and of all that were run."""
        counts = np.bincount(self._pools, minlength=len(self._weights)).tolist()
        pools = {f"pool/{threshold:g}": float(n) for threshold, n in zip(self._thresholds, counts, strict=False)}
        return {**pools, "observed_tasks": float(sum(counts[:-1]))}
