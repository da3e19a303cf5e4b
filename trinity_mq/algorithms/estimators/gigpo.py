"""Group-in-group advantages: the runs of a task are compared with each other, and the steps of these runs with other
steps from the same state.
"""

from __future__ import annotations

import numpy as np

from trinity_mq.algorithms.estimators.runs import (
    LARGEST,
    Counts,
    Numbers,
    center,
    deviation,
    is_finite,
    mask_lengths,
    numbered,
    reward_metrics,
    whole_groups,
    with_scores,
)
from trinity_mq.algorithms.estimators.trajectories import discounted_sums
from trinity_mq.config.estimators import GigpoEstimator
from trinity_mq.experience import ExperienceBatch

STEP_REWARD = "step_reward"
"""Key of ``info``: reward of the run's step that the experience holds. Without it the experience's reward counts."""
STATE = "env_state_hash"
"""Key of ``info``: text or number that is equal for steps taken from the same state."""


def gigpo_advantages(
    batch: ExperienceBatch, args: GigpoEstimator, min_group_runs: int = 1
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every step ``A_E + omega A_S`` (GiGPO, arXiv 2505.10978, equations 4, 7 and 8).

    ``A_E`` compares the summed rewards of the step's run with their mean over the task's runs. ``A_S`` compares the
    step's discounted return with the mean over all steps of the task's runs that began in the same state. Each
    difference is divided by ``s + epsilon``, where ``s`` is 1 or the unbiased standard deviation of the compared
    values. The only run of a task has ``A_E`` 0, and the only step from a state has ``A_S`` 0. States of different
    tasks are never compared.

    Two kinds of runs are dropped with all their experiences, and counted: runs with a step without finite reward, then
    runs of tasks with fewer than ``min_group_runs`` remaining runs.

    Args:
        batch: A whole batch, in any order. The experiences of a run are its steps, in the order of ``eid.step``.
        args: Weights, discount and scale.
        min_group_runs: Default for ``args.min_group_runs``.

    Raises:
        ValueError: An experience has no action mask (dpo), or no ``info["env_state_hash"]``.
    """
    mask_lengths(batch)
    rewards = _step_rewards(batch)
    unrewarded = {rid for rid, reward in zip(batch.ids("rid"), rewards, strict=True) if reward is None}
    staying, metrics = whole_groups(batch, unrewarded, args.min_group_runs or min_group_runs)
    remaining = batch.select(staying)
    scores, episodes = _scores(remaining, np.array([rewards[number] for number in staying], dtype=np.float64), args)
    return with_scores(remaining, scores.tolist()), {
        **metrics,
        "rollout/zero_variance_groups": float(sum(max(group) == min(group) for group in episodes)),
        **reward_metrics(episodes),
    }


def _scores(batch: ExperienceBatch, rewards: Numbers, args: GigpoEstimator) -> tuple[Numbers, list[list[float]]]:
    """Return the advantage of each step, and the summed rewards of the runs of each task."""
    if not len(batch):
        return rewards, []
    tids, runs = batch.ids("tid"), numbered(batch.ids("rid"))
    order = np.lexsort((np.array(batch.values("eid.step")), runs))
    returns = np.empty(len(batch))
    returns[order] = discounted_sums(rewards[order], np.bincount(runs), args.gamma)
    episodes = np.bincount(runs, weights=rewards).astype(np.float64)
    tasks = np.empty(len(episodes), dtype=np.int64)
    tasks[runs] = numbered(tids)
    states = numbered(list(zip(tids, _states(batch), strict=True)))
    scores = _scaled_distances(episodes, tasks, args)[runs] + args.omega * _scaled_distances(returns, states, args)
    return scores, [episodes[tasks == task].tolist() for task in range(int(tasks.max()) + 1)]


def _scaled_distances(values: Numbers, groups: Counts, args: GigpoEstimator) -> Numbers:
    """Return the distance of each value from the mean of its group, divided by the scale of the group."""
    result = np.empty(len(values))
    for group in range(int(groups.max()) + 1):
        chosen = groups == group
        scale = deviation(values[chosen]) if args.scale == "group" else 1.0
        result[chosen] = center(values[chosen]) / (scale + args.epsilon) if scale else 0.0
    return result


def _step_rewards(batch: ExperienceBatch) -> list[float | None]:
    """Return the reward of each step, None where the reward is not a finite number."""
    step_rewards = [
        (info or {}).get(STEP_REWARD, reward)
        for info, reward in zip(batch.values("info"), batch.values("reward"), strict=True)
    ]
    return [max(-LARGEST, min(LARGEST, float(reward))) if is_finite(reward) else None for reward in step_rewards]


def _states(batch: ExperienceBatch) -> list[str]:
    states = [(info or {}).get(STATE) for info in batch.values("info")]
    if None in states:
        number = states.index(None)
        raise ValueError(
            f"experience {batch.ids('uid')[number]} has no info[{STATE!r}], wanted a text or number that equals that "
            "of the other steps taken from the same state; a workflow for gigpo sets it for each step"
        )
    return [str(state) for state in states]
