"""Terms that keep the policy close to another policy, one number per token."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView, clamp_log_ratio
from trinity_mq.config.algorithm.pieces import CovarianceKL, ReferenceKL, Regulariser, SquaredLogRatio
from trinity_mq.config.algorithm.reference import RewardKL


def kl_estimate(difference: Tensor, kind: str, ratio: Tensor | None = None) -> Tensor:
    """Return an estimate of ``KL(pi || ref)`` per token in nats from samples of ``pi``. k3 limits differences to +-20.

    Args:
        difference: ``log pi - log ref``, ``[tokens]``.
        kind: Estimator, as in :class:`ReferenceKL`.
        ratio: ``pi / anchor``, with gradient; for ``k3_weighted``.
    """
    bounded = clamp_log_ratio(difference)
    k3 = (-bounded).exp() - 1 + bounded
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return k3
        case "k3_clamped":
            return k3.clamp(-10, 10)
        case "abs":
            return difference.abs()
        case "k3_weighted":
            assert ratio is not None
            return ratio.clamp(0, 2) * k3
        case "k3_k2":
            k2 = difference.square() / 2
            return k3.detach() + k2 - k2.detach()
    raise ValueError(f"{kind!r} is not an estimator of the KL divergence")


def reference_kl(view: TokenView, anchor: Tensor, args: ReferenceKL) -> Tensor:
    """Return the estimate of ``KL(pi || ref)`` of each token, without its coefficient."""
    assert view.ref is not None
    ratio = clamp_log_ratio(view.logprob - anchor).exp()
    return kl_estimate(view.logprob - view.ref, args.kind, ratio)


def sampler_kl(mu: Tensor, ref: Tensor, args: RewardKL) -> Tensor:
    """Return the estimate of ``KL(sampler || ref)`` to subtract from the reward of each token, without its coefficient.
    Differences are limited to +-20; the estimate is 0 where a logprob is NaN.

    Args:
        mu: Logprobs of the sampling policy, ``[tokens]`` in nats.
        ref: Logprobs of the reference, ``[tokens]`` in nats.
        args: Settings with the kind of estimator.
    """
    return kl_estimate(clamp_log_ratio(mu - ref), args.kind).nan_to_num(nan=0.0)


def adapt_coefficient(coef: float, kl: float, samples: int, args: RewardKL) -> float:
    """Return the coefficient after a train step, ``coef (1 + clip(kl / target - 1, -.2, .2) samples / horizon)`` (arXiv
    1909.08593, section 2.2). Without a target it does not change. Samples beyond the horizon do not count.

    Args:
        coef: Coefficient before the train step.
        kl: Mean over the samples of their mean KL per token, in nats.
        samples: Number of samples in the train step.
        args: Target and horizon.
    """
    if args.target is None:
        return coef
    error = max(-0.2, min(0.2, kl / args.target - 1))
    return coef * (1 + error * min(samples, args.horizon) / args.horizon)


def regulariser(view: TokenView, anchor: Tensor, args: Regulariser) -> Tensor:
    """Return the term of each token, its coefficient included."""
    if isinstance(args, CovarianceKL):
        assert view.chosen is not None
        return torch.where(view.chosen, args.coef * clamp_log_ratio(view.logprob - anchor).abs(), 0.0)
    if isinstance(args, SquaredLogRatio):
        return args.coef * clamp_log_ratio(view.logprob - anchor).square()
    return -args.coef * view.logprob
