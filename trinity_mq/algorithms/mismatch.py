"""The mismatch of engine and trainer logprobs: token sums that add up over micro-batches, and metrics of the sums.

The estimators of KL(sampler, policy) are k1 and k3 (http://joschu.net/blog/kl-approx.html). Chi-squared and effective
sample sizes are computed from the ratios ``pi / mu``. Log ratios of tokens and of whole sequences are limited to +-20.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trinity_mq.algorithms.view import TokenView, clamp_log_ratio, sequence_sums

AGES = {"age_0": (0, 0), "age_1_2": (1, 2), "age_3_7": (3, 7), "age_8": (8, None)}
"""Age groups of tokens by name: the first and the last staleness in train steps. None: no upper limit."""

Totals = Mapping[str, float]


def age_mask(staleness: Tensor, name: str) -> Tensor:
    """Return which tokens belong to the age group ``name`` of :data:`AGES`, bool ``[tokens]``."""
    first, last = AGES[name]
    return (staleness >= first) if last is None else (staleness >= first) & (staleness <= last)


@torch.no_grad()
def mismatch_sums(view: TokenView) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return scalar sums and maxima over the tokens of ``view``, the input of :func:`mismatch_metrics`.

    Args:
        view: Whole sequences, or their fresh tokens. Only ``logprob``, ``mu`` and ``segment`` are read.
    """
    if not view.tokens:
        return {}, {}
    policy, sampler = view.logprob.detach().double(), view.mu.double()  # variances are small differences of large sums
    change = clamp_log_ratio(policy - sampler)
    ratio, p, q = change.exp(), policy.exp(), sampler.exp()
    lengths, log_weights = sequence_sums(torch.ones_like(change), view), sequence_sums(change, view)
    weights = clamp_log_ratio(log_weights).exp()
    perplexity = sequence_sums(-policy, view) / lengths
    sums = {
        "tokens": torch.ones_like(change).sum(),
        "change": change.sum(),
        "k3": (ratio - 1 - change).sum(),
        "difference": (policy - sampler).abs().sum(),
        "ratio": ratio.sum(),
        "ratio_squares": ratio.square().sum(),
        "above_2": (ratio > 2).sum(),
        "below_half": (ratio < 0.5).sum(),
        "p": p.sum(),
        "q": q.sum(),
        "pp": p.square().sum(),
        "qq": q.square().sum(),
        "pq": (p * q).sum(),
        "sequences": torch.ones_like(lengths).sum(),
        "weights": weights.sum(),
        "weight_squares": weights.square().sum(),
        "log_perplexity": perplexity.sum(),
        "log_perplexity_difference": -(log_weights / lengths).sum(),
        "perplexity_ratio": (-log_weights / lengths).exp().sum(),
    }
    maxima = {"difference": (policy - sampler).abs().max(), "prob_difference": (p - q).abs().max()}
    return sums, maxima


@torch.no_grad()
def sums_by(view: TokenView, groups: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each group, the number of tokens ``tokens/<group>`` and the sum ``k3/<group>``, scalars.

    Args:
        view: The tokens.
        groups: Membership of each token by group name, bool ``[tokens]``.
    """
    change = clamp_log_ratio(view.logprob.detach() - view.mu)
    k3 = change.exp() - 1 - change
    sums: dict[str, Tensor] = {}
    for name, chosen in groups.items():
        sums[f"tokens/{name}"] = chosen.sum()
        sums[f"k3/{name}"] = torch.where(chosen, k3, 0.0).sum()
    return sums


def mismatch_metrics(sums: Totals, maxima: Totals) -> dict[str, float]:
    """Return the metrics ``mismatch/*`` of sums over micro-batches; empty without tokens."""
    if not sums.get("tokens"):
        return {}
    n, sequences = sums["tokens"], sums["sequences"]
    mean = {name: sums[name] / n for name in ("change", "k3", "difference", "above_2", "below_half")}
    covariance = sums["pq"] / n - sums["p"] * sums["q"] / n**2
    variances = (sums["pp"] / n - (sums["p"] / n) ** 2) * (sums["qq"] / n - (sums["q"] / n) ** 2)
    metrics = {
        "kl": -mean["change"],
        "k3": mean["k3"],
        "logprob_diff_mean": mean["difference"],
        "logprob_diff_max": maxima["difference"],
        "prob_diff_max": maxima["prob_difference"],
        "ess": sums["ratio"] ** 2 / (n * sums["ratio_squares"]),
        "ess_sequence": sums["weights"] ** 2 / (sequences * sums["weight_squares"]),
        "chi2": sums["ratio_squares"] / n - 1,
        "chi2_sequence": sums["weight_squares"] / sequences - 1,
        "above_2": mean["above_2"],
        "below_half": mean["below_half"],
        "log_perplexity": sums["log_perplexity"] / sequences,
        "log_perplexity_difference": sums["log_perplexity_difference"] / sequences,
        "perplexity_ratio": sums["perplexity_ratio"] / sequences,
    }
    if variances > 0:
        metrics["pearson"] = covariance / variances**0.5
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def metrics_by(sums: Totals) -> dict[str, float]:
    """Return ``mismatch/k3/<group>`` of the groups of :func:`sums_by` that have tokens."""
    metrics = {}
    for name, tokens in sums.items():
        if name.startswith("tokens/") and tokens:
            group = name.removeprefix("tokens/")
            metrics[f"mismatch/k3/{group}"] = sums[f"k3/{group}"] / tokens
    return metrics
