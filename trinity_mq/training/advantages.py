"""Advantages that the trainer computes. They need a critic's values, a KL to the reference in the rewards, or reward
averages kept across train steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.estimators.runs import with_scores
from trinity_mq.algorithms.regularisers import adapt_coefficient, sampler_kl
from trinity_mq.config.algorithm.reference import RewardKL
from trinity_mq.config.run import Config
from trinity_mq.experience import ExperienceBatch
from trinity_mq.training.critic import Critic, Targets
from trinity_mq.training.packing import train_tokens
from trinity_mq.training.reference import Reference


@dataclass(frozen=True)
class Memory:
    """State of the estimator, of the KL in the rewards and of the guard, carried from one train step to the next; part
    of a checkpoint.
    """

    baselines: dict[str, float] = field(default_factory=dict)
    """Moving averages of the rewards, by role."""
    reward_kl_coef: float | None = None
    """Coefficient of the KL in the rewards, if it is adapted to a target. None: use the configured coefficient."""
    guard: dict[str, Any] = field(default_factory=dict)
    """State of the guard of optimizer steps, see :meth:`trinity_mq.training.guard.Guard.state`."""


@dataclass(frozen=True)
class AdvantageResult:
    """Experiences of a train step with their advantages, plus the tensors and metrics computed along the way."""

    batch: ExperienceBatch
    """Experiences that remain after estimation."""
    memory: Memory
    """State for the next train step, except the guard's. It takes effect only if this train step changes the policy.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    targets: Targets | None = None
    """Targets of the critic, in the order of the trained tokens. None without a critic."""
    ref: Tensor | None = None
    """Reference logprobs of the trained tokens, float32 ``[tokens]``. None where they were not needed."""


def trainer_advantages(
    batch: ExperienceBatch,
    config: Config,
    weights: Mapping[str, float],
    step: int,
    memory: Memory,
    critic: Critic | None = None,
    reference: Reference | None = None,
) -> AdvantageResult:
    """Compute the advantages of a train step's samples with an estimator that runs in the trainer.

    Args:
        batch: All samples of the train step, at least one.
        config: Configuration of the run.
        weights: Component weights in this train step.
        step: Number of the train step, from 1.
        memory: State left by the previous train step. It is not modified.
        critic: Critic for estimators that use values.
        reference: Reference model that ``reward_kl`` compares the sampling policy with, if ``reward_kl`` is set.

    Returns:
        The samples of the runs that the estimator keeps, with ``advantages``, and with ``returns`` where there is a
        critic. The metrics are the estimator's. A critic adds ``critic/vpred_mean`` and ``critic/explained_variance``,
        which is ``1 - Var(R - V) / Var(R)`` over the trained tokens and is absent where the returns R are equal.
        ``reward_kl`` adds ``actor/kl_reward``, the mean over samples of their mean KL per token in nats, and
        ``actor/kl_reward_coef``, the coefficient of that KL in this train step.

    Raises:
        ValueError: An experience lacks a field that the estimator needs; the message names the experience. Or a value
            of the critic is not finite for a trained token.
    """
    algorithm, mask = config.algorithm, batch.dense("action_mask").bool()
    baselines = dict(memory.baselines)
    inputs: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    values, ref, targets = torch.zeros(len(mask)), None, None
    if algorithm.estimator.kind == "group":
        inputs["baselines"] = baselines
    if critic is not None or algorithm.reward_kl is not None:
        # Only the states matter for this packing, but flatten() requires an advantages field.
        routed = None if reference is None else reference.policy.routed
        tokens = train_tokens(with_scores(batch, [0.0] * len(batch)), algorithm, weights, step, routed)
        model = critic or reference
        assert model is not None
        batches = tokens.micro_batches(range(len(batch)), model.division)
    if critic is not None:
        values[mask] = critic.values(batches, tokens.tokens).cpu()
        inputs["values"] = values
    coef = memory.reward_kl_coef
    if algorithm.reward_kl is not None:
        assert reference is not None
        ref = reference.logprobs(batches, tokens.tokens).cpu()
        inputs["token_penalty"], coef, metrics = _penalty(batch, tokens.columns["mu"], ref, algorithm.reward_kl, coef)
    estimated, more_metrics = estimate(batch, algorithm.estimator, **inputs)
    stays = np.repeat(np.isin(batch.ids("rid"), estimated.ids("rid")), batch.lengths("action_mask"))
    remaining = mask & torch.from_numpy(stays)
    metrics |= more_metrics
    if critic is not None:
        targets, more_metrics = _critic_targets(estimated, values[remaining], critic)
        metrics |= more_metrics
    return AdvantageResult(
        estimated, Memory(baselines, coef), metrics, targets, None if ref is None else ref[remaining[mask]]
    )


def _penalty(
    batch: ExperienceBatch, mu: Tensor, ref: Tensor, args: RewardKL, coef: float | None
) -> tuple[Tensor, float | None, dict[str, float]]:
    """Return the KL penalty to subtract from the rewards, ``[response tokens of the batch]``, the coefficient for the
    next train step (None without a target), and metrics.

    Args:
        batch: The samples.
        mu: Logprobs of the sampling policy, ``[trained tokens]``.
        ref: Logprobs of the reference, ``[trained tokens]``.
        args: Section ``reward_kl`` of the configuration.
        coef: Coefficient left by the last train step.
    """
    mask = batch.dense("action_mask").bool()
    kl = torch.zeros(len(mask)).masked_scatter(mask, sampler_kl(mu, ref, args))
    used = args.coef if coef is None or args.target is None else coef
    owner = np.repeat(np.arange(len(batch)), batch.lengths("action_mask"))
    counts = np.bincount(owner[mask.numpy()], minlength=len(batch))
    means = np.bincount(owner, weights=kl.double().numpy(), minlength=len(batch))[counts > 0] / counts[counts > 0]
    if not len(means):
        return used * kl, coef, {}
    mean = float(means.mean())
    following = None if args.target is None else adapt_coefficient(used, mean, len(means), args)
    return used * kl, following, {"actor/kl_reward": mean, "actor/kl_reward_coef": used}


def _critic_targets(batch: ExperienceBatch, old: Tensor, critic: Critic) -> tuple[Targets, dict[str, float]]:
    """Return the targets of the critic, and its metrics.

    Args:
        batch: Experiences with ``returns``.
        old: Values of their trained tokens.
        critic: Critic to train.
    """
    metrics: dict[str, float] = {}
    returns = batch.dense("returns").float()[batch.dense("action_mask").bool()] if len(batch) else old
    if len(old):
        metrics["critic/vpred_mean"] = old.mean().item()
    if len(old) > 1 and returns.min() < returns.max():
        metrics["critic/explained_variance"] = 1 - ((returns - old).double().var() / returns.double().var()).item()
    return Targets(old.to(critic.device), returns.to(critic.device)), metrics
