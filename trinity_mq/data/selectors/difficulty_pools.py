"""The selector that draws tasks by pool. The latest mean reward of a task determines its pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trinity_mq.config.buffer.selectors import DifficultyPoolsSelector
from trinity_mq.data.selectors.base import DrawPosition, TaskStats


class DifficultyPools(DrawPosition):
    """Draws tasks with replacement, with probabilities proportional to the weights of their pools.

    If all tasks have weight 0, because they are all in disabled pools, they are equally likely, so that a run does not
    end for lack of a suitable task.

    Args:
        count: Number of tasks, at least 1.
        config: The settings; pools by ascending threshold.
        seed: Seed of the draws.
    """

    def __init__(self, count: int, config: DifficultyPoolsSelector, seed: int) -> None:
        super().__init__(seed)
        self._thresholds = np.array([pool.threshold for pool in config.pools])
        self._weights = np.array([*(pool.weight for pool in config.pools), config.unseen_weight])
        self._pools = np.full(count, len(config.pools), dtype=np.int64)
        """Pool of each task. The number after the last pool marks a task that has not been run."""

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks."""
        weights = self._weights[self._pools]
        if not weights.any():
            weights = np.ones(len(weights))
        indexes: list[int] = self.generator().choice(len(weights), size=count, p=weights / weights.sum()).tolist()
        self.given += count
        return indexes

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Put each task into the pool with the highest threshold that its mean reward reaches, else into the lowest."""
        for task_stats in stats:
            place = int(np.searchsorted(self._thresholds, task_stats.reward, side="right")) - 1
            self._pools[task_stats.task] = max(0, place)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of tasks in each pool, by threshold, and the number of all observed tasks."""
        counts = np.bincount(self._pools, minlength=len(self._weights)).tolist()
        pools = {f"pool/{threshold:g}": float(n) for threshold, n in zip(self._thresholds, counts, strict=False)}
        return {**pools, "observed_tasks": float(sum(counts[:-1]))}
