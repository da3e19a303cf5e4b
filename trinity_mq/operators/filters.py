"""Operators that drop experiences by their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from trinity_mq.experience.access import E, chosen, ids, values
from trinity_mq.operators.base import ColumnOperator


class RewardFilter(ColumnOperator):
    """Keeps experiences whose reward is at least ``threshold``; one without a reward is dropped too."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, exps: E) -> tuple[E, dict[str, Any]]:
        """Return the experiences that are kept, and ``filtered_count``."""
        rewards = values(exps, "reward")
        kept = [number for number, reward in enumerate(rewards) if _valid(reward) and reward >= self.threshold]
        return chosen(exps, kept), {"filtered_count": len(exps) - len(kept)}


class InvalidRewardFilter(ColumnOperator):
    """Drops experiences whose reward is missing or no finite number."""

    def apply(self, exps: E) -> tuple[E, dict[str, Any]]:
        """Return the experiences that are kept, and ``filtered_count``."""
        kept = [number for number, reward in enumerate(values(exps, "reward")) if _valid(reward)]
        return chosen(exps, kept), {"filtered_count": len(exps) - len(kept)}


class RewardStdFilter(ColumnOperator):
    """Drops tasks whose runs are (nearly) equally good: they teach a group-relative algorithm nothing.

    A task stays if its runs number at least two and the population standard deviation of their rewards is above
    ``threshold``. The reward of a run is that of its last step; runs without a reward do not count.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, exps: E) -> tuple[E, dict[str, Any]]:
        """Return the experiences that are kept, ``operator_filtered_count`` and the spread of the groups before."""
        tids = ids(exps, "tid")
        groups = _run_rewards(tids, ids(exps, "rid"), values(exps, "eid.step"), values(exps, "reward"))
        kept_tids = {tid for tid, rewards in groups.items() if self._differ(rewards)}
        kept = [number for number, tid in enumerate(tids) if tid in kept_tids]
        means = [statistics.fmean(rewards) for rewards in groups.values() if rewards]
        stds = [statistics.pstdev(rewards) for rewards in groups.values() if rewards]
        return chosen(exps, kept), {
            "operator_filtered_count": len(exps) - len(kept),
            **_spread("origin_group_advantages/reward_mean", means),
            **_spread("origin_group_advantages/reward_std", stds),
        }

    def _differ(self, rewards: Sequence[float]) -> bool:
        # Equal rewards can have a tiny standard deviation by rounding alone.
        if len(rewards) < 2 or max(rewards) == min(rewards):
            return False
        return statistics.pstdev(rewards) > self.threshold


def _valid(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def _run_rewards(
    tids: Sequence[str], rids: Sequence[str], steps: Sequence[int], rewards: Sequence[float | None]
) -> dict[str, list[float]]:
    """Return the rewards of the runs of each task."""
    last: dict[str, int] = {}
    for number, rid in enumerate(rids):
        if rid not in last or steps[number] >= steps[last[rid]]:
            last[rid] = number
    groups: dict[str, list[float]] = {tid: [] for tid in tids}
    for number in last.values():
        reward = rewards[number]
        if reward is not None and math.isfinite(reward):
            groups[tids[number]].append(reward)
    return groups


def _spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    if not numbers:
        return {}
    return {f"{name}/mean": statistics.fmean(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)}
