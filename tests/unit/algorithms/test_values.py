"""Vectors that are neither loss nor advantage: value loss, age of sequences, parts of an optimizer step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.algorithms.vectors import FIXTURES, VECTORS, Case, grid
from trinity_mq.algorithms.corrections import correction
from trinity_mq.algorithms.evaluator import evaluate
from trinity_mq.algorithms.regularisers import kl_estimate
from trinity_mq.algorithms.surrogates import likelihood, surrogate
from trinity_mq.algorithms.values import clipped_value_loss
from trinity_mq.algorithms.view import segment_maxima
from trinity_mq.config.algorithm.pieces import Likelihood, LogLinear, LossConfig


def close(found: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(found.double(), grid(expected), rtol=1e-9, atol=1e-9)


def test_the_clipped_value_loss() -> None:
    vector, fixture = VECTORS["value_loss/clipped"], FIXTURES["values"]
    mask = grid(fixture["mask"]).bool()
    values = grid(fixture["values"]).requires_grad_()
    old, returns = grid(fixture["old_values"])[mask], grid(fixture["returns"])[mask]
    losses, cut = clipped_value_loss(values[mask], old, returns, vector["args"]["cliprange_value"])
    close(losses.mean().detach(), vector["expected"]["loss"])
    close(cut.double().mean(), vector["expected"]["clipfrac"])
    losses.mean().backward()
    assert values.grad is not None
    close(values.grad, vector["expected"]["grad_values"])


def test_the_age_of_tokens_and_of_the_oldest_of_a_sequence() -> None:
    case, expected = Case("losses"), VECTORS["staleness"]["expected"]
    age = case.view.staleness
    assert age is not None
    close(age, grid(expected["token"])[case.mask].tolist())
    oldest = segment_maxima(age, case.view)
    close(oldest, [expected["oldest"][sequence] for sequence in case.view.segment])
    close(age.mean(), expected["mean"])
    close(age.max(), expected["max"])


def test_micro_batches_and_ranks_add_up() -> None:
    vector, case = VECTORS["normalisation/token-mean"], Case("losses", anchor="old_logprob")
    config = LossConfig.model_validate({"surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None}})
    view = replace(case.view, scale=case.scaled(config.reduction))
    parts = []
    for sequences in vector["inputs"]["micro_batches"]:
        part = view.where(torch.isin(view.segment, torch.tensor(sequences)))
        parts.append(evaluate({"rl": part}, config, {"rl": 1.0}).loss.detach())
    expected = vector["expected"]
    close(torch.stack(parts).sum(), expected["correct"])
    close(torch.stack(parts) * view.tokens, expected["numerators"])
    close(torch.stack(parts) * 2, expected["two_ranks_local_times_dp"])


def test_the_tokens_that_lower_the_entropy_most() -> None:
    vector = VECTORS["advantage/clipb"]
    inputs = vector["inputs"]
    mask = grid(inputs["mask"]).bool()
    case = Case("losses", advantages=inputs["advantages"])
    view = replace(case.view, logprob=grid(inputs["logprob"])[mask], entropy=grid(inputs["entropy"])[mask])
    rules = [{"kind": "entropy_clip", "bound": vector["args"]["mu"]}]
    (rule,) = LossConfig.model_validate({"correction": rules}).correction
    close(case.full(correction(view, view.mu, view.mu, rule, "seed")), vector["expected"]["per_token"])


def test_a_step_whose_weights_are_all_0_has_no_gradient_and_no_nan() -> None:
    case = Case("losses")
    rules = [{"kind": "weight", "high": 1e-9, "beyond": "mask", "normalize": True}]
    config = LossConfig.model_validate({"anchor": "old", "correction": rules})
    anchor = case.view.old
    assert anchor is not None
    weight = correction(case.view, anchor, anchor - case.view.mu, config.correction[0], "seed")
    close(weight, [0.0] * case.view.tokens)
    evaluate({"rl": replace(case.view, weight=weight)}, replace_rules(config), {"rl": 1.0}).loss.backward()
    assert case.logprob.grad is not None
    assert not case.logprob.grad.any()


def replace_rules(config: LossConfig) -> LossConfig:
    """Return the loss without its corrections, which the view holds."""
    return config.model_copy(update={"correction": ()})


@pytest.mark.parametrize("kind", ["k3", "k3_clamped", "k3_weighted", "k3_k2"])
@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_a_policy_far_from_its_reference_has_a_finite_term(kind: str, difference: float) -> None:
    away = torch.tensor([difference], requires_grad=True)
    found = kl_estimate(away, kind, torch.ones(1))
    found.sum().backward()
    assert found.isfinite().all()
    assert away.grad is not None
    assert away.grad.isfinite().all()


def test_a_weight_by_advantage_is_bounded() -> None:
    args = LogLinear(weight="advantage")
    found = surrogate(torch.zeros(1), torch.tensor([-1.0]), torch.tensor([100.0]), args).loss
    assert found.isfinite().all()


@pytest.mark.parametrize("weight", ["none", "probability", "uncertainty"])
def test_sure_tokens_have_no_gradient_above_the_cutoff(weight: Any) -> None:
    logprob = torch.tensor([0.99, 0.4]).log().requires_grad_()
    likelihood(logprob, Likelihood(weight=weight, cutoff=0.5)).loss.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad[0] == 0
    assert logprob.grad[1] < 0
