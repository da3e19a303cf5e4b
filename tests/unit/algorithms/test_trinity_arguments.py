"""Arguments in the names of Trinity-RFT reach the loss: its gradient is that of the formula, computed by numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trinity_mq.algorithms.evaluator import component_weights, evaluate, step_weights
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm import AlgorithmConfig

Numbers = npt.NDArray[np.float64]


class Tokens:
    """Eight tokens of three answers."""

    logprob = np.array([-0.5, -1.2, -0.05, -2.0, -0.7, -0.9, -0.3, -1.6])
    sampler = np.array([-0.7, -1.0, -0.06, -1.2, -0.2, -0.95, -1.4, -1.5])
    reference = np.array([-0.6, -1.1, -0.1, -1.9, -0.9, -0.8, -0.35, -1.4])
    advantage = np.array([0.8, 0.8, 0.8, -1.1, -1.1, -1.1, 0.3, 0.3])
    sequence = np.array([0, 0, 0, 1, 1, 1, 2, 2])
    change = logprob - sampler
    ratio = np.exp(change)
    sequence_ratio = np.exp(np.array([change[:3].mean(), change[3:6].mean(), change[6:].mean()]))[sequence]
    by_token = np.full(8, 1 / 8)
    by_sequence = np.array([1 / 9] * 6 + [1 / 6] * 2)


tokens = Tokens()


def gradient(settings: Mapping[str, Any], scale: Numbers, experts: int = 0) -> Numbers:
    """Return the gradient of the loss by the logprob of each token; the last ``experts`` sequences are imitated."""
    config = AlgorithmConfig.model_validate(settings)
    logprob = torch.tensor(tokens.logprob, requires_grad=True)
    view = TokenView(
        logprob=logprob,
        segment=torch.tensor(tokens.sequence),
        entropy=-logprob,
        mu=torch.tensor(tokens.sampler),
        ref=torch.tensor(tokens.reference),
        advantage=torch.tensor(tokens.advantage),
        scale=torch.tensor(scale),
    )
    is_expert = torch.tensor(tokens.sequence >= 3 - experts)
    weights = component_weights(config, 1)
    parts = {"rl": view.where(~is_expert), "ce": view.where(is_expert)} if experts else dict.fromkeys(weights, view)
    views = {name: replace(part, weight=step_weights(part, config, "")) for name, part in parts.items()}
    (found,) = torch.autograd.grad(evaluate(views, config, weights, entropy_coef=config.entropy_coef).loss, logprob)
    return np.asarray(found.numpy(), dtype=np.float64)


def loss_of(name: str, **arguments: Any) -> dict[str, Any]:
    return {"algorithm_type": "grpo", "policy_loss_fn": name, "policy_loss_fn_args": arguments}


def clipped(low: float, high: float, dual: float = 3.0) -> Numbers:
    """Return ``-A r``, and 0 where the range or the dual clip cut it (arXiv 1707.06347, 1912.09729)."""
    cut = ((tokens.advantage > 0) & (tokens.ratio > 1 + high)) | ((tokens.advantage < 0) & (tokens.ratio < 1 - low))
    cut |= (tokens.advantage < 0) & (tokens.ratio > dual)
    return np.where(cut, 0.0, -tokens.advantage * tokens.ratio)


def one_side(ratio: Numbers, low: float, high: float) -> npt.NDArray[np.bool_]:
    return ((tokens.advantage >= 0) & (ratio <= 1 + high)) | ((tokens.advantage <= 0) & (ratio >= 1 - low))


def gate(positive: float, negative: float) -> Numbers:
    """Return the derivative of ``-A 4/tau sigmoid(tau (r - 1))`` by ``log r`` (arXiv 2511.20347)."""
    tau = np.where(tokens.advantage > 0, positive, negative)
    share = 1 / (1 + np.exp(-tau * (tokens.ratio - 1)))
    slope: Numbers = -tokens.advantage * 4 * share * (1 - share) * tokens.ratio
    return slope


def second_moment(bound: float) -> Numbers:
    """Return ``-A r`` over the tokens that arXiv 2510.01161 keeps, token by token."""
    active = [place for place in range(8) if tokens.advantage[place] * tokens.change[place] > 0]
    kept = sorted(active, key=lambda place: tokens.change[place] ** 2)
    while kept and np.mean([tokens.change[place] ** 2 for place in kept]) > bound:
        kept.pop()
    out = [place in active and place not in kept for place in range(8)]
    return np.where(out, 0.0, -tokens.advantage * tokens.ratio)


IN_RING = (
    ((tokens.ratio >= 0.9) & (tokens.ratio <= 1.1))
    | ((tokens.advantage >= 0) & (tokens.ratio <= 0.85))
    | ((tokens.advantage <= 0) & (tokens.ratio >= 1.2))
)

CASES: dict[str, tuple[dict[str, Any], Callable[[], Numbers]]] = {
    "ppo": (loss_of("ppo", clip_range=0.1), lambda: clipped(0.1, 0.1)),
    "ppo, two bounds": (loss_of("ppo", clip_range_low=0.5, clip_range_high=0.1), lambda: clipped(0.5, 0.1)),
    "ppo, dual clip": (loss_of("ppo", clip_range=0.2, clip_ratio_c=1.01), lambda: clipped(0.2, 0.2, 1.01)),
    "ppo, sequence mask": (
        loss_of("ppo", clip_range=0.2, enable_sequence_masking=True, delta_sequence_masking=0.1),
        lambda: np.where((tokens.advantage < 0) & (np.log(tokens.sequence_ratio) < -0.1), 0.0, clipped(0.2, 0.2)),
    ),
    "ppo, no ratio": (loss_of("ppo", fallback_to_policy_gradient=True), lambda: -tokens.advantage),
    "importance_sampling": (loss_of("importance_sampling"), lambda: -tokens.advantage * tokens.ratio),
    "opmd": (loss_of("opmd", tau=0.5), lambda: -tokens.advantage / 1.5),
    "opmd, tau 0": (loss_of("opmd", tau=0), lambda: -tokens.advantage),
    "cispo": (
        loss_of("cispo", clip_range_low=0.2, clip_range_high=0.1),
        lambda: -tokens.advantage * np.clip(tokens.ratio, 0.8, 1.1),
    ),
    "cispo, mask": (
        loss_of("cispo", enable_mask_clip=True, mask_clip_range_low=0.3, mask_clip_range_high=0.15),
        lambda: np.where(one_side(tokens.ratio, 0.3, 0.15), -tokens.advantage * np.clip(tokens.ratio, 0, 1.28), 0.0),
    ),
    "topr": (
        loss_of("topr", advantage_threshold=0.5),
        lambda: -tokens.advantage * np.where(tokens.advantage > 0.5, 1.0, np.clip(tokens.ratio, 0, 1)),
    ),
    "sppo": (
        loss_of("sppo", epsilon=0.25),
        lambda: np.where((tokens.ratio >= 0.8) & (tokens.ratio <= 1.25), -tokens.advantage, 0.0),
    ),
    "sapo": (loss_of("sapo", tau_pos=0.7, tau_neg=1.4, loss_agg_mode="token-mean"), lambda: gate(0.7, 1.4)),
    "m2po": (loss_of("m2po", m2_threshold=0.1), lambda: second_moment(0.1)),
    "rec, one side": (
        loss_of("rec", clip_mode="one-side", weight="none", epsilon_low=0.3, epsilon_high=0.1),
        lambda: np.where(one_side(tokens.ratio, 0.3, 0.1), -tokens.advantage, 0.0),
    ),
    "rec, ratio": (
        loss_of("rec", clip_mode="two-side", weight="importance_sampling", epsilon_low=0.3, epsilon_high=0.3),
        lambda: np.where((tokens.ratio >= 0.7) & (tokens.ratio <= 1.3), -tokens.advantage * tokens.ratio, 0.0),
    ),
    "rec, ring": (
        loss_of(
            "rec", clip_mode="ring", weight="none", epsilon_low=0.1, epsilon_high=0.1, epsilon_low_prime=0.15,
            epsilon_high_prime=0.2,
        ),
        lambda: np.where(IN_RING, -tokens.advantage, 0.0),
    ),
    "rec, advantage and square": (
        loss_of("rec", clip_mode="none", weight="advantage", temp=0.5, regularizer="k2", regularizer_coef=0.1),
        lambda: -tokens.advantage * np.exp(tokens.advantage / 0.5) + 2 * 0.1 * tokens.change,
    ),
    "rec, forward KL": (
        loss_of("rec", clip_mode="none", weight="none", regularizer="forward-kl", regularizer_coef=0.1),
        lambda: -tokens.advantage - 0.1,
    ),
    "rec, distillation of old data": (
        loss_of("rec", clip_mode="none", weight="none", fix_opd_advantage=True),
        lambda: -(tokens.advantage + tokens.sampler - tokens.logprob),
    ),
    "sft_is": ({"algorithm_type": "sft_is"}, lambda: -np.exp(tokens.logprob)),
    "sft_phi": (
        {"algorithm_type": "sft_phi", "policy_loss_fn_args": {"cutoff_prob": 0.5}},
        lambda: np.where(tokens.logprob > np.log(0.5), 0.0, -np.exp(tokens.logprob) * (1 - np.exp(tokens.logprob))),
    ),
    "KL": (
        {"kl_loss_fn_args": {"kl_coef": 0.3}, "policy_loss_fn": "ppo"},
        lambda: clipped(0.2, 0.2) + 0.3 * (tokens.logprob - tokens.reference),
    ),
    "entropy, here minus the logprob": (
        {"entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": 0.2}, "policy_loss_fn": "ppo"},
        lambda: clipped(0.2, 0.2) + 0.2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    settings, formula = CASES[name]
    np.testing.assert_allclose(gradient(settings, tokens.by_token), formula() * tokens.by_token, rtol=1e-9, atol=1e-12)


def test_a_ratio_of_the_sequence_has_its_own_reduction() -> None:
    """``gspo-one-side``: range and weight have the ratio of the answer, and the mean is over answers."""
    settings = loss_of(
        "rec", clip_mode="gspo-one-side", weight="gspo_importance_sampling", epsilon_low=0.05, epsilon_high=0.2
    )
    assert AlgorithmConfig.model_validate(settings).reduction.kind == "sequence"
    wanted = np.where(one_side(tokens.sequence_ratio, 0.05, 0.2), -tokens.advantage * tokens.sequence_ratio, 0.0)
    assert 0 < np.count_nonzero(wanted) < 8
    np.testing.assert_allclose(gradient(settings, tokens.by_sequence), wanted * tokens.by_sequence, rtol=1e-9)


def test_a_mixture_weighs_its_parts_and_not_the_terms_beside_it() -> None:
    """``(1 - mu) clip + mu sft + kl - entropy``, each over its own tokens."""
    settings = {
        "algorithm_type": "mix",
        "policy_loss_fn_args": {"mu": 0.4, "clip_range": 0.1},
        "kl_loss_fn": "k2",
        "kl_loss_fn_args": {"kl_coef": 0.3},
        "entropy_loss_fn": "mix",
        "entropy_loss_fn_args": {"entropy_coef": 0.2},
    }
    scale = np.array([1 / 6] * 6 + [1 / 2] * 2)
    sampled = 0.6 * clipped(0.1, 0.1) + 0.3 * (tokens.logprob - tokens.reference) + 0.2
    wanted = np.where(tokens.sequence == 2, -0.4, sampled) * scale
    np.testing.assert_allclose(gradient(settings, scale, experts=1), wanted, rtol=1e-9)
