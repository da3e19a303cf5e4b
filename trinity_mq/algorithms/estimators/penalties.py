"""Penalties on a run's reward, relative to the other runs of its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trinity_mq.algorithms.estimators.runs import (
    Counts,
    Flags,
    Group,
    Numbers,
    mask_lengths,
    numbered,
    response_field,
    trained_tokens,
)
from trinity_mq.config.estimators import LengthPenaltyWeights
from trinity_mq.experience import ExperienceBatch


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
        """Return the counts of a group's runs, in the order of the group."""
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
    with the mean of the rewards and the weights a, b, c (the GRPO length penalty of prime-rl).
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
