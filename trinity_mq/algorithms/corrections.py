"""Corrections for tokens that another policy sampled: a constant weight for each token. Weight 0 excludes the token.

Denominators still count the excluded tokens. Weights have no gradient. A rule is a function of a view. The rules in
``OVER_STEP``, and an importance weight with ``normalize``, need the view of the whole optimizer step, because they
compare its tokens with each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_mq.algorithms.plugins import plugin_weights
from trinity_mq.algorithms.view import TokenView, clamp_log_ratio, segment_maxima, segment_means, segment_sums
from trinity_mq.config.algorithm.pieces import (
    CovarianceClip,
    CovarianceKL,
    Divergence,
    EntropyClip,
    ImportanceWeight,
    OffPolicySequenceMask,
    Piece,
    PluginPiece,
    Reject,
    SecondMoment,
    StalenessWeight,
    VocabularyClip,
)


def importance_weight(view: TokenView, log_weight: Tensor, args: ImportanceWeight) -> Tensor:
    """Return the bounded importance weight of each token; see :class:`ImportanceWeight`.

    Args:
        view: The tokens.
        log_weight: ``log old - log mu`` (``log pi - log mu`` where the anchor is the sampler), ``[tokens]``.
        args: Level and bounds.
    """
    if args.level == "sequence":
        log_weight = segment_sums(log_weight, view)
    elif args.level == "geometric":
        log_weight = segment_means(log_weight, view)
    weight = clamp_log_ratio(log_weight).exp()
    if args.beyond == "truncate":
        weight = weight.clamp(args.low, args.high) if (args.low, args.high) != (None, None) else weight
    else:
        inside = torch.ones_like(weight, dtype=torch.bool)
        if args.low is not None:
            inside &= weight >= args.low
        if args.high is not None:
            inside &= weight <= args.high
        weight = torch.where(inside, weight, 0.0)
    # if all weights are 0, the unclamped mean would make them NaN
    return weight / weight.mean().clamp_min(torch.finfo(weight.dtype).tiny) if args.normalize else weight


def reject(view: TokenView, log_weight: Tensor, args: Reject) -> Tensor:
    """Return 1 for the kept tokens, else 0; see :class:`Reject`."""
    x = clamp_log_ratio(log_weight)
    estimate = {"k1": -x, "k2": x.square() / 2, "k3": x.exp() - 1 - x}[args.estimate]
    if args.level != "token":
        over = {"sequence_sum": segment_sums, "sequence_mean": segment_means, "sequence_max": segment_maxima}
        estimate = over[args.level](estimate, view)
    if args.estimate == "k1":
        ratio = estimate.exp()
        return ((ratio >= args.low) & (ratio <= args.high)).to(x.dtype)
    return (estimate <= args.high).to(x.dtype)


def divergence(view: TokenView, log_weight: Tensor, args: Divergence) -> Tensor:
    """Return 1 for the tokens whose probability is close to the sampler's, else 0; see :class:`Divergence`. With
    ``args.signed`` only a token whose probability has moved in the direction of its advantage can get 0.
    """
    now, then = view.logprob.detach().exp(), view.mu.exp()
    difference = now - then
    distance = difference.abs() if args.measure == "tv" else bernoulli_kl(then, now)
    out = distance > args.bound
    if args.signed:
        out &= difference * view.advantage > 0
    return (~out).to(now.dtype)


def bernoulli_kl(first: Tensor, second: Tensor) -> Tensor:
    """Return ``KL(first || second)`` in nats between Bernoulli distributions with these probabilities."""
    tiny = torch.finfo(first.dtype).eps
    p, q = first.clamp(tiny, 1 - tiny), second.clamp(tiny, 1 - tiny)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def second_moment(view: TokenView, log_weight: Tensor, args: SecondMoment) -> Tensor:
    """Return 0 for the tokens with the largest squared log ratios, so that the mean square of the others is within the
    bound, else 1; see :class:`SecondMoment`. With ``args.active`` only tokens with ``advantage * log_weight > 0`` are
    judged.
    """
    squares = log_weight.square()
    judged = view.advantage * log_weight > 0 if args.active else torch.ones_like(squares, dtype=torch.bool)
    ordered, places = torch.where(judged, squares, torch.inf).sort()
    count = int(judged.sum())
    means = ordered[:count].cumsum(0) / torch.arange(1, count + 1, device=squares.device)
    keep = ~judged
    keep[places[: int((means <= args.bound).sum())]] = True
    return keep.to(squares.dtype)


def off_policy_sequences(view: TokenView, anchor: Tensor, args: OffPolicySequenceMask) -> Tensor:
    """Return 0 for tokens of negative advantage in sequences whose mean logprob fell by more than the bound, else 1;
    see :class:`OffPolicySequenceMask`.
    """
    before = view.mu if args.against == "mu" else anchor
    fall = segment_means(before - view.logprob.detach(), view)
    return (~((view.advantage < 0) & (fall > args.bound))).to(fall.dtype)


def staleness_weight(view: TokenView, args: StalenessWeight) -> Tensor:
    """Return ``decay`` to the power of the staleness of the sequence's oldest token."""
    assert view.staleness is not None
    return args.decay ** segment_maxima(view.staleness.to(view.mu.dtype), view)


def entropy_clip(view: TokenView, args: EntropyClip) -> Tensor:
    """Return 0 for the tokens of negative advantage that lower the entropy most, else 1; see :class:`EntropyClip`."""
    assert view.entropy is not None
    logprob = view.logprob.detach()
    change = logprob.exp() * (view.entropy.detach() + logprob)
    deviation = change.std(unbiased=False)
    out = (view.advantage < 0) & (change - change.mean() < -args.bound * deviation)
    return (~out).to(logprob.dtype)


def vocabulary_clip(view: TokenView, args: VocabularyClip) -> Tensor:
    """Return 0 for the tokens of negative advantage that lower the entropy most, else 1; see :class:`VocabularyClip`.
    At most ``args.share`` of all tokens get 0, or one token if this share is smaller than a token.
    """
    assert view.entropy is not None
    assert view.entropy_baseline is not None
    logprob = view.logprob.detach()
    fall = view.entropy_baseline - logprob.exp() * (view.entropy.detach() + logprob)
    candidates = (view.advantage < 0) & (fall > args.bound * fall.std(unbiased=False))
    count = min(int(candidates.sum()), max(int(args.share * view.tokens), 1))
    weight = torch.ones_like(fall)
    weight[torch.where(candidates, fall, -torch.inf).topk(count).indices] = 0.0
    return weight


def covariance(view: TokenView) -> Tensor:
    """Return ``(log pi - mean) (A - mean)`` of each token over the view (arXiv 2505.22617, equation 10)."""
    logprob = view.logprob.detach()
    return (logprob - logprob.mean()) * (view.advantage - view.advantage.mean())


def covariance_clip(view: TokenView, args: CovarianceClip, seed: str) -> Tensor:
    """Return 0 for tokens drawn at random among the tokens whose covariance is within the bounds, else 1. The number of
    drawn tokens is ``args.share`` of all tokens of the view, at least 1, or all candidates if there are fewer. The draw
    does not depend on the order of the sequences.
    """
    covariances = covariance(view)
    candidates = torch.nonzero((covariances > args.low) & (covariances < args.high))[:, 0]
    mu, advantage = (column[candidates].tolist() for column in (view.mu, view.advantage))
    ordered = sorted(zip(mu, advantage, candidates.tolist(), strict=True))
    count = max(int(args.share * view.tokens), 1)
    drawn = [place for _, _, place in random.Random(seed).sample(ordered, min(count, len(ordered)))]
    weight = torch.ones_like(covariances)
    weight[drawn] = 0.0
    return weight


def covariance_choice(view: TokenView, args: CovarianceKL) -> Tensor:
    """Return True for the configured share of tokens with the highest covariance, at least one token, bool
    ``[tokens]``.
    """
    count = max(int(args.share * view.tokens), 1)
    chosen = torch.zeros(view.tokens, dtype=torch.bool, device=view.mu.device)
    chosen[covariance(view).topk(min(count, view.tokens)).indices] = True
    return chosen


def step_choice(view: TokenView, regularisers: Sequence[Piece]) -> Tensor | None:
    """Return the tokens of an optimizer step that selective KL terms apply to, bool ``[tokens]``; None without such a
    term.
    """
    choices = [covariance_choice(view, term) for term in regularisers if isinstance(term, CovarianceKL)]
    return torch.stack(choices).any(0) if choices else None


Rule = Callable[[TokenView, Tensor, Any], Tensor]

RULES: dict[str, Rule] = {
    "weight": importance_weight,
    "reject": reject,
    "divergence": divergence,
    "second_moment": second_moment,
    "staleness": lambda view, log_weight, args: staleness_weight(view, args),
    "entropy_clip": lambda view, log_weight, args: entropy_clip(view, args),
    "vocabulary_clip": lambda view, log_weight, args: vocabulary_clip(view, args),
}
"""Rules by their kind in the configuration. Each takes a view, the log weight and its arguments."""


def correction(view: TokenView, anchor: Tensor, log_weight: Tensor, args: Piece, seed: str) -> Tensor:
    """Return the weight of each token by the rule ``args``, ``[tokens]``."""
    if isinstance(args, OffPolicySequenceMask):
        return off_policy_sequences(view, anchor, args)
    if isinstance(args, CovarianceClip):
        return covariance_clip(view, args, seed)
    if isinstance(args, PluginPiece):
        return plugin_weights(args, view)
    return RULES[args.kind](view, log_weight, args)


def corrections(
    view: TokenView, anchor: Tensor, rules: Sequence[Piece], *, bypass: bool, seed: str = ""
) -> Tensor | None:
    """Return the product of the weights of ``rules``, ``[tokens]``, without gradient; None without rules.

    Args:
        view: The tokens. If a rule compares tokens with each other, the view must hold the whole optimizer step.
        anchor: Logprobs in the denominator of the ratio, ``[tokens]``.
        rules: The corrections.
        bypass: Whether the anchor is the sampler, so that the weight compares the policy itself with the sampler.
        seed: Seed of the random draws.
    """
    if not rules:
        return None
    with torch.no_grad():
        log_weight = (view.logprob.detach() if bypass else anchor) - view.mu
        weight = torch.ones_like(log_weight)
        for number, args in enumerate(rules):
            weight = weight * correction(view, anchor, log_weight, args, f"{seed}/{number}")
    return weight
