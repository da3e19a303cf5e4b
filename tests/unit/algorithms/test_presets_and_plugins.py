"""Surrogates and corrections of the user's own: what they are called with, and what is said of a wrong one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.vectors import Case
from trinity_mq.algorithms.evaluator import evaluate, policy_terms
from trinity_mq.algorithms.plugins import PluginError, load_plugins
from trinity_mq.algorithms.reduction import sequence_scales
from trinity_mq.algorithms.view import TokenView
from trinity_mq.config import AlgorithmConfig, load_config
from trinity_mq.config.algorithm.pieces import LossConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.section import OptimizerConfig
from trinity_mq.runtime.plugins import UnknownNameError


def plain(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, factor: float = 1.0) -> Tensor:
    return -factor * advantage * log_ratio.exp()


def of_a_field(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, *, grade: Tensor) -> Tensor:
    return -grade * advantage * logprob


def of_two(log_ratio: Tensor, logprob: Tensor) -> Tensor:
    return log_ratio + logprob


def summed(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage * logprob).sum()


def doubled(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage * logprob).float()


def detached(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * log_ratio.detach()


def divided(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * logprob / torch.zeros_like(logprob)


def numbers(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Any:
    return [0.0] * len(logprob)


def near(view: TokenView, bound: float = 0.2) -> Tensor:
    return (view.logprob.exp() - view.mu.exp()).abs() <= bound


def halved(view: TokenView) -> Tensor:
    return torch.full_like(view.mu, 0.5)


def negative(view: TokenView) -> Tensor:
    return -torch.ones_like(view.mu)


def needy(view: TokenView, threshold: float) -> Tensor:
    return view.mu.exp().clamp(max=threshold)


def broken_surrogate(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    raise TypeError("no such number")


def broken_correction(view: TokenView) -> Tensor:
    raise KeyError("absent")


def too_large(log_ratio: Tensor, logprob: Tensor, advantage: Tensor) -> Tensor:
    raise torch.OutOfMemoryError


no_function = 3


def piece(name: str, **args: Any) -> dict[str, Any]:
    return {"kind": f"{__name__}.{name}", "args": args}


def loss_of(view: TokenView, **pieces: Any) -> Tensor:
    config = LossConfig.model_validate(pieces)
    load_plugins(config)
    return evaluate({"rl": view}, config, {"rl": 1.0}).loss


def scaled() -> TokenView:
    case = Case("losses")
    return replace(case.view, scale=torch.full_like(case.view.mu, 1 / 9))


def test_a_surrogate_that_is_written_again_gives_the_same_loss_and_gradient() -> None:
    found = []
    for surrogate in (piece("plain"), {"kind": "linear"}):
        case = Case("losses")
        view = replace(case.view, scale=torch.full_like(case.view.mu, 1 / 9))
        loss = loss_of(view, surrogate=surrogate)
        loss.backward()
        found.append((loss.detach(), case.logprob.grad))
    torch.testing.assert_close(found[0], found[1])


def test_custom_fields_come_by_name_and_args_before_them() -> None:
    view = replace(scaled(), custom={"grade": torch.full((9,), 2.0, dtype=torch.float64), "other": torch.zeros(9)})
    wanted = 2 * loss_of(scaled(), surrogate={"kind": "log_linear"})
    torch.testing.assert_close(loss_of(view, surrogate=piece("of_a_field")), wanted)
    fixed = loss_of(view, surrogate=piece("of_a_field", grade=1.0))
    torch.testing.assert_close(fixed, wanted / 2)


def test_corrections_weigh_tokens_or_leave_them_out() -> None:
    linear = {"kind": "linear"}
    own = loss_of(scaled(), surrogate=linear, correction=[piece("near", bound=0.3)])
    built_in = {"kind": "divergence", "bound": 0.3, "signed": False}
    torch.testing.assert_close(own, loss_of(scaled(), surrogate=linear, correction=[built_in]))
    assert own != loss_of(scaled(), surrogate=linear)
    torch.testing.assert_close(
        loss_of(scaled(), surrogate=linear, correction=[piece("halved")]), loss_of(scaled(), surrogate=linear) / 2
    )


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        (
            "of_two",
            {},
            r"too many positional arguments; it is of_two\(.*wanted def of_two\(log_ratio, logprob, ",
        ),
        (
            "plain",
            {"slope": 1.0},
            r"and args .*unexpected keyword argument 'slope'; it is plain\(.*factor: ",
        ),
        ("of_a_field", {}, r"takes the custom field 'grade', and the experiences have none"),
        ("summed", {}, r"returns a Tensor of shape \[\], wanted \[9\]"),
        ("doubled", {}, r"returns a Tensor of torch\.float32, wanted torch\.float64"),
        ("detached", {}, r"returns losses without a gradient"),
        ("divided", {}, r"returns .*inf for 9 of 9 tokens whose inputs are finite; mask"),
        ("numbers", {}, r"returns a list, wanted a Tensor of shape \[9\]"),
        ("broken_surrogate", {}, r"broken_surrogate raised TypeError: no such number"),
        ("broken_correction", {}, r"broken_correction raised KeyError: 'absent'"),
        ("no_function", {}, r"is 3, wanted a function"),
        ("TokenView", {}, r"wanted a function"),
        ("negative", {}, r"gives a weight of -1, wanted at least 0"),
        ("needy", {}, r"cannot be called with view and args {}: missing a required argument: 'threshold'"),
        (
            "near",
            {"limit": 1},
            r"unexpected keyword argument 'limit'; it is near\(.*wanted def near\(view, limit\)",
        ),
    ],
)
def test_a_piece_that_cannot_be_used_is_named_with_what_to_do(name: str, args: dict[str, Any], said: str) -> None:
    own = piece(name, **args)
    is_correction = name in {"negative", "needy", "near", "broken_correction"}
    with pytest.raises(PluginError, match=said):
        loss_of(scaled(), **({"correction": [own]} if is_correction else {"surrogate": own}))


def test_a_lack_of_memory_is_no_fault_of_the_plugin() -> None:
    """The learner names the settings that help."""
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(scaled(), surrogate=piece("too_large"))


def test_a_path_that_leads_nowhere_is_found_before_the_first_step() -> None:
    for path in (f"{__name__}.nowhere", "no_such_module.loss"):
        with pytest.raises(UnknownNameError, match="plug-in of the loss"):
            load_plugins(LossConfig.model_validate({"surrogate": {"kind": path}}))


def test_numbers_that_were_not_finite_before_are_no_fault_of_the_plugin() -> None:
    """The learner leaves such an optimizer step out; the run goes on."""
    view = scaled()
    broken = replace(view, mu=view.mu.index_fill(0, torch.tensor([2]), math.nan))
    assert not loss_of(broken, surrogate=piece("plain")).isfinite()


LONGEST = 8
"""``model.max_response_tokens``."""
MASK = torch.tensor([[place < length for place in range(LONGEST)] for length in (5, 3, 1, 4)])
SEQUENCES = torch.arange(4).repeat_interleave(MASK.sum(1))
ADVANTAGES = torch.tensor([0.5, -0.25, -0.75, 0.5])
SAMPLER = torch.full(MASK.shape, -1.0)
LOG_RATIOS = torch.tensor([0.05, -0.3, 0.4, 0.01]).repeat(4, 2)
"""Some within the clip and some beyond it, by token."""
SURE = {"sft", "cpt", "raft", "sft_is", "sft_phi"}
PAIRS = {"dpo", "ipo_pref"}


def gradient(algorithm: dict[str, Any], log_ratios: Tensor = LOG_RATIOS) -> Tensor:
    """Return the gradient of an algorithm's loss by the logprobs of a batch's answers."""
    config = load_config({"model": {"tiny": {}, "max_response_tokens": LONGEST}, "algorithm": {"kl": None} | algorithm})
    counts = MASK.sum(1)
    logprob = (SAMPLER + log_ratios).requires_grad_()
    view = TokenView(
        logprob=logprob[MASK],
        mu=SAMPLER[MASK],
        advantage=ADVANTAGES.repeat_interleave(counts),
        scale=torch.from_numpy(sequence_scales(counts.numpy(), np.arange(4), config.reduction)).float()[SEQUENCES],
        segment=SEQUENCES,
    )
    (slopes,) = torch.autograd.grad(policy_terms(view, config.algorithm).loss, logprob)
    return slopes


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


def test_the_distillation_of_old_data_is_a_square() -> None:
    """``-(A + log mu - log pi)`` is the gradient of ``-A log pi + (log pi - log mu)^2 / 2``."""
    arguments = {"clip_mode": "none", "weight": "none", "fix_opd_advantage": True}
    config = AlgorithmConfig.model_validate({"policy_loss_fn": "rec", "policy_loss_fn_args": arguments})
    assert [(term.kind, term.coef) for term in config.regularisers] == [("square", 0.5)]


PIECES = ("repeat_times", "estimator", *LossConfig.model_fields)


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(base=st.sampled_from(sorted(PRESETS)), order=st.permutations(PIECES))
def test_a_preset_is_its_pieces_over_any_other(name: str, base: str, order: list[str]) -> None:
    preset = AlgorithmConfig(algorithm_type=name).model_dump(mode="json")
    for under in (base, "grpo"):
        by_hand = {"algorithm_type": under, **{piece: preset[piece] for piece in order}}
        by_hand |= {"optimizer": {"lr": preset["optimizer"]["lr"]}}  # a preset's rate is none of its pieces
        found = AlgorithmConfig.model_validate(by_hand)
        assert found.model_dump(mode="json") | {"algorithm_type": name} == preset
