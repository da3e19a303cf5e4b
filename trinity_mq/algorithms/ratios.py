"""Log ratios between the policy and its anchor, one number per token."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView, clamp_log_ratio, segment_means, segment_sums
from trinity_mq.config.algorithm.pieces import Anchor, GeometricRatio, Piece


def anchor_logprob(view: TokenView, anchor: Anchor) -> Tensor:
    """Return the logprob in the denominator of the ratio, ``[tokens]``, without gradient.

    ``loglinear`` interpolates between the sampler's and the policy's logprob: ``log mu + a (log pi - log mu)`` with ``a
    = (s - 1) / s`` for the token's staleness ``s``, and ``a = 0`` for fresh tokens (arXiv 2512.06547). ``linear``
    interpolates between the probabilities: ``log((1 - a) mu + a pi)`` (AReaL 1.0.4, ``prox_logp_method: linear``).
    """
    if anchor == "mu":
        return view.mu
    if anchor == "old":
        assert view.old is not None
        return view.old
    assert view.staleness is not None
    age = view.staleness.to(view.mu.dtype)
    share = torch.where(age > 0, (age - 1) / age.clamp_min(1), 0.0).clamp(0, 1)
    policy = view.logprob.detach()
    if anchor == "linear":
        return torch.logaddexp(view.mu + torch.log1p(-share), policy + share.log())
    return view.mu + share * (policy - view.mu)


def log_ratio(view: TokenView, anchor: Tensor, ratio: Piece) -> Tensor:
    """Return the log ratio of each token as defined by ``ratio``, ``[tokens]``, with gradient, within +-20."""
    if ratio.kind == "self":
        return view.logprob - view.logprob.detach()
    plain = clamp_log_ratio(view.logprob - anchor)
    match ratio.kind:
        case "sequence":
            return clamp_log_ratio(view.logprob - view.logprob.detach() + segment_means(plain, view).detach())
        case "sequence_mean":
            return segment_means(plain, view)
        case "sequence_product":
            return clamp_log_ratio(segment_sums(plain, view))
    if isinstance(ratio, GeometricRatio):
        sign = view.advantage.sign()
        # PPO's clip in log space: the smaller of the two objectives
        clipped = plain.clamp(-ratio.low, ratio.high)
        return segment_means(sign * torch.minimum(sign * plain, sign * clipped), view)
    return plain
