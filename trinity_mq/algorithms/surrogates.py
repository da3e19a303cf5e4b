"""Surrogates compute the loss of each token from its log ratio, logprob and advantage. The loss of a value function is
clipped in the same way. Pure functions over ``[tokens]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trinity_mq.algorithms.plugins import plugin_losses
from trinity_mq.algorithms.view import clamp_log_ratio
from trinity_mq.config.algorithm.pieces import (
    Clip,
    Likelihood,
    Linear,
    LogLinear,
    LogRatio,
    Piece,
    PluginPiece,
    Quadratic,
    SigmoidGate,
    Truncate,
    Vespo,
)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token and its counts."""

    loss: Tensor
    """Loss of each token, ``[tokens]``, with gradient."""
    counts: dict[str, Tensor] = field(default_factory=dict)
    """bool ``[tokens]`` each. Their shares of the sampled trained tokens are the metrics ``actor/<name>``."""


def clip(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Clip) -> TokenLoss:
    """Return PPO's clipped loss; see :class:`Clip`. Counts the tokens whose gradient the clip cuts (``pg_clipfrac``, by
    side ``_low`` and ``_high``) and the dual clip (``pg_clipfrac_dual``).
    """
    ratio = log_ratio.exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - args.low, 1 + args.high)
    loss = torch.maximum(plain, clipped)
    cut = clipped > plain
    bounded = loss
    if args.dual is not None:
        bounded = torch.where(advantage < 0, torch.minimum(loss, -advantage * args.dual), loss)
    counts = {
        "pg_clipfrac": cut,
        "pg_clipfrac_low": cut & (advantage < 0),
        "pg_clipfrac_high": cut & (advantage > 0),
        "pg_clipfrac_dual": bounded < loss,
    }
    return TokenLoss(bounded, counts)


def truncate(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Truncate) -> TokenLoss:
    """Return the policy gradient with a truncated constant weight; see :class:`Truncate`. Counts the tokens with a
    truncated weight (``clipped_frac``).
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(args.floor, args.cap)
    truncated = weight != ratio
    if args.only == "negative":
        positive = advantage > args.threshold
        weight, truncated = torch.where(positive, 1.0, weight), truncated & ~positive
    keep = torch.ones_like(advantage, dtype=torch.bool)
    if args.mask_high is not None:
        keep &= ~((ratio > 1 + args.mask_high) & (advantage > 0))
    if args.mask_low is not None:
        keep &= ~((ratio < 1 - args.mask_low) & (advantage < 0))
    loss = -weight * advantage * logprob
    return TokenLoss(torch.where(keep, loss, 0.0), {"clipped_frac": truncated})


def gate(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: SigmoidGate) -> TokenLoss:
    """Return the softly gated loss; see :class:`SigmoidGate`. The gradient flows through the gate."""
    tau = _chosen(advantage > 0, args.positive, args.negative, log_ratio)
    return TokenLoss(-advantage * torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau)


def linear(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Linear) -> TokenLoss:
    """Return ``-A r``. With ``cap`` return ``-A min(r, cap) log pi`` with a constant weight ``min(r, cap)``, so that a
    token above the cap keeps a bounded gradient. Counts the capped tokens (``clipped_frac``).
    """
    ratio = log_ratio.exp()
    if args.cap is None:
        return TokenLoss(-advantage * ratio)
    weight = ratio.detach().clamp(max=args.cap)
    return TokenLoss(-advantage * weight * logprob, {"clipped_frac": ratio.detach() > args.cap})


def log_linear(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: LogLinear) -> TokenLoss:
    """Return the weighted policy gradient over chosen tokens; see :class:`LogLinear`. Counts the excluded tokens
    (``pg_clipfrac``).
    """
    ratio = log_ratio.detach().exp()
    below, above = ratio < 1 - args.low, ratio > 1 + args.high
    up, down = advantage > 0, advantage < 0
    out = {
        "all": torch.zeros_like(up),
        "one_side": (up & above) | (down & below),
        "two_side": below | above,
        "ring": (below | above) & ~(up & (ratio <= 1 - args.outer_low)) & ~(down & (ratio >= 1 + args.outer_high)),
    }[args.keep]
    weight = torch.ones_like(ratio)
    if args.weight == "ratio":
        weight = ratio
    elif args.weight == "advantage":
        weight = clamp_log_ratio(advantage / args.temperature).exp()
    loss = -advantage * weight * logprob / args.divisor
    return TokenLoss(torch.where(out, 0.0, loss), {"pg_clipfrac": out})


def log_ratio_loss(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: LogRatio) -> TokenLoss:
    """Return ``-A log r`` within the range, else 0. Counts the tokens outside the range (``pg_clipfrac``)."""
    ratio = log_ratio.detach().exp()
    out = (ratio < 1 / (1 + args.epsilon)) | (ratio > 1 + args.epsilon)
    return TokenLoss(torch.where(out, 0.0, -advantage * log_ratio), {"pg_clipfrac": out})


def quadratic(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Quadratic) -> TokenLoss:
    """Return the policy gradient with a quadratic term that keeps the ratio near 1; see :class:`Quadratic`."""
    return TokenLoss(-advantage * logprob + args.beta / 2 * log_ratio.square())


def vespo(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Vespo) -> TokenLoss:
    """Return the policy gradient with the weight of :class:`Vespo`; ``log_ratio`` is the log ratio of the sequence."""
    ratio = log_ratio.detach()
    positive = advantage >= 0
    power = _chosen(positive, args.positive_power, args.negative_power, ratio)
    rate = _chosen(positive, args.positive_rate, args.negative_rate, ratio)
    weight = (rate + power * ratio - rate * ratio.exp()).exp()
    return TokenLoss(-advantage * weight * logprob)


def likelihood(logprob: Tensor, args: Likelihood) -> TokenLoss:
    """Return the weighted negative log likelihood; see :class:`Likelihood`."""
    probability = logprob.detach().exp()
    bounded = logprob if args.cutoff == 1 else torch.minimum(logprob, logprob.new_tensor(args.cutoff).log())
    weight = {
        "none": torch.ones_like(probability),
        "probability": probability,
        "uncertainty": probability * (1 - probability),
    }[args.weight]
    return TokenLoss(-weight * bounded)


def _chosen(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """Return one of two numbers for each token, in the dtype of ``like``."""
    return torch.where(condition, like.new_tensor(first), like.new_tensor(second))


Surrogate = Callable[[Tensor, Tensor, Tensor, Any], TokenLoss]

SURROGATES: dict[str, Surrogate] = {
    "clip": clip,
    "truncate": truncate,
    "gate": gate,
    "linear": linear,
    "log_linear": log_linear,
    "log_ratio": log_ratio_loss,
    "quadratic": quadratic,
    "vespo": vespo,
}
"""Surrogates by their kind in the configuration. Each takes log ratio, logprob, advantage and its arguments."""


def surrogate(
    log_ratio: Tensor, logprob: Tensor, advantage: Tensor, args: Piece, custom: Mapping[str, Tensor] | None = None
) -> TokenLoss:
    """Return the loss of each token as defined by ``args``. ``custom`` holds optional fields for plug-ins."""
    if isinstance(args, PluginPiece):
        return TokenLoss(plugin_losses(args, log_ratio, logprob, advantage, custom or {}))
    return SURROGATES[args.kind](log_ratio, logprob, advantage, args)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Return ``max((v - R)^2, (clip(v, old - bound, old + bound) - R)^2) / 2`` of each token. A value that has moved
    further than ``bound`` towards its return has no gradient (the clipped value loss of PPO's authors, described in
    arXiv 2005.12729, section 3).

    Args:
        values: Values of the trained value function, ``[tokens]``, with gradient.
        old: Its values at the start of the train step, ``[tokens]``.
        returns: Targets of the values, ``[tokens]``.
        bound: Largest change without a clip, above 0.

    Returns:
        The losses, ``[tokens]``, and whether the clip cuts each token's gradient, bool ``[tokens]``.
    """
    plain = (values - returns).square()
    clipped = (torch.clamp(values, old - bound, old + bound) - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).detach()
