"""Exact statements: presets beside the losses of others, expectations by enumeration, losses that share a gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.vectors import with_step_weights
from trinity_mq.algorithms.evaluator import evaluate, policy_terms
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig, load_config
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.section import OptimizerConfig

LONGEST = 8
"""``model.max_response_tokens``."""
MASK = torch.tensor([[place < length for place in range(LONGEST)] for length in (5, 3, 1, 4)])
ADVANTAGES = torch.tensor([0.5, -0.25, -0.75, 0.5])
SAMPLER = torch.full(MASK.shape, -1.0)
LOG_RATIOS = torch.tensor([0.05, -0.3, 0.4, 0.01]).repeat(4, 2)
"""Some within the clip and some beyond it, by token."""
SURE = {"sft", "cpt", "raft", "sft_is", "sft_phi"}
PAIRS = {"dpo", "ipo_pref"}


def gradient(algorithm: dict[str, Any], log_ratios: Tensor = LOG_RATIOS, copies: int = 1) -> Tensor:
    """Return the gradient of an algorithm's loss by the logprobs of a batch's answers, each there ``copies`` times."""
    config = load_config({"model": {"tiny": {}, "max_response_tokens": LONGEST}, "algorithm": {"kl": None} | algorithm})
    mask = MASK.repeat(copies, 1)
    counts = mask.sum(1)
    logprob = (SAMPLER + log_ratios).repeat(copies, 1).requires_grad_()
    scales = sequence_scales(counts.numpy(), np.arange(len(mask)), config.reduction)
    view = TokenView(
        logprob=logprob[mask],
        mu=SAMPLER.repeat(copies, 1)[mask],
        advantage=ADVANTAGES.repeat(copies).repeat_interleave(counts),
        scale=torch.from_numpy(scales).float().repeat_interleave(counts),
        segment=torch.arange(len(mask)).repeat_interleave(counts),
    )
    (found,) = torch.autograd.grad(policy_terms(view, config.algorithm).loss, logprob)
    return found


def expected(loss: Any) -> Tensor:
    """Return the gradient of ``loss``, a function of the log ratios, by the logprobs."""
    log_ratios = LOG_RATIOS.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(log_ratios), log_ratios)
    return found


def clipped(ratio: Tensor, advantage: Tensor) -> Tensor:
    return torch.max(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)


def test_dr_grpo_divides_by_answers_and_longest_answer_as_trl_and_the_papers_code_do() -> None:
    """TRL, loss_type dr_grpo: the masked sum over ``per_token_loss.size(0) * max_completion_length``; the paper's code:
    the mean over answers of masked sums with a constant normalizer.
    """
    losses = lambda ratios: torch.where(MASK, clipped(ratios.exp(), ADVANTAGES[:, None]), 0.0)  # noqa: E731
    found = gradient({"algorithm_type": "dr_grpo"})
    torch.testing.assert_close(found, expected(lambda ratios: losses(ratios).sum() / (4 * LONGEST)))
    torch.testing.assert_close(found, expected(lambda ratios: (losses(ratios).sum(1) / LONGEST).mean()))
    fresh = gradient({"algorithm_type": "dr_grpo"}, torch.zeros(MASK.shape))
    torch.testing.assert_close(fresh[:, 0], torch.tensor([-0.015625, 0.0078125, 0.0234375, -0.015625]))


def test_rloo_becomes_that_of_trl_with_the_pieces_it_names() -> None:
    def of_trl(log_ratios: Tensor) -> Tensor:
        return clipped((log_ratios * MASK).sum(1).exp(), ADVANTAGES).mean()

    pieces = {"ratio": {"kind": "sequence_product"}, "surrogate": {"dual": None}, "reduction": {"kind": "sequence"}}
    torch.testing.assert_close(gradient({"algorithm_type": "rloo", **pieces}), expected(of_trl))
    for piece in ("ratio: {kind: sequence_product}", "surrogate: {dual: null}", "reduction: {kind: sequence}"):
        assert piece in PRESETS["rloo"].differs


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_has_the_rate_of_its_kind_of_loss(name: str) -> None:
    wanted = 2e-5 if name in SURE else 5e-6 if name in PAIRS else 1e-6
    assert AlgorithmConfig(algorithm_type=name).optimizer.lr == wanted


def test_the_rate_that_is_said_wins_over_the_presets() -> None:
    data = {"model": {"tiny": {}}, "algorithm": {"algorithm_type": "sft", "optimizer": {"lr_warmup_steps": 3}}}
    found = load_config(data).algorithm.optimizer
    assert (found.lr, found.lr_warmup_steps) == (2e-5, 3)
    assert load_config(data, ["algorithm.optimizer.lr=1e-6"]).algorithm.optimizer.lr == 1e-6
    assert AlgorithmConfig(algorithm_type="sft", optimizer=OptimizerConfig(lr=1e-6)).optimizer.lr == 1e-6
    assert AlgorithmConfig(algorithm_type="sft", optimizer=OptimizerConfig(betas=(0.9, 0.9))).optimizer.lr == 2e-5
    resolved = AlgorithmConfig(algorithm_type="dpo", optimizer=OptimizerConfig(lr=3e-4))
    assert AlgorithmConfig.model_validate(resolved.model_dump()).optimizer.lr == 3e-4


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
    (slope,) = torch.autograd.grad(-loss, logits)
    return slope


def exact_gradient() -> Tensor:
    logits = table(1).requires_grad_()
    (slope,) = torch.autograd.grad((logprobs(logits).sum(1).exp() * REWARDS).sum(), logits)
    return slope


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


def slope(view: TokenView, **pieces: Any) -> Tensor:
    config = LossConfig.model_validate(pieces)
    view = with_step_weights(view, config)
    (found,) = torch.autograd.grad(evaluate({"rl": view}, config, {"rl": 1.0}).loss, view.logprob)
    return found


def test_a_truncated_ratio_and_the_tokens_that_a_clip_keeps_have_ppos_gradient() -> None:
    plain = slope(random_view(0.5), surrogate={"kind": "clip", "low": 0.2, "high": 0.2, "dual": None})
    kept = {"kind": "log_linear", "keep": "one_side", "weight": "ratio"}
    torch.testing.assert_close(slope(random_view(0.5), surrogate=kept), plain, rtol=1e-12, atol=1e-12)
    assert 0 < int((plain == 0).sum()) < len(plain)


def test_both_forms_of_a_sequences_ratio_have_one_gradient() -> None:
    """Where a sequence's tokens share advantage and scale (GSPO, arXiv 2507.18071, equations 7 and 14)."""
    view = random_view(0.1)
    view = replace(view, scale=view.scale[view.segment])
    token = slope(view, ratio={"kind": "sequence"})
    torch.testing.assert_close(token, slope(view, ratio={"kind": "sequence_mean"}), rtol=1e-12, atol=1e-12)
