"""Advantages that the trainer computes: from a critic's values, or from averages that it keeps over train steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.estimators.runs import with_scores
from trinity_mq.config.run import Config
from trinity_mq.experience import ExperienceBatch
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.packing import flatten


@dataclass(frozen=True)
class Memory:
    """What one train step leaves for the advantages of the next one; part of a checkpoint."""

    baselines: dict[str, float] = field(default_factory=dict)
    """Moving averages of the rewards, by role."""


@dataclass(frozen=True)
class Advantages:
    """The experiences of a train step with their advantages, and what was found on the way."""

    batch: ExperienceBatch
    """The experiences that stay."""
    memory: Memory
    """What the next train step begins with, if this one changes the policy."""
    metrics: dict[str, float] = field(default_factory=dict)
    targets: Targets | None = None
    """What the critic learns, in the order of the trained tokens."""


def trainer_advantages(
    batch: ExperienceBatch,
    config: Config,
    weights: Mapping[str, float],
    step: int,
    memory: Memory,
    critic: Critic | None = None,
) -> Advantages:
    """Give a train step's samples the advantages of an estimator that runs in the trainer.

    Args:
        batch: All samples of the train step, at least one.
        config: The run.
        weights: Of the components in this train step.
        step: Its number, from 1.
        memory: Of the train step before; it is left as it is.
        critic: Whose values the estimator takes, if it takes some.

    Returns:
        The samples of runs with a reward, with ``advantages``, and ``returns`` where there is a critic. The metrics are
        the estimator's, and of a critic ``critic/vpred_mean``, and ``critic/explained_variance``, which is
        ``1 - Var(R - V) / Var(R)`` over the trained tokens, absent where the returns R are equal.

    Raises:
        ValueError: An experience has not what the estimator needs; names it.
    """
    algorithm, mask = config.algorithm, batch.dense("action_mask").bool()
    given: dict[str, Any] = {}
    baselines, values = dict(memory.baselines), torch.zeros(len(mask))
    if algorithm.estimator.kind == "group":
        given["baselines"] = baselines
    if critic is not None:
        # what is packed here are the states alone; advantages have to be there
        tokens = flatten(with_scores(batch, [0.0] * len(batch)), algorithm, weights, step)
        packed = tokens.micro_batches(range(len(batch)), config.trainer.max_tokens_per_micro_batch)
        values[mask] = critic.values(packed, tokens.tokens).cpu()
        given["values"] = values
    kept, metrics = estimate(batch, algorithm.estimator, **given)
    stays = np.repeat(np.isin(batch.ids("rid"), kept.ids("rid")), batch.lengths("action_mask"))
    left = mask & torch.from_numpy(stays)
    targets = None
    if critic is not None:
        targets, found = _learned(kept, values[left], critic)
        metrics |= found
    return Advantages(kept, Memory(baselines), metrics, targets)


def _learned(kept: ExperienceBatch, old: Tensor, critic: Critic) -> tuple[Targets, dict[str, float]]:
    """Return what the critic learns, and its metrics.

    Args:
        kept: With ``returns``.
        old: The values of its trained tokens.
        critic: Whose.
    """
    metrics: dict[str, float] = {}
    returns = kept.dense("returns").float()[kept.dense("action_mask").bool()] if len(kept) else old
    if len(old):
        metrics["critic/vpred_mean"] = old.mean().item()
    if len(old) > 1 and returns.min() < returns.max():
        metrics["critic/explained_variance"] = 1 - ((returns - old).double().var() / returns.double().var()).item()
    return Targets(old.to(critic.device), returns.to(critic.device)), metrics
