"""Metrics of the answers of a batch as the runners sent them, before any operator."""

from __future__ import annotations

import numpy as np

from trinity_mq.algorithms.estimators.runs import deviation, run_values, scores
from trinity_mq.experience import ExperienceBatch


def outcome_metrics(batch: ExperienceBatch) -> dict[str, float]:
    """Return the spread of the rewards of runs, and the number of groups whose runs all have equal rewards.

    The reward of a run is the reward of its last step. Runs without a finite reward do not count, nor do groups without
    such a run. A group with equal rewards is ``all_correct`` if the score (:func:`scores`) of each run is above 0, and
    ``all_wrong`` if no score is. Standard deviations are unbiased; the deviation within groups is a mean over groups of
    at least two runs.
    """
    groups = {tid: np.array(list(runs.values())) for tid, runs in run_values(batch, batch.values("reward"))[0].items()}
    groups = {tid: rewards for tid, rewards in groups.items() if len(rewards)}
    if not groups:
        return {}
    right = {tid: [score > 0 for score in runs.values()] for tid, runs in run_values(batch, scores(batch))[0].items()}
    compared = {tid: rewards for tid, rewards in groups.items() if len(rewards) > 1}
    equal = [right[tid] for tid, rewards in compared.items() if rewards.min() == rewards.max() and right[tid]]
    whole = np.concatenate(list(groups.values()))
    metrics = {
        "reward/mean": float(whole.mean()),
        "reward/std": deviation(whole),
        "reward/min": float(whole.min()),
        "reward/max": float(whole.max()),
        "groups/size": len(whole) / len(groups),
        "groups/zero_std_all_correct": float(sum(map(all, equal))),
        "groups/zero_std_all_wrong": float(sum(not any(group) for group in equal)),
    }
    if compared:
        metrics["reward_std_within_group"] = float(np.mean([deviation(rewards) for rewards in compared.values()]))
    return metrics
