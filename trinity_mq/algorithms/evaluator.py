"""The evaluator computes the value of a composed loss for the tokens of one micro-batch.

``loss = sum_c weight_c sum_t loss_ct scale_t`` over components ``c`` and their tokens ``t``. For sampled tokens
(``rl``) ``loss_ct`` is ``surrogate(ratio, A) w + kl + regularisers - entropy``; the other components have losses of
their own. The scale comes from counts of the whole optimizer step (reduction.py), so losses of micro-batches and ranks
only need to be summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from trinity_mq.algorithms.corrections import corrections
from trinity_mq.algorithms.mismatch import AGES, age_mask
from trinity_mq.algorithms.plugins import has_classes, is_class
from trinity_mq.algorithms.regularisers import reference_kl, regulariser
from trinity_mq.algorithms.surrogates import likelihood, surrogate
from trinity_mq.algorithms.view import TokenView, clamp_log_ratio, segment_means, segment_sums, sequence_sums
from trinity_mq.config.algorithm.pieces import (
    OVER_STEP,
    Anchor,
    GeometricRatio,
    ImportanceWeight,
    LossConfig,
    Pair,
    Piece,
    Schedule,
)


@dataclass(frozen=True)
class LossTerms:
    """A loss and its statistics."""

    loss: Tensor
    """Reduced loss, a scalar with gradient. The sum over micro-batches is the loss of the optimizer step."""
    reduced: dict[str, Tensor] = field(default_factory=dict)
    """Scalars reduced like the loss; their sums over micro-batches are metrics."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Scalars summed over tokens (``masked_sequences``: over sequences);
    :func:`trinity_mq.training.update.step_metrics` divides them by the counts of the optimizer step."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)


def needs_whole_step(rule: Piece) -> bool:
    """Return whether a correction needs all tokens of the optimizer step at once."""
    return isinstance(rule, OVER_STEP) or (isinstance(rule, ImportanceWeight) and rule.over_step)


def step_weights(view: TokenView, config: LossConfig, seed: str) -> Tensor | None:
    """Return the product of the corrections that compare the tokens of an optimizer step, ``[tokens]``; None without
    such corrections.

    Args:
        view: All tokens of the optimizer step, with the logprobs of the policy before the step.
        config: Loss with the corrections.
        seed: Seed of the random draws.
    """
    anchor = anchor_logprob(view, config.anchor)
    rules = [rule for rule in config.correction if needs_whole_step(rule)]
    return corrections(view, anchor, rules, bypass=config.anchor == "mu", seed=seed)


def component_weights(config: LossConfig, step: int) -> dict[str, float]:
    """Return the weight of each component in train step ``step`` (from 1); components with weight 0 are omitted."""
    weights = config.weights.model_dump()
    if config.ce_schedule is not None:
        share = schedule_value(config.ce_schedule, step)
        weights |= {"rl": 1 - share, "ce": share}
    return {name: weight for name, weight in weights.items() if weight}


def schedule_value(schedule: Schedule, step: int) -> float:
    """Return the value of a schedule at train step ``step``: ``peak step / warmup`` until the end of the warm-up, then
    ``valley + (peak - valley) (1 + cos(pi x)) / 2`` with ``x`` from 0 to 1 over ``decay_steps`` (arXiv 2508.11408).
    Without ``decay_steps`` it stays at ``peak``.
    """
    if step < schedule.warmup_steps:
        return schedule.peak * step / schedule.warmup_steps
    if not schedule.decay_steps:
        return schedule.peak
    if step >= schedule.warmup_steps + schedule.decay_steps:
        return schedule.valley
    passed = (step - schedule.warmup_steps) / schedule.decay_steps
    return schedule.valley + (schedule.peak - schedule.valley) * (1 + math.cos(math.pi * passed)) / 2


def evaluate(
    views: Mapping[str, TokenView], config: LossConfig, weights: Mapping[str, float], *, entropy_coef: float = 0.0
) -> LossTerms:
    """Return the loss of the components' tokens.

    Args:
        views: Tokens by component. Components without tokens or without weight are skipped.
        config: Configuration of the loss.
        weights: Weights by component, see :func:`component_weights`.
        entropy_coef: Weight of the entropy bonus of ``rl``.

    Raises:
        ValueError: A name in ``views`` is not a component, no component has both tokens and a weight, or
            :func:`class_losses` was not called for a loss with a class.
    """
    weighted_terms: list[tuple[float, LossTerms]] = []
    is_whole_loss = is_class(config.surrogate)
    for name, view in views.items():
        weight = weights.get(name, 0.0)
        if not weight or not view.tokens:
            continue
        match name:
            case "rl":
                weighted_terms.append((weight, policy_terms(view, config, entropy_coef)))
            case "ce" | "ref_kl" | "pair" if is_whole_loss:  # the class computes the loss of all tokens
                weighted_terms.append((1.0, LossTerms((0 * view.logprob).sum())))
            case "ce":
                loss = (likelihood(view.logprob, config.imitation).loss * view.scale).sum()
                weighted_terms.append((weight, LossTerms(loss, {"ce_loss": loss.detach()})))
            case "ref_kl":
                weighted_terms.append((weight, distillation_terms(view, config)))
            case "pair":
                weighted_terms.append((weight, pair_terms(view, config)))
            case _:
                raise ValueError(f"{name!r} is not a component, wanted rl, ce, ref_kl or pair")
    if has_classes(config):
        weighted_terms += [(1.0, LossTerms(loss)) for loss in _class_parts(views, weights)]
    if not weighted_terms:
        raise ValueError(f"no tokens in {sorted(views)} for components {sorted(weights)}")
    total = sum(
        (weight * terms.loss for weight, terms in weighted_terms[1:]),
        start=weighted_terms[0][0] * weighted_terms[0][1].loss,
    )
    return LossTerms(
        total,
        {name: value for _, terms in weighted_terms for name, value in terms.reduced.items()},
        {name: value for _, terms in weighted_terms for name, value in terms.sums.items()},
        {name: value for _, terms in weighted_terms for name, value in terms.maxima.items()},
        {name: value for _, terms in weighted_terms for name, value in terms.minima.items()},
    )


def _class_parts(views: Mapping[str, TokenView], weights: Mapping[str, float]) -> list[Tensor]:
    """Return the part of the loss that the user's classes compute, a scalar for each distinct view: the sum of the
    column ``level``, with the gradient in the columns ``slope`` and ``entropy_slope``.
    """
    by_role = {id(view): view for name, view in views.items() if weights.get(name) and view.tokens}
    parts = []
    for view in by_role.values():
        if view.slope is None or view.level is None:
            raise ValueError("the loss has a class, and the tokens have no slope of it; call class_losses() before")
        part = view.level + view.slope * (view.logprob - view.logprob.detach())
        if view.entropy is not None and view.entropy_slope is not None:
            part = part + view.entropy_slope * (view.entropy - view.entropy.detach())
        parts.append(part.sum())
    return parts


def token_losses(view: TokenView, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return surrogate times corrections of each token, ``[tokens]``, and columns whose sums are statistics,
    ``[tokens]`` each: the surrogate's counts, and with a correction the left-out tokens and the weights.
    """
    anchor = anchor_logprob(view, config.anchor)
    ratio = log_ratio(view, anchor, config.ratio)
    token_loss = surrogate(ratio, view.logprob, view.advantage, config.surrogate, view.custom)
    local = [rule for rule in config.correction if not needs_whole_step(rule)]
    weight = corrections(view, anchor, local, bypass=config.anchor == "mu")
    if view.weight is not None:
        weight = view.weight if weight is None else weight * view.weight
    counts: dict[str, Tensor] = dict(token_loss.counts)
    loss = token_loss.loss
    if weight is not None:
        # torch.where instead of a product, because the loss of an excluded token may be infinite
        loss = torch.where(weight > 0, loss * weight, 0.0)
        out = weight == 0
        counts |= {"masked_frac": out, "masked_frac_pos": out & (view.advantage > 0)}
        counts |= {"masked_frac_neg": out & (view.advantage < 0), "correction_weight": weight}
    return loss, counts


def policy_terms(view: TokenView, config: LossConfig, entropy_coef: float = 0.0) -> LossTerms:
    """Return the loss of sampled tokens; see the module docstring. Terms that a class of the user computes are left
    out.

    Sums are ``ppo_kl`` and ``ppo_kl_k3`` (estimators k1 and k3 of KL(anchor, policy) in nats,
    http://joschu.net/blog/kl-approx.html), ``ratio_mean``, ``ratio_squares``, and the counts of surrogate and
    corrections. With a correction they also include ``masked_sequences``, the number of sequences without a remaining
    token, and ``masked_frac`` for each age group of the tokens. Maxima are ``ratio_max`` and, with a correction,
    ``correction_weight_max``; the minimum is ``ratio_min``.
    """
    if is_class(config.surrogate):
        loss, counts, reduced = 0 * view.logprob, dict[str, Tensor](), dict[str, Tensor]()
    else:
        loss, counts = token_losses(view, config)
        reduced = {"pg_loss": (loss.detach() * view.scale).sum()}
    anchor = anchor_logprob(view, config.anchor)
    if config.kl is not None and config.kl.coef:
        kl = reference_kl(view, anchor, config.kl)
        loss = loss + config.kl.coef * kl
        reduced["kl_loss"] = config.kl.coef * (kl.detach() * view.scale).sum()
    for term in config.regularisers:
        loss = loss + regulariser(view, anchor, term)
    if view.entropy is not None and config.entropy_loss is None:
        reduced["entropy_loss"] = -(entropy_coef * view.entropy.detach() * view.scale).sum()
        loss = loss - entropy_coef * view.entropy if entropy_coef else loss
    with torch.no_grad():
        change = clamp_log_ratio(view.logprob - anchor)
        ratio = change.exp()
        sums = {name: count.sum() for name, count in counts.items()}
        sums |= {"ppo_kl": -change.sum(), "ppo_kl_k3": (ratio - 1 - change).sum(), "ratio_mean": ratio.sum()}
        sums["ratio_squares"] = ratio.square().sum()
        maxima = {"ratio_max": ratio.max()}
        if "masked_frac" in counts:
            sums["masked_sequences"] = _sequences_without(~counts["masked_frac"], view)
            maxima["correction_weight_max"] = counts["correction_weight"].max()
        if view.staleness is not None and "masked_frac" in counts:
            for age in AGES:
                sums[f"masked_frac/{age}"] = (counts["masked_frac"] & age_mask(view.staleness, age)).sum()
    return LossTerms((loss * view.scale).sum(), reduced, sums, maxima, {"ratio_min": ratio.min()})


def _sequences_without(keep: Tensor, view: TokenView) -> Tensor:
    """Return the number of sequences without a token in ``keep``, bool ``[tokens]``; a scalar."""
    share = segment_means(keep.to(view.mu.dtype), view)
    return ((share == 0) / segment_sums(torch.ones_like(share), view)).sum()


def distillation_terms(view: TokenView, config: LossConfig) -> LossTerms:
    """Return the loss that moves the policy towards a teacher on sampled tokens; see :class:`Distill`. Its reduced term
    ``ref_kl`` is the k1 estimate of KL(policy, teacher) in nats.
    """
    assert view.teacher is not None
    args = config.distillation
    signal = view.teacher - view.logprob.detach()
    change = clamp_log_ratio(view.logprob - view.mu)
    fell = view.mu.exp() - view.logprob.detach().exp() > args.bound
    loss = torch.where(fell, 0.0, -signal * change.exp()) + args.square * change.square()
    return LossTerms((loss * view.scale).sum(), {"ref_kl": -(signal * view.scale).sum()}, {"ref_kl_masked": fell.sum()})


def pair_terms(view: TokenView, config: LossConfig) -> LossTerms:
    """Return the loss of pairs, see :func:`pair_loss`. A pair has the scale of its chosen answer's tokens."""
    losses, sums = pair_loss(view, config.pair)
    scale = view.scale[view.first][::2]
    loss = (losses * scale).sum()
    shares = {f"pair_{name}": value * scale[0] for name, value in sums.items()}
    return LossTerms(loss, {"pair_loss": loss.detach(), **shares})


def pair_loss(view: TokenView, args: Pair) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, ``[pairs]``, and sums over pairs.

    DPO (arXiv 2305.18290, equation 7) with label smoothing is ``-(1 - s) log sigmoid(z) - s log sigmoid(-z)``. Here
    ``z`` is ``beta`` times the difference of ``sum_t log(pi / ref)`` between the chosen and the rejected answer. IPO
    (arXiv 2310.12036) is ``(m - 1 / (2 beta))^2`` with the difference ``m`` of the means over tokens.

    Args:
        view: Tokens of the pairs: segments 0 and 1 are the chosen and the rejected answer of pair 0, and so on.
        args: Form and parameters of the loss.

    Returns:
        The losses; sums ``chosen_reward`` and ``rejected_reward`` (``beta`` times the log ratio), ``accuracy``,
        ``margin``.
    """
    assert view.ref is not None
    if view.segments % 2:
        raise ValueError(f"{view.segments} sequences, wanted a chosen and a rejected sequence of each pair")
    log_ratio = view.logprob - view.ref
    sums = sequence_sums(log_ratio, view)
    if args.form == "ipo":
        means = sums / sequence_sums(torch.ones_like(log_ratio), view)
        losses = (means[::2] - means[1::2] - 1 / (2 * args.beta)).square()
    else:
        margin = args.beta * (sums[::2] - sums[1::2])
        losses = -(1 - args.label_smoothing) * logsigmoid(margin) - args.label_smoothing * logsigmoid(-margin)
    chosen, rejected = args.beta * sums[::2].detach(), args.beta * sums[1::2].detach()
    return losses, {
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
    }


def anchor_logprob(view: TokenView, anchor: Anchor) -> Tensor:
    """Return the logprob in the denominator of the ratio, ``[tokens]``, without gradient.

    ``mu`` is the logprob of the sampler, and ``old`` the logprob of the policy at the start of the train step.
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
