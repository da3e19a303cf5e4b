"""Presets beside the losses of TRL and of the paper's code, and their learning rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trinity_mq.algorithms.evaluator import policy_terms
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig, load_config
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
