"""Advantages from a teacher's logprob of each sampled token: on-policy distillation and its symmetric form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trinity_mq.algorithms.estimators.runs import Counts, Flags, mask_lengths, response_field
from trinity_mq.config.estimators import DistillEstimator, JsdEstimator
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import Ragged

Advantages = Callable[[Tensor, Tensor], Tensor]
"""Computes advantages from the logprobs of student and teacher, float32 ``[tokens]`` in nats."""


def distillation_advantages(batch: ExperienceBatch, args: DistillEstimator) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every token the teacher's log probability minus the student's (reverse KL per token, on the student's own
    samples: arXiv 2306.13649; as an advantage: https://thinkingmachines.ai/blog/on-policy-distillation/).

    The advantage of token ``t`` is ``-kl_coef * (logprobs[t] - teacher_logprobs[t])`` where the action mask is True,
    else 0. Both logprobs are in nats, at the sampling temperature. Rewards, other tokens and other runs have no
    influence: nothing is centred or scaled, and groups may have any size.

    Runs with a trained token whose logprob, of student or teacher, is not a finite number are dropped with all their
    experiences, and counted.

    Args:
        batch: A whole batch, in any order.
        args: Settings with the factor ``kl_coef``.

    Returns:
        The remaining experiences, in the given order, with ``advantages`` as float32 ``[response]``; and the metrics.
        ``advantage/kl/*`` are over the runs' means of ``logprobs - teacher_logprobs`` over trained tokens (the k1
        estimator of KL(student || teacher) in nats, http://joschu.net/blog/kl-approx.html), and absent without trained
        tokens.

    Raises:
        ValueError: An experience has no action mask (dpo), or has a trained token and no logprobs of the student or the
            teacher.
    """
    return _from_teacher(batch, lambda student, teacher: args.kl_coef * (teacher - student))


def jsd_advantages(batch: ExperienceBatch, args: JsdEstimator) -> tuple[ExperienceBatch, dict[str, float]]:
    """Give every token its part in the policy gradient of the generalised Jensen-Shannon divergence (arXiv 2306.13649),
    ``JSD = beta KL(T || M) + (1 - beta) KL(S || M)`` with ``M = beta T + (1 - beta) S``.

    The advantage of a token is ``-kl_coef (1 - beta) (log S - log M)``. The derivatives of ``log M`` in both terms and
    the derivative of ``log S`` cancel in expectation over the student's samples. Otherwise the same as
    :func:`distillation_advantages`.
    """
    return _from_teacher(batch, lambda student, teacher: jsd_advantage(student, teacher, args.beta, args.kl_coef))


def jsd_advantage(student: Tensor, teacher: Tensor, beta: float, kl_coef: float) -> Tensor:
    """Return ``-kl_coef (1 - beta) (log S - log M)`` from the logprobs of student and teacher, ``[tokens]`` in nats."""
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return kl_coef * (1 - beta) * (mixture - student)


def _from_teacher(batch: ExperienceBatch, advantages: Advantages) -> tuple[ExperienceBatch, dict[str, float]]:
    if not len(batch):
        return batch, {"rollout/nonfinite_logprobs": 0.0}
    masks = mask_lengths(batch)
    trained = batch.dense("action_mask").to(torch.bool)
    owner = np.repeat(np.arange(len(batch)), masks)
    counts = np.bincount(owner[trained.numpy()], minlength=len(batch))
    student = response_field(batch, "logprobs", counts > 0, "the engine returns them with its samples")
    teacher = response_field(
        batch,
        "teacher_logprobs",
        counts > 0,
        "the workflow asks a teacher for them: use on_policy_distill_workflow with a model of "
        "explorer.auxiliary_models, call add_teacher_logprobs of trinity_mq.workflows.builtin.distill in your own "
        "workflow, or take algorithm.algorithm_type=grpo",
    )
    distances = torch.where(trained, student - teacher, 0.0)
    _, runs = np.unique(np.array(batch.ids("rid")), return_inverse=True)
    nonfinite_runs = np.unique(runs[owner[~torch.isfinite(distances).numpy()]])
    remaining = ~np.isin(runs, nonfinite_runs)
    metrics = {
        "rollout/nonfinite_logprobs": float(len(nonfinite_runs)),
        **_by_run(distances, owner, runs, counts, remaining),
    }
    flat = torch.where(trained, advantages(student, teacher), 0.0) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return batch.replace(advantages=Ragged.packed(flat, masks)).select(remaining), metrics


def _by_run(
    distances: Tensor,
    owner: Counts,
    runs: Counts,
    counts: Counts,
    remaining: Flags,
) -> dict[str, float]:
    """Return the mean, maximum and minimum over the remaining runs of each run's mean distance per trained token."""
    sums = np.bincount(runs[owner], weights=distances.double().numpy())
    tokens = np.bincount(runs, weights=counts)
    staying = np.bincount(runs, weights=remaining) > 0
    means = sums[staying & (tokens > 0)] / tokens[staying & (tokens > 0)]
    if not len(means):
        return {}
    return {f"advantage/kl/{name}": float(getattr(means, name)()) for name in ("mean", "max", "min")}
