"""Operators that drop experiences by their rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from trinity_mq.experience import Experience
from trinity_mq.operators.base import Processed, ThreadedOperator


class RewardFilter(ThreadedOperator):
    """Keeps experiences whose reward is at least ``threshold``; one without a reward is dropped too."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, exps: list[Experience]) -> Processed:
        """Return the experiences that are kept, and ``filtered_count``."""
        kept = [exp for exp in exps if _valid(exp) and exp.reward is not None and exp.reward >= self.threshold]
        return kept, {"filtered_count": len(exps) - len(kept)}


class InvalidRewardFilter(ThreadedOperator):
    """Drops experiences whose reward is missing or no finite number."""

    def apply(self, exps: list[Experience]) -> Processed:
        """Return the experiences that are kept, and ``filtered_count``."""
        kept = [exp for exp in exps if _valid(exp)]
        return kept, {"filtered_count": len(exps) - len(kept)}


class RewardStdFilter(ThreadedOperator):
    """Drops tasks whose runs are (nearly) equally good: they teach a group-relative algorithm nothing.

    A task stays if its runs number at least two and the population standard deviation of their rewards is above
    ``threshold``. The reward of a run is that of its last step; runs without a reward do not count.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def apply(self, exps: list[Experience]) -> Processed:
        """Return the experiences that are kept, ``operator_filtered_count`` and the spread of the groups before."""
        groups = _run_rewards(exps)
        kept_tids = {tid for tid, rewards in groups.items() if self._differ(rewards)}
        kept = [exp for exp in exps if exp.eid.tid in kept_tids]
        means = [statistics.fmean(rewards) for rewards in groups.values() if rewards]
        stds = [statistics.pstdev(rewards) for rewards in groups.values() if rewards]
        return kept, {
            "operator_filtered_count": len(exps) - len(kept),
            **_spread("origin_group_advantages/reward_mean", means),
            **_spread("origin_group_advantages/reward_std", stds),
        }

    def _differ(self, rewards: Sequence[float]) -> bool:
        # Equal rewards can have a tiny standard deviation by rounding alone.
        if len(rewards) < 2 or max(rewards) == min(rewards):
            return False
        return statistics.pstdev(rewards) > self.threshold


def _valid(exp: Experience) -> bool:
    return exp.reward is not None and math.isfinite(exp.reward)


def _run_rewards(exps: Iterable[Experience]) -> dict[str, list[float]]:
    """Return the rewards of the runs of each task."""
    last: dict[str, Experience] = {}
    groups: dict[str, list[float]] = {}
    for exp in exps:
        groups.setdefault(exp.eid.tid, [])
        known = last.get(exp.eid.rid)
        if known is None or exp.eid.step >= known.eid.step:
            last[exp.eid.rid] = exp
    for exp in last.values():
        if exp.reward is not None and math.isfinite(exp.reward):
            groups[exp.eid.tid].append(exp.reward)
    return groups


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
