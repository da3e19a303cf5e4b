"""Advantages of packs of tasks (Connect the Dots): the return of a task or a hint over the rest of its pack, compared
with the mean return over the runs of the pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trinity_mq.algorithms.estimators.runs import (
    LARGEST,
    Counts,
    Numbers,
    center,
    is_finite,
    mask_lengths,
    numbered,
    reward_metrics,
    trained_tokens,
    whole_groups,
    with_scores,
)
from trinity_mq.config.estimators import DotsEstimator
from trinity_mq.experience import ExperienceBatch

PLACES = {"solve_task": "task_idx", "gen_hint": "hint_idx"}
"""Key of ``info`` with the number of the task, from 0, by ``info["exp_type"]``. A hint has the number of the task that
it was written after.
"""
REWARDS = "task_rewards"
"""Key of ``info``: rewards of all tasks of the pack in this run, in their order."""
COLDEST, HOTTEST, CLOSE = 0.8, 100.0, 0.05
"""Lowest and highest temperature that :func:`balancing_temperature` tries, and the width of the interval at which the
bisection ends."""
STEEPEST = 60.0
"""Maximum exponent of a weight ``exp(d / T)``."""


class Part(NamedTuple):
    """The part of a pack that an experience comes from: a task or a hint."""

    kind: str
    place: int
    ahead: tuple[float, ...]
    """Rewards from this part to the end of the pack."""
    rewards: tuple[float, ...]
    """Rewards of all tasks of the pack."""


def dots_advantages(
    batch: ExperienceBatch, args: DotsEstimator, min_group_runs: int = 1
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every experience its return minus the mean return of the same part in all runs of its pack.

    The return of a task is computed from the rewards of this task and of the later tasks of the pack, or from the first
    ``args.window`` of these rewards. The return of a hint begins with the hint's own reward, not with the reward of the
    task before it. The difference ``d`` is then multiplied by ``exp(d / T)`` if there is a temperature ``T``: the
    configured value, or with ``args.adaptive`` a computed value if the mean of ``d`` over trained tokens is below 0. If
    ``args.center`` is set and this mean (without weights) is below 0, it is subtracted from the result. ``args.level``
    says whether mean and computed temperature are over the whole batch or over each pack. (Trinity-RFT's advantage
    ``cod`` with ``iterative_hint_e2e_causal``.)

    Two kinds of runs are dropped with all their experiences, and counted: runs with a reward that is not a finite
    number, then runs of tasks with fewer than ``min_group_runs`` remaining runs.

    Args:
        batch: A whole batch, in any order. A task of the batch is a pack.
        args: Kind of the return, and the weights.
        min_group_runs: Default for ``args.min_group_runs``.

    Raises:
        ValueError: An experience has no action mask (dpo), or its ``info`` does not describe a part of a pack.
    """
    mask_lengths(batch)
    parts = [_part(*row) for row in zip(batch.ids("uid"), batch.values("info"), batch.values("reward"), strict=True)]
    unrewarded = {rid for rid, part in zip(batch.ids("rid"), parts, strict=True) if part is None}
    rows, metrics = whole_groups(batch, unrewarded, args.min_group_runs or min_group_runs)
    remaining, staying = batch.select(rows), [part for row in rows if (part := parts[row]) is not None]
    packs: dict[str, dict[str, float]] = {}
    for tid, rid, part in zip(remaining.ids("tid"), remaining.ids("rid"), staying, strict=True):
        packs.setdefault(tid, {})[rid] = float(np.mean(part.rewards))
    groups = [list(pack.values()) for pack in packs.values()]
    return with_scores(remaining, _scores(remaining, staying, args).tolist()), {
        **metrics,
        "rollout/zero_variance_groups": float(sum(max(group) == min(group) for group in groups)),
        **reward_metrics(groups),
    }


def _scores(batch: ExperienceBatch, parts: list[Part], args: DotsEstimator) -> Numbers:
    """Return the advantage of each experience."""
    if not parts:
        return np.zeros(0)
    tids = batch.ids("tid")
    places = numbered([(tid, part.kind, part.place) for tid, part in zip(tids, parts, strict=True)])
    returns = np.array([_return(part.ahead, args) for part in parts])
    distances = _distances(returns, places, numbered(batch.ids("rid")))
    owner = np.repeat(np.arange(len(batch)), mask_lengths(batch))
    lengths = np.bincount(owner[trained_tokens(batch)], minlength=len(batch)).astype(np.float64)
    levels = numbered(tids) if args.level == "task" else np.zeros(len(batch), dtype=np.int64)
    result = np.empty(len(batch))
    for level in range(int(levels.max()) + 1):
        chosen = levels == level
        result[chosen] = weighted(distances[chosen], lengths[chosen], args)
    return result


def _distances(returns: Numbers, places: Counts, runs: Counts) -> Numbers:
    """Return the distance of each return from the mean of its place, where each run counts once."""
    _, first = np.unique(np.stack([places, runs]), axis=1, return_index=True)
    result = returns.copy()
    for place in range(int(places.max()) + 1):
        counted = returns[first[places[first] == place]]
        chosen = places == place
        result[chosen] = returns[chosen] - (counted[0] - center(counted)[0])
    return result


def weighted(distances: Numbers, lengths: Numbers, args: DotsEstimator) -> Numbers:
    """Return the distances after they are weighted and shifted; see :func:`dots_advantages`.

    Args:
        distances: Distance of each experience, float64 ``[experiences]``.
        lengths: Number of trained tokens of each experience, float64 ``[experiences]``.
        args: Temperature and shift.
    """
    total, count = float(distances @ lengths), float(lengths.sum())
    temperature = args.temperature
    if args.adaptive:
        temperature = balancing_temperature(distances, lengths) if total < 0 else None
    result = distances if temperature is None else _sharpened(distances, temperature)
    return result - total / count if args.center and total < 0 and count else result


def balancing_temperature(distances: Numbers, lengths: Numbers) -> float:
    """Return a temperature at which the weighted distances of all tokens have a sum of about 0, by bisection between
    ``COLDEST`` and ``HOTTEST``. The colder, the more the good experiences weigh.
    """
    low, high, middle = COLDEST, HOTTEST, HOTTEST
    while high - low >= CLOSE:
        middle = (low + high) / 2
        if float(_sharpened(distances, middle) @ lengths) < 0:
            high = middle
        else:
            low = middle
    return middle


def _sharpened(distances: Numbers, temperature: float) -> Numbers:
    result: Numbers = distances * np.exp(np.minimum(distances / temperature, STEEPEST))
    return result


def _return(ahead: tuple[float, ...], args: DotsEstimator) -> float:
    if args.returns == "discounted":
        return float(sum(reward * args.gamma**number for number, reward in enumerate(ahead)))
    counted = ahead[: args.window] if args.returns == "sliding_window_mean" else ahead
    return float(np.mean(counted))


def _part(uid: str, info: Mapping[str, Any] | None, reward: Any) -> Part | None:
    """Return the part of the pack that an experience comes from; None if a reward is not a finite number.

    Raises:
        ValueError: ``info`` does not describe a part of a pack.
    """
    info = info or {}
    kind, rewards = info.get("exp_type"), info.get(REWARDS)
    if kind not in PLACES or not isinstance(rewards, list | tuple) or not rewards:
        raise ValueError(
            f"experience {uid} has exp_type {kind!r:.40} and {REWARDS} {rewards!r:.40} in its info, wanted exp_type "
            f"{' or '.join(PLACES)} and the rewards of all tasks of the pack; a workflow for cod sets them"
        )
    place = info.get(PLACES[kind])
    if not isinstance(place, int) or not 0 <= place < len(rewards):
        raise ValueError(
            f"experience {uid} has info[{PLACES[kind]!r}] {place!r:.40}, wanted the number of one of the "
            f"{len(rewards)} tasks of the pack, from 0"
        )
    values = [reward if kind == "gen_hint" else rewards[place], *rewards[place + 1 :]]
    if not all(map(is_finite, [*values, *rewards])):
        return None
    bounded = [tuple(max(-LARGEST, min(LARGEST, float(value))) for value in row) for row in (values, rewards)]
    return Part(kind, place, *bounded)
