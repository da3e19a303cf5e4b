"""Operators that drop experiences by their rewards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from trinity_mq.algorithms.estimators.runs import is_finite, run_values, spread
from trinity_mq.experience import ExperienceBatch
from trinity_mq.operators.base import ColumnOperator, of_tasks


class RewardFilter(ColumnOperator):
    """Keeps experiences whose reward is at least ``threshold``; one without a reward is dropped too."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the experiences that are kept, and ``filtered_count``."""
        rewards = batch.values("reward")
        kept = [number for number, reward in enumerate(rewards) if is_finite(reward) and reward >= self.threshold]
        return batch.select(kept), {"filtered_count": len(batch) - len(kept)}


class InvalidRewardFilter(ColumnOperator):
    """Drops experiences whose reward is missing or no finite number."""

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the experiences that are kept, and ``filtered_count``."""
        kept = [number for number, reward in enumerate(batch.values("reward")) if is_finite(reward)]
        return batch.select(kept), {"filtered_count": len(batch) - len(kept)}


class RewardStdFilter(ColumnOperator):
    """Drops tasks whose runs are (nearly) equally good: they teach a group-relative algorithm nothing.

    A task stays if its runs number at least two and the population standard deviation of their rewards is above
    ``threshold``. The reward of a run is that of its last step; runs without a reward do not count.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the experiences that are kept, ``operator_filtered_count`` and the spread of the groups before."""
        runs, _ = run_values(batch, batch.values("reward"))
        groups = {tid: list(group.values()) for tid, group in runs.items()}
        kept = of_tasks(batch, {tid for tid, rewards in groups.items() if self._differ(rewards)})
        means = [statistics.fmean(rewards) for rewards in groups.values() if rewards]
        stds = [statistics.pstdev(rewards) for rewards in groups.values() if rewards]
        return batch.select(kept), {
            "operator_filtered_count": len(batch) - len(kept),
            **spread("origin_group_advantages/reward_mean", means),
            **spread("origin_group_advantages/reward_std", stds),
        }

    def _differ(self, rewards: Sequence[float]) -> bool:
        # Equal rewards can have a tiny standard deviation by rounding alone.
        if len(rewards) < 2 or max(rewards) == min(rewards):
            return False
        return statistics.pstdev(rewards) > self.threshold
