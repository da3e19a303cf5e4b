"""Group-relative advantages: compare the reward of a run with the rewards of the other runs of its task. Penalties
may lower the rewards first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from trinity_mq.algorithms.estimators.runs import (
    Counts,
    Flags,
    Group,
    Numbers,
    are_equal,
    center,
    deviation,
    mask_lengths,
    numbered,
    response_field,
    reward_metrics,
    run_values,
    trained_tokens,
    with_scores,
)
from trinity_mq.config.estimators import ACROSS_RUNS, GroupEstimator, LengthPenaltyWeights
from trinity_mq.experience import ExperienceBatch
from trinity_mq.telemetry.group_drops import LOW_VARIANCE, TOO_FEW_RUNS


@dataclass(frozen=True)
class RunSizes:
    """Token and turn counts of runs, float64 each, indexed by the run's number in :attr:`number`."""

    number: dict[str, int]
    output: Numbers
    """Number of trained tokens."""
    input: Numbers
    """Number of all other tokens."""
    turns: Numbers
    """Number of contiguous stretches of trained tokens."""

    def of(self, group: Group, counts: Numbers) -> Numbers:
        """Return the entries of ``counts`` for the runs of a group, in the order of the group."""
        return counts[[self.number[unit] for unit in group]]


def sizes(batch: ExperienceBatch, units: Sequence[str]) -> RunSizes:
    """Return the sizes of the runs. ``units`` holds the run id of each experience."""
    rows, number = numbered(units), {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    owner = np.repeat(np.arange(len(batch)), mask_lengths(batch))
    trained = trained_tokens(batch)
    before = np.concatenate([[False], trained])[: len(trained)]
    begins = trained & ~(before & (np.diff(owner, prepend=-1) == 0))
    output = _by_run(trained, owner, rows, len(number))
    total = np.bincount(rows, weights=batch.lengths("tokens"), minlength=len(number))
    return RunSizes(number, output, total - output, _by_run(begins, owner, rows, len(number)))


def mean_logprobs(batch: ExperienceBatch, units: Sequence[str]) -> dict[str, float]:
    """Return the mean of the policy's logprobs over the trained tokens of each run, in nats.

    Raises:
        ValueError: An experience with a trained token has no logprobs.
    """
    rows, runs = numbered(units), list(dict.fromkeys(units))
    owner = np.repeat(np.arange(len(batch)), mask_lengths(batch))
    trained = trained_tokens(batch)
    tokens = np.bincount(owner[trained], minlength=len(batch))
    logprobs = response_field(batch, "logprobs", tokens > 0, "rank_penalty compares likelihoods").double().numpy()
    sums = np.bincount(rows[owner[trained]], weights=logprobs[trained], minlength=len(runs))
    counts = np.bincount(rows, weights=tokens, minlength=len(runs))
    return dict(zip(runs, (sums / np.maximum(counts, 1)).tolist(), strict=True))


def apply_rank_penalty(group: Group, likelihood: dict[str, float], penalty: float) -> Group:
    """Return ``R (1 - penalty * rank / G)`` for the G rewards R of a task's runs. The rank of a run is the number of
    runs that the policy found less likely (unlikeliness reward, arXiv 2506.02355).
    """
    values = np.array([likelihood[unit] for unit in group])
    ranks = np.searchsorted(np.sort(values), values)
    return {
        unit: reward * (1 - penalty * rank / len(group))
        for (unit, reward), rank in zip(group.items(), ranks, strict=True)
    }


def apply_length_penalty(group: Group, run_sizes: RunSizes, weights: LengthPenaltyWeights) -> Group:
    """Return the rewards of a task's runs minus ``mean * (a out / max out + b in / max in + c turns / max turns)``,
    where ``mean`` is the mean of the rewards, and a, b and c are the weights of output tokens, input tokens and turns
    (the GRPO length penalty of prime-rl).
    """
    rewards = np.array(list(group.values()))
    share = sum(
        weight * _relative(run_sizes.of(group, counts))
        for weight, counts in (
            (weights.output, run_sizes.output),
            (weights.input, run_sizes.input),
            (weights.turns, run_sizes.turns),
        )
    )
    return dict(zip(group, (rewards - rewards.mean() * share).tolist(), strict=True))


def _relative(counts: Numbers) -> Numbers:
    relative: Numbers = counts / max(counts.max(), 1.0)
    return relative


def _by_run(flags: Flags, owner: Counts, rows: Counts, runs: int) -> Numbers:
    return np.bincount(rows[owner[flags]], minlength=runs).astype(np.float64)


Groups = dict[str, Group]
"""Rewards of a task's runs, by task id."""
Baselines = MutableMapping[str, float]
"""Moving average of the rewards of each role."""

GREEDY = "greedy"
"""Key of ``info``: True for the experiences of a greedily sampled run, the baseline of the task's other runs."""
ROLE = "role"
"""Key of ``info``: name of the acting role, if one run has several roles."""


def group_advantages(
    batch: ExperienceBatch, args: GroupEstimator, min_group_runs: int = 1, baselines: Baselines | None = None
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every run the distance of its reward from a baseline (GRPO, arXiv 2402.03300, equation 3, and relatives).

    A group is the runs of one task (``eid.tid``). Statistics are over runs (``eid.rid``), not experiences. The reward
    of a run is the reward of its last step (largest ``eid.step``; the last listed of equal steps). With baseline ``b``
    the advantage of reward ``r`` is ``(r - b - shift) / (s + epsilon)`` for a standard deviation ``s``, and ``(r - b -
    shift) / s`` for another scale; it is 0 if ``s`` is not above 0. :class:`GroupEstimator` explains both, and the
    penalties, factors and filters that its other settings add. Except with the baselines ``none``, ``greedy`` and
    ``role_mean``, a group with a single run gets 0, and a group with equal rewards gets 0 if ``shift`` is 0. Rewards
    are limited to +-``LARGEST``.

    Some runs are dropped with all their experiences, and counted: runs without a finite reward; groups with fewer than
    ``min_group_runs`` remaining runs, or without the greedy run they need; then the groups and runs excluded by
    ``std_threshold`` and ``drop``. Greedy runs are only a baseline and are not trained on.

    Args:
        batch: A whole batch, in any order.
        args: Baseline, scale and the other settings.
        min_group_runs: Default for ``args.min_group_runs`` if the baseline compares runs.
        baselines: Moving average of each role's rewards, for the baseline ``role_mean``. Updated in place; the caller
            keeps the mapping from batch to batch.

    Returns:
        The remaining experiences, in the given order, with ``advantages`` as float32 ``[response]``: the advantage of
        the run where the action mask is True, else 0; and the metrics. ``group_advantages/*`` are over the remaining
        groups, and absent without such groups.

    Raises:
        ValueError: An experience has no action mask (dpo). The baseline is ``role_mean``, and ``baselines`` is None or
            an experience has no role. The baseline is ``greedy``, and no run of the batch is marked as greedy.
    """
    mask_lengths(batch)
    units = _units(batch, args)
    groups, missing = run_values(batch, batch.values("reward"), units)
    min_runs = args.min_group_runs or (min_group_runs if args.compares_runs else 1)
    whole = {tid: group for tid, group in groups.items() if len(group) >= min_runs}
    sampled, greedy = _without_greedy(batch, whole) if args.baseline == "greedy" else (whole, {})
    rewards = _penalised(batch, units, sampled, args)
    varied = _groups_above_deviation(rewards, args.std_threshold)
    remaining = {tid: _balanced(group) for tid, group in varied.items()} if args.drop == "balance" else varied
    distances = _distances(batch, units, remaining, greedy, args, baselines)
    scores = _scaled(remaining, distances, args)
    if args.nonzero_scale:
        factor = _nonzero_factor(remaining.values())
        scores = {unit: score * factor for unit, score in scores.items()}
    steps = Counter(units) if args.step_norm else Counter[str]()
    staying = [number for number, unit in enumerate(units) if unit in scores]
    advantages = [scores[units[number]] / (steps[units[number]] or 1) for number in staying]
    return with_scores(batch.select(staying), advantages, whitened=args.whiten), {
        "rollout/missing_rewards": float(missing),
        TOO_FEW_RUNS.metric: float(len(groups) - len(sampled)),
        "rollout/zero_variance_groups": float(sum(not any(group.values()) for group in distances.values())),
        **_filter_metrics(rewards, varied, remaining, args),
        **reward_metrics([[sampled[tid][unit] for unit in group] for tid, group in remaining.items()]),
    }


def _units(batch: ExperienceBatch, args: GroupEstimator) -> list[str]:
    """Return the run id of each experience. For the baseline ``role_mean`` the part of each role in a run counts as a
    run.
    """
    if args.baseline != "role_mean":
        return batch.ids("rid")
    return [f"{rid} {role}" for rid, role in zip(batch.ids("rid"), roles(batch), strict=True)]


def roles(batch: ExperienceBatch) -> list[str]:
    """Return the role of each experience, ``info["role"]``.

    Raises:
        ValueError: An experience has no role; the message names the experience.
    """
    names = [(info or {}).get(ROLE) for info in batch.values("info")]
    for uid, role in zip(batch.ids("uid"), names, strict=True):
        if role in (None, ""):
            raise ValueError(
                f"experience {uid} has info[{ROLE!r}] {role!r}, wanted the name of who acted, such as 'player_0': the "
                f"baseline 'role_mean' is an average for each role. Set experience.info[{ROLE!r}] in the workflow, or "
                "take a baseline that compares the runs of a task, such as mean"
            )
    return [str(role) for role in names]


def _without_greedy(batch: ExperienceBatch, groups: Groups) -> tuple[Groups, dict[str, float]]:
    """Return the groups that have both greedy and other runs, without the greedy runs; and the mean reward of each
    group's greedy runs.
    """
    marked = {rid for rid, info in zip(batch.ids("rid"), batch.values("info"), strict=True) if (info or {}).get(GREEDY)}
    if len(batch) and not marked:
        raise ValueError(
            f"no experience of the batch has info[{GREEDY!r}], wanted one run of each task with it: for the baseline "
            "'greedy' the workflow samples one run of each task at temperature 0 and marks its experiences. Set "
            "buffer.taskset.workflow_args.greedy_baseline: true, which simple, math, math_boxed and tool_call "
            "workflows take; mark them in a workflow of your own; or take the baseline leave_one_out, which needs no "
            "such run"
        )
    baseline = {
        tid: [reward for rid, reward in group.items() if rid in marked]
        for tid, group in groups.items()
        if not marked.isdisjoint(group) and not marked.issuperset(group)
    }
    sampled = {tid: {rid: groups[tid][rid] for rid in groups[tid] if rid not in marked} for tid in baseline}
    return sampled, {tid: float(np.mean(rewards)) for tid, rewards in baseline.items()}


def _penalised(batch: ExperienceBatch, units: Sequence[str], groups: Groups, args: GroupEstimator) -> Groups:
    result = {tid: group for tid, group in groups.items() if group}
    if args.length_penalty is not None:
        run_sizes, weights = sizes(batch, units), args.length_penalty
        result = {tid: apply_length_penalty(group, run_sizes, weights) for tid, group in result.items()}
    if args.rank_penalty is not None:
        likelihood, penalty = mean_logprobs(batch, units), args.rank_penalty
        result = {tid: apply_rank_penalty(group, likelihood, penalty) for tid, group in result.items()}
    return result


def _groups_above_deviation(groups: Groups, threshold: float | None) -> Groups:
    if threshold is None:
        return groups
    return {tid: group for tid, group in groups.items() if deviation(_array(group)) > threshold}


def _balanced(group: Group) -> Group:
    """Return the group without surplus runs: drop runs below the mean until they do not outnumber the runs above it
    (REC, arXiv 2509.24203).

    A hash of the ids chooses the dropped runs. This is as good as random, and a retry drops the same runs.
    """
    distances = dict(zip(group, center(_array(group)), strict=True))
    below = [unit for unit, distance in distances.items() if distance < 0]
    surplus = len(below) - sum(distance > 0 for distance in distances.values())
    surplus_units = set(sorted(below, key=lambda unit: hashlib.blake2b(unit.encode()).digest())[: max(surplus, 0)])
    return {unit: reward for unit, reward in group.items() if unit not in surplus_units}


def _distances(
    batch: ExperienceBatch,
    units: Sequence[str],
    groups: Groups,
    greedy: dict[str, float],
    args: GroupEstimator,
    baselines: Baselines | None,
) -> Groups:
    if args.baseline == "role_mean":
        return _role_distances(batch, units, groups, args, baselines)
    run_sizes = sizes(batch, units) if args.baseline == "length_weighted" else None
    result = {}
    for tid, group in groups.items():
        weights = np.ones(len(group)) if run_sizes is None else run_sizes.of(group, run_sizes.output)
        values = baseline_distances(_array(group), args, weights, greedy.get(tid, 0.0))
        result[tid] = dict(zip(group, values.tolist(), strict=True))
    return result


def baseline_distances(rewards: Numbers, args: GroupEstimator, weights: Numbers, greedy: float = 0.0) -> Numbers:
    """Return the distances of the rewards of a task's runs from ``baseline + shift``, float64 ``[runs]``. A single run
    has the distance 0, except with the baselines ``none`` and ``greedy``. With ``second_best`` all runs but the best
    have the distance 0.

    Args:
        rewards: Float64 ``[runs]``.
        args: Settings with any baseline except ``role_mean``.
        weights: Weights of the runs in the baseline ``length_weighted``, at least 0, ``[runs]``.
        greedy: Mean reward of the task's greedy runs, for the baseline ``greedy``; 0 for all other baselines.
    """
    count = len(rewards)
    if args.baseline in {"none", "greedy"}:
        return rewards - greedy - args.shift
    if count < 2:
        return np.zeros(count)
    if are_equal(rewards):  # a computed mean may differ from equal rewards by rounding
        return np.zeros(count) - args.shift
    match args.baseline:
        case "leave_one_out":  # R_i minus the mean of the others (arXiv 2402.14740)
            distances = center(rewards) * count / (count - 1)
        case "logavgexp":
            top = rewards.max()
            distances = rewards - top - args.tau * np.log(np.mean(np.exp((rewards - top) / args.tau)))
        case "length_weighted":  # arXiv 2505.23585
            distances = rewards - np.average(rewards, weights=weights if weights.any() else None)
        case "second_best":
            best, second = np.sort(rewards)[[-1, -2]]
            distances = np.where(rewards == best, best - second, 0.0)
        case _:
            distances = center(rewards)
    return distances - args.shift


def _role_distances(
    batch: ExperienceBatch, units: Sequence[str], groups: Groups, args: GroupEstimator, baselines: Baselines | None
) -> Groups:
    """Return the distances from the roles' baselines, and update the baselines, in the order of tasks and runs."""
    if baselines is None:
        raise ValueError(
            "the baseline 'role_mean' is a moving average over batches, and no earlier baselines were given; the "
            "trainer keeps them: compute these advantages there"
        )
    order = {unit: (tid, run) for unit, tid, run in zip(units, batch.ids("tid"), batch.values("eid.run"), strict=True)}
    acting = dict(zip(units, roles(batch), strict=True))
    result: Groups = {tid: {} for tid in groups}
    rewards = {unit: reward for group in groups.values() for unit, reward in group.items()}
    for unit in sorted(rewards, key=lambda unit: (*order[unit], unit)):
        role, reward = acting[unit], rewards[unit]
        before = baselines.get(role, 0.0)
        result[order[unit][0]][unit] = reward - before - args.shift
        baselines[role] = update_average(before, reward, args.decay)
    return result


def update_average(average: float, value: float, decay: float) -> float:
    """Return the moving average after another value (role-conditioned advantages, arXiv 2506.24119)."""
    return decay * average + (1 - decay) * value


def _scaled(groups: Groups, distances: Groups, args: GroupEstimator) -> dict[str, float]:
    """Return the advantages of all runs: distances divided by their scale (plus epsilon, except with the scale
    ``mean``), or 0 if the scale is not above 0. With the scale ``none`` they are the distances.
    """
    flat = {unit: distance for group in distances.values() for unit, distance in group.items()}
    if args.scale == "none":
        return flat
    whole = _batch_deviation(groups, distances, args)
    result: dict[str, float] = {}
    for tid, group in distances.items():
        rewards = _array(groups[tid])
        scale = float(rewards.mean()) if args.scale == "mean" else whole
        if args.scale in {"group", "population"}:
            scale = deviation(rewards, ddof=1 if args.scale == "group" else 0)
        epsilon = 0.0 if args.scale == "mean" else args.epsilon
        result |= {unit: distance / (scale + epsilon) if scale > 0 else 0.0 for unit, distance in group.items()}
    return result


def _batch_deviation(groups: Groups, distances: Groups, args: GroupEstimator) -> float:
    """Return the standard deviation over the batch: of raw rewards, or of the distances of runs that were compared with
    others.
    """
    if args.scale == "batch_raw":
        return deviation(np.array([reward for group in groups.values() for reward in group.values()]))
    alone = args.baseline not in ACROSS_RUNS - {"greedy"}  # these baselines exist for a single run too
    compared = [group for group in distances.values() if alone or len(group) > 1]
    return deviation(np.array([distance for group in compared for distance in group.values()]))


def _nonzero_factor(groups: Iterable[Group]) -> float:
    """Return the number of runs divided by the number of runs with a reward other than 0 (GPG, arXiv 2504.02546)."""
    rewards = [reward for group in groups for reward in group.values()]
    return len(rewards) / max(sum(reward != 0 for reward in rewards), 1)


def _filter_metrics(rewards: Groups, varied: Groups, remaining: Groups, args: GroupEstimator) -> dict[str, float]:
    result = {}
    if args.std_threshold is not None:
        result[LOW_VARIANCE.metric] = float(len(rewards) - len(varied))
    if args.drop == "balance":
        result["rollout/surplus_runs"] = float(sum(map(len, varied.values())) - sum(map(len, remaining.values())))
    return result


def _array(group: Group) -> Numbers:
    return np.array(list(group.values()), dtype=np.float64)
