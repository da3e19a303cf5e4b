"""Operators that drop experiences by their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from trinity_mq.algorithms.estimators.runs import is_finite, run_values, spread
from trinity_mq.experience import ExperienceBatch
from trinity_mq.operators.base import ColumnOperator, rows_of_tasks


class RewardFilter(ColumnOperator):
    """Keeps experiences whose reward is at least ``threshold``. Drops experiences without a finite reward."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the remaining experiences, and the number of dropped experiences as ``filtered_count``."""
        rewards = batch.values("reward")
        rows = [number for number, reward in enumerate(rewards) if is_finite(reward) and reward >= self.threshold]
        return batch.select(rows), {"filtered_count": len(batch) - len(rows)}


class InvalidRewardFilter(RewardFilter):
    """Drops experiences whose reward is missing or not a finite number."""

    def __init__(self) -> None:
        super().__init__(-math.inf)


class RewardStdFilter(ColumnOperator):
    """Drops tasks whose runs have (nearly) equal rewards: they give a group-relative algorithm no signal.

    A task remains if it has at least two runs and the population standard deviation of their rewards is above
    ``threshold``. The reward of a run is the reward of its last step. Runs without a finite reward do not count.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the remaining experiences, the number of dropped experiences as ``operator_filtered_count``, and the
        spread of the reward means and deviations over all tasks with at least two such runs, before the filter.
        """
        runs, _ = run_values(batch, batch.values("reward"))
        groups = {tid: list(group.values()) for tid, group in runs.items()}
        rows = rows_of_tasks(batch, {tid for tid, rewards in groups.items() if self._differ(rewards)})
        compared = [rewards for rewards in groups.values() if len(rewards) > 1]
        means, stds = ([measure(rewards) for rewards in compared] for measure in (statistics.fmean, statistics.pstdev))
        return batch.select(rows), {
            "operator_filtered_count": len(batch) - len(rows),
            **spread("origin_group_advantages/reward_mean", means),
            **spread("origin_group_advantages/reward_std", stds),
        }

    def _differ(self, rewards: Sequence[float]) -> bool:
        # Rounding alone can give equal rewards a tiny standard deviation.
        if len(rewards) < 2 or max(rewards) == min(rewards):
            return False
        return statistics.pstdev(rewards) > self.threshold
