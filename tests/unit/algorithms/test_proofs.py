"""Exact statements about estimators: expectations by enumeration, and losses that must share a gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.vectors import with_step_weights
from trinity_mq.algorithms.evaluator import evaluate
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config.algorithm.pieces import LossConfig

VOCABULARY, LENGTH = 4, 3
ANSWERS = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
"""All 64 answers, ``[answers, tokens]``."""
CONTEXTS = 1 + VOCABULARY + VOCABULARY**2


def table(seed: int) -> Tensor:
    """Return the logits of a policy, float64 ``[contexts, vocabulary]``."""
    return torch.randn(CONTEXTS, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(logits: Tensor) -> Tensor:
    """Return the logprob of each token of every answer, ``[answers, tokens]``."""
    first, second = ANSWERS[:, 0], ANSWERS[:, 1]
    context = torch.stack([torch.zeros_like(first), 1 + first, 1 + VOCABULARY + VOCABULARY * first + second], 1)
    return logits.log_softmax(-1)[context, ANSWERS]


REWARDS = torch.rand(len(ANSWERS), dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def expected_gradient(shares: Tensor, sampler: Tensor, advantage: Tensor, answers: Tensor, **pieces: Any) -> Tensor:
    """Return the expected gradient of minus a loss, for answers that are drawn with probability ``shares``."""
    logits = table(1).requires_grad_()
    logprob, mu = logprobs(logits)[answers].flatten(), logprobs(sampler)[answers].flatten()
    view = TokenView(
        logprob=logprob,
        mu=mu,
        old=logprob.detach(),
        advantage=advantage.repeat_interleave(LENGTH),
        scale=shares.repeat_interleave(LENGTH),
        segment=torch.arange(len(answers)).repeat_interleave(LENGTH),
    )
    loss = evaluate({"rl": view}, LossConfig.model_validate(pieces), {"rl": 1.0}).loss
    (gradient,) = torch.autograd.grad(-loss, logits)
    return gradient


def exact_gradient() -> Tensor:
    logits = table(1).requires_grad_()
    (gradient,) = torch.autograd.grad((logprobs(logits).sum(1).exp() * REWARDS).sum(), logits)
    return gradient


PRODUCT = {"kind": "sequence_product"}
WHOLE = [{"kind": "weight", "level": "sequence", "high": None}]
UNBIASED: dict[str, dict[str, Any]] = {
    "the ratio of the answer": {"ratio": PRODUCT, "surrogate": {"kind": "linear"}},
    "the ratio as a constant": {"ratio": PRODUCT, "surrogate": {"kind": "truncate", "cap": 1e9}},
    "a weight beside log p": {"surrogate": {"kind": "log_linear"}, "correction": WHOLE},
    "a weight beside a clip": {"anchor": "old", "correction": WHOLE},
}


def tokens_share(name: str) -> float:
    """Return what a token counts: every token of an answer has the loss of the whole where the ratio is its."""
    return 1 / LENGTH if UNBIASED.get(name, {}).get("surrogate") == {"kind": "linear"} else 1.0


@pytest.mark.parametrize("name", UNBIASED)
def test_importance_sampling_of_answers_is_unbiased(name: str) -> None:
    sampler = table(2)
    shares = logprobs(sampler).sum(1).exp() * tokens_share(name)
    found = expected_gradient(shares, sampler, REWARDS, torch.arange(len(ANSWERS)), **UNBIASED[name])
    torch.testing.assert_close(found, exact_gradient(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("own", "factor"), [(False, 1.0), (True, 0.5)])
def test_a_baseline_of_the_others_is_unbiased_and_the_mean_of_all_shrinks(own: bool, factor: float) -> None:
    """Over all pairs of answers: a mean over ``n`` runs that holds the own one gives ``(n - 1) / n``."""
    sampler = table(2)
    pairs = torch.cartesian_prod(torch.arange(len(ANSWERS)), torch.arange(len(ANSWERS)))
    first, second = REWARDS[pairs[:, 0]], REWARDS[pairs[:, 1]]
    baseline = (first + second) / 2 if own else second
    shares = logprobs(sampler).sum(1).exp()[pairs].prod(1) / LENGTH
    pieces = UNBIASED["the ratio of the answer"]
    found = expected_gradient(shares, sampler, first - baseline, pairs[:, 0], **pieces)
    torch.testing.assert_close(found, factor * exact_gradient(), rtol=1e-10, atol=1e-10)


def random_view(spread: float) -> TokenView:
    """Return four sequences whose policy is ``spread`` nats from the sampler."""
    draw = torch.Generator().manual_seed(3)
    segment = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    mu = -torch.rand(10, dtype=torch.float64, generator=draw) - 0.1
    logprob = mu + spread * torch.randn(10, dtype=torch.float64, generator=draw)
    advantage = torch.tensor([1.2, -0.7, 0.5, -1.0], dtype=torch.float64)[segment]
    scale = torch.rand(10, dtype=torch.float64, generator=draw)
    leaf = logprob.requires_grad_()
    return TokenView(logprob=leaf, mu=mu, old=leaf.detach(), advantage=advantage, scale=scale, segment=segment)


def gradient(view: TokenView, **pieces: Any) -> Tensor:
    config = LossConfig.model_validate(pieces)
    view = with_step_weights(view, config)
    (found,) = torch.autograd.grad(evaluate({"rl": view}, config, {"rl": 1.0}).loss, view.logprob)
    return found


def test_a_truncated_ratio_and_the_tokens_that_a_clip_keeps_have_ppos_gradient() -> None:
    plain = gradient(random_view(0.5), surrogate={"kind": "clip", "low": 0.2, "high": 0.2, "dual": None})
    kept = {"kind": "log_linear", "keep": "one_side", "weight": "ratio"}
    torch.testing.assert_close(gradient(random_view(0.5), surrogate=kept), plain, rtol=1e-12, atol=1e-12)
    assert 0 < int((plain == 0).sum()) < len(plain)


def test_both_forms_of_a_sequences_ratio_have_one_gradient() -> None:
    """Where a sequence's tokens share advantage and scale (GSPO, arXiv 2507.18071, equations 7 and 14)."""
    view = random_view(0.1)
    view = replace(view, scale=view.scale[view.segment])
    token = gradient(view, ratio={"kind": "sequence"})
    torch.testing.assert_close(token, gradient(view, ratio={"kind": "sequence_mean"}), rtol=1e-12, atol=1e-12)
