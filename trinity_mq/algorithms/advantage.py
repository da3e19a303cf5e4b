"""Advantage functions: from the rewards of a group of runs to one number per response token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import torch

from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Ragged

Group = dict[str, float]
"""Run id to reward."""

LARGEST = 1e30
"""A number beyond this or below its negative counts as it: squares must be finite, and advantages in float32."""


def group_relative_advantages(
    batch: ExperienceBatch, config: AlgorithmConfig
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every run the distance of its reward from the mean of its group (GRPO, arXiv 2402.03300, equation 3).

    A group is the runs of one task (``eid.tid``). Statistics are over runs (``eid.rid``), not experiences: the reward
    of a run is that of its last step (largest ``eid.step``; of equals the one listed last). With group mean ``m``, the
    advantage of reward ``r`` is ``(r - m) / (s + config.std_epsilon)``, where ``s`` is the unbiased standard deviation

    * of the group's rewards for ``std_level="group"``;
    * of all centred rewards ``r - m`` of the batch for ``"batch"`` (as in REINFORCE++-baseline, arXiv 2501.03262);

    or plain ``r - m`` for ``"none"`` (Dr. GRPO, arXiv 2503.20783). A group of one, or with equal rewards, gets 0. A
    reward beyond +-``LARGEST`` counts as that.

    Dropped, with all their experiences, and counted: runs without a finite reward, then groups with fewer than
    ``config.effective_min_group_runs`` runs left.

    Args:
        batch: A whole batch, in any order.
        config: Group size and scale.

    Returns:
        The experiences that stay, in the order given, with ``advantages`` as float32 ``[response]``: the run's number
        where the action mask is True, else 0; and the metrics. ``group_advantages/*`` are over the groups that stay and
        absent if none does.

    Raises:
        ValueError: An experience without action mask (dpo).
    """
    rids = batch.ids("rid")
    groups, missing = run_values(batch, batch.values("reward"))
    kept = {tid: group for tid, group in groups.items() if len(group) >= config.effective_min_group_runs}
    distances = [_centre(group) for group in kept.values()]
    centred = {rid: value for group in distances for rid, value in group.items()}
    deviations = {tid: _deviation(group.values()) for tid, group in kept.items()}
    scale = dict.fromkeys(centred, 1.0)
    if config.std_level == "batch":
        scale = dict.fromkeys(centred, _deviation(centred.values()) + config.std_epsilon)
    elif config.std_level == "group":
        scale = {rid: deviations[tid] + config.std_epsilon for tid, group in kept.items() for rid in group}
    staying = [number for number, rid in enumerate(rids) if rid in centred]
    scores = [centred[rids[number]] / scale[rids[number]] for number in staying]
    return with_advantages(batch.select(staying), scores), {
        "rollout/missing_rewards": float(missing),
        "rollout/partial_groups": float(len(groups) - len(kept)),
        "rollout/zero_variance_groups": float(sum(not any(group.values()) for group in distances)),
        **spread("group_advantages/reward_mean", [statistics.fmean(group.values()) for group in kept.values()]),
        **spread("group_advantages/reward_std", list(deviations.values())),
    }


def with_advantages(batch: ExperienceBatch, scores: Sequence[float]) -> ExperienceBatch:
    """Return the experiences with each one's score as advantage of all its tokens that the action mask chooses, else 0.

    Raises:
        ValueError: An experience without action mask (dpo).
    """
    lengths = batch.lengths("action_mask")
    if (lengths < 0).any():
        number = int((lengths < 0).argmax())
        raise ValueError(
            f"experience {batch.ids('uid')[number]} ({batch.values('experience_type')[number]}) has no action_mask, "
            "wanted bool [response]: group-relative advantages are for single_turn and multi_turn experiences"
        )
    if not len(batch):
        return batch
    by_token = torch.from_numpy(np.repeat(np.array(scores, dtype=np.float32), lengths))
    flat = batch.dense("action_mask").to(torch.float32) * by_token
    return batch.replace(advantages=Ragged.packed(flat, lengths))


def run_values(batch: ExperienceBatch, numbers: Sequence[Any]) -> tuple[dict[str, Group], int]:
    """Return the values of the runs by task (``tid``) and run (``rid``), in the order in which these appear.

    The value of a run is the number of its last step (largest ``eid.step``; of equals the one listed last), within
    ``LARGEST``. A run whose number is none, or not finite, does not count; its task may be left with no run.

    Args:
        batch: A whole batch.
        numbers: One for each experience, None for none.

    Returns:
        The values, and how many runs do not count.
    """
    tids, steps = batch.ids("tid"), batch.values("eid.step")
    last: dict[str, int] = {}
    for number, rid in enumerate(batch.ids("rid")):
        if rid not in last or steps[number] >= steps[last[rid]]:
            last[rid] = number
    groups: dict[str, Group] = {tid: {} for tid in tids}
    for rid, number in last.items():
        if is_finite(numbers[number]):
            groups[tids[number]][rid] = max(-LARGEST, min(LARGEST, float(numbers[number])))
    return groups, len(last) - sum(map(len, groups.values()))


def is_finite(number: Any) -> TypeGuard[float]:
    """Return whether ``number`` is a finite number."""
    return isinstance(number, Real) and math.isfinite(number)


def spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """Return ``{name}/mean``, ``/max`` and ``/min``; nothing without numbers."""
    if not numbers:
        return {}
    try:
        mean = statistics.fmean(numbers)
    except OverflowError:  # their sum
        mean = math.fsum(number / len(numbers) for number in numbers)
    return {f"{name}/mean": mean, f"{name}/max": max(numbers), f"{name}/min": min(numbers)}


def _centre(group: Group) -> Group:
    """Return rewards minus their mean; exactly 0 for equal rewards, whose mean may be off by rounding."""
    if max(group.values()) == min(group.values()):
        return dict.fromkeys(group, 0.0)
    mean = float(np.mean(list(group.values())))
    return {rid: reward - mean for rid, reward in group.items()}


def _deviation(values: Iterable[float]) -> float:
    """Return the unbiased standard deviation, 0 for fewer than two values."""
    listed = list(values)
    return float(np.std(listed, ddof=1)) if len(listed) > 1 else 0.0
