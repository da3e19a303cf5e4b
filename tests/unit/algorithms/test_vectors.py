"""Every loss, weight and mask of the vectors: value, gradient and metrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.algorithms.vectors import (
    UPSTREAM,
    UPSTREAM_SUFFIX,
    VECTORS,
    Case,
    grid,
    of_kind,
    reduction_of,
    with_step_weights,
)
from trinity_mq.algorithms.corrections import correction, covariance, step_choice
from trinity_mq.algorithms.evaluator import anchor_logprob, evaluate, needs_whole_step, schedule_value, token_losses
from trinity_mq.config.algorithm.pieces import LossConfig, Schedule

CLIP: dict[str, Any] = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 3.0}
PLAIN: dict[str, Any] = CLIP | {"dual": None}


LOSSES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "losses.json").read_text())
"""Policy losses: the pieces that make each, its reduction excepted where the vector names that."""

OWN_REDUCTION = {"gmpo", "luspo"}
"""The vector's mode is not what the algorithm does."""

SAMPLER = ("dppo_tv/prime-rl", "ipo/", "rollout_is/", "m2po", "decoupled_ppo/", "bypass/", "areal/")
"""Vectors that read the sampler's logprobs; the others know one old policy only, which is the anchor here."""

KL = {
    "kl/k1": "k1",
    "kl/k2": "k2",
    "kl/k3": "k3",
    "kl/low_var_kl": "k3_clamped",
    "kl/abs": "abs",
    "kl/corrected_k3": "k3_weighted",
    "kl/k3+straight_through": "k3_k2",
}
LIKELIHOODS = {"sft": "none", "sft_is": "probability", "sft_phi": "uncertainty"}
ELSEWHERE = {
    "mix",
    "mix_chord",
    "dpo",
    "dpo/label_smoothing",
    "dpo/ipo",
    "ref_kl/prime-rl",
}


def test_every_loss_of_the_file_has_its_test() -> None:
    assert set(of_kind("loss")) - set(UPSTREAM) == {*LOSSES, *KL, *LIKELIHOODS, *ELSEWHERE}


@pytest.mark.parametrize("name", UPSTREAM)
def test_errors_of_others_are_not_repeated(name: str) -> None:
    """Ours is that of the vector without the suffix."""
    ours, theirs = (VECTORS[one]["expected"] for one in (name.removesuffix(UPSTREAM_SUFFIX), name))
    compared = [key for key in ("loss", "scores", "grad_logprob", "per_token") if theirs.get(key) is not None]
    assert any(ours[key] != theirs[key] for key in compared)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), grid(expected), rtol=1e-9, atol=1e-9)


def case_of(name: str) -> Case:
    vector = VECTORS[name]
    anchor = None if name.startswith(SAMPLER) else "old_logprob"
    return Case(vector["fixture"], anchor=anchor, advantages=vector["args"].get("advantages"))


def config_of(name: str, **pieces: Any) -> LossConfig:
    reduction = {} if name in OWN_REDUCTION else {"reduction": reduction_of(VECTORS[name]["args"])}
    return LossConfig.model_validate(pieces | reduction)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name: str) -> None:
    expected, case = VECTORS[name]["expected"], case_of(name)
    config = config_of(name, **LOSSES[name])
    view = replace(case.view, scale=case.scaled(config.reduction))
    view = with_step_weights(view, config)
    view = replace(view, chosen=step_choice(view, config.regularisers))
    terms = evaluate({"rl": view}, config, {"rl": 1.0})
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])
    if expected["per_token"] is not None and not config.regularisers:
        losses, _ = token_losses(view, config)
        close(case.full(losses), expected["per_token"])
    found = {metric: value.item() / view.tokens for metric, value in terms.sums.items()}
    names = {"is_masked": "masked_frac"}
    for metric, value in (expected["metrics"] or {}).items():
        if names.get(metric, metric) in found:
            assert found[names.get(metric, metric)] == pytest.approx(value, abs=1e-9), metric


@pytest.mark.parametrize("name", KL)
def test_estimates_of_the_kl_to_a_reference(name: str) -> None:
    expected, case = VECTORS[name]["expected"], case_of(name)
    config = config_of(name, kl={"kind": KL[name], "coef": 1.0})
    view = replace(case.view, scale=case.scaled(config.reduction), advantage=torch.zeros_like(case.view.mu))
    terms = evaluate({"rl": view}, config, {"rl": 1.0})
    close(terms.reduced["kl_loss"], expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name: str) -> None:
    expected, case = VECTORS[name]["expected"], case_of(name)
    config = config_of(name, imitation={"weight": LIKELIHOODS[name]})
    terms = evaluate({"ce": replace(case.view, scale=case.scaled(config.reduction))}, config, {"ce": 1.0})
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])


@pytest.mark.parametrize(("name", "weight"), [("mix", "none"), ("mix_chord", "uncertainty")])
def test_a_mixture_reduces_each_component_over_its_own_tokens(name: str, weight: str) -> None:
    expected, case = VECTORS[name]["expected"], case_of(name)
    config = config_of(name, surrogate=CLIP, imitation={"weight": weight}, weights={"rl": 0.9, "ce": 0.1})
    expert = torch.tensor([False, False, True])[case.view.segment]
    views = {}
    for component, kept in (("rl", ~expert), ("ce", expert)):
        scales = case.scaled(config.reduction, kept)
        views[component] = replace(case.view, scale=scales).where(kept)
    terms = evaluate(views, config, config.weights.model_dump())
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])


@pytest.mark.parametrize(
    ("name", "args"),
    [("dpo", {}), ("dpo/label_smoothing", {"label_smoothing": 0.1}), ("dpo/ipo", {"form": "ipo"})],
)
def test_pairs(name: str, args: dict[str, Any]) -> None:
    expected, case = VECTORS[name]["expected"], Case("pairs")
    config = LossConfig.model_validate({"pair": args})
    view = replace(case.view, scale=torch.full_like(case.view.mu, 2 / case.view.segments))
    terms = evaluate({"pair": view}, config, {"pair": 1.0})
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])
    for metric, value in expected["metrics"].items():
        close(terms.reduced[f"pair_{metric}"], value)


def test_distillation_as_a_component() -> None:
    name = "ref_kl/prime-rl"
    expected, case = VECTORS[name]["expected"], case_of(name)
    case = Case("losses")
    config = config_of(name)
    terms = evaluate({"ref_kl": replace(case.view, scale=case.scaled(config.reduction))}, config, {"ref_kl": 1.0})
    close(terms.loss.detach(), expected["loss"])
    terms.loss.backward()
    close(case.logprob.grad, expected["grad_logprob"])


WEIGHTS: dict[str, dict[str, Any]] = {
    "weight/tis/token": {},
    "weight/tis/sequence": {"level": "sequence"},
    "weight/icepop/token_0.5_5": {"low": 0.5, "high": 5.0, "beyond": "mask"},
    "weight/icepop/token_0.5_2": {"low": 0.5, "high": 2.0, "beyond": "mask"},
    "weight/mis/sequence_mask_3": {"level": "sequence", "high": 3.0, "beyond": "mask"},
    "weight/mis/sequence_mask_2": {"level": "sequence", "high": 2.0, "beyond": "mask"},
    "weight/mis/sequence_truncate_3": {"level": "sequence", "high": 3.0},
    "weight/tis/token+batch_normalize": {"normalize": True},
}
MASKS: dict[str, dict[str, Any]] = {
    "mask/token_k1_0.5_2.0": {"low": 0.5, "high": 2.0},
    "mask/token_k1_0.5_5.0": {"low": 0.5, "high": 5.0},
    "mask/token_k2_0.1": {"estimate": "k2", "high": 0.1},
    "mask/token_k3_0.2": {"estimate": "k3", "high": 0.2},
    "mask/seq_sum_k1_0.5_2.0": {"level": "sequence_sum", "low": 0.5, "high": 2.0},
    "mask/seq_mean_k1_0.999_1.001": {"level": "sequence_mean", "low": 0.999, "high": 1.001},
    "mask/seq_mean_k1_0.95_1.05": {"level": "sequence_mean", "low": 0.95, "high": 1.05},
    "mask/seq_mean_k3_0.01": {"estimate": "k3", "level": "sequence_mean", "high": 0.01},
    "mask/seq_max_k2_0.05": {"estimate": "k2", "level": "sequence_max", "high": 0.05},
    "mask/opsm_rollout_0.1": {"kind": "sequence_mask", "bound": 0.1},
    "mask/m2po_areal_0.04": {"kind": "second_moment", "active": False},
    "mask/m2po_paper_0.04": {"kind": "second_moment", "bypass": True},
}


def test_every_weight_and_mask_of_the_file_has_its_test() -> None:
    assert (set(of_kind("weight")), set(of_kind("mask"))) == (set(WEIGHTS), set(MASKS))


@pytest.mark.parametrize("name", [*WEIGHTS, *MASKS])
def test_corrections(name: str) -> None:
    args = dict(WEIGHTS[name] if name in WEIGHTS else MASKS[name])
    kind = args.pop("kind", "weight" if name in WEIGHTS else "reject")
    bypass = args.pop("bypass", False)
    (rule,) = LossConfig.model_validate({"correction": [{"kind": kind, **args}]}).correction
    view = Case("losses").view
    anchor = anchor_logprob(view, "old")
    log_weight = (view.logprob.detach() if bypass else anchor) - view.mu
    close(Case("losses").full(correction(view, anchor, log_weight, rule, "seed")), VECTORS[name]["expected"])
    assert needs_whole_step(rule) is (kind == "second_moment" or "normalize" in args)


def test_anchor_between_sampler_and_policy() -> None:
    case, expected = Case("losses"), VECTORS["prox_approx/loglinear"]["expected"]
    close(case.full(anchor_logprob(case.view, "loglinear")), expected["prox_logprob"])


def test_anchor_between_the_probabilities_of_sampler_and_policy() -> None:
    case = Case("losses")
    found = case.full(anchor_logprob(case.view, "linear"))
    # AReaL adds 1e-10 to the probability before its logarithm
    torch.testing.assert_close(found, grid(VECTORS["prox_approx/linear"]["expected"]), rtol=0, atol=1e-9)


def test_covariance() -> None:
    case = Case("losses", anchor="old_logprob")
    close(case.full(covariance(case.view)), VECTORS["clip_cov/covariance"]["expected"])


def test_the_weight_of_imitation_follows_its_schedule() -> None:
    vector = VECTORS["mix_chord/mu_schedule"]
    schedule = Schedule(warmup_steps=10, decay_steps=20, peak=0.9, valley=0.05)
    close([schedule_value(schedule, step) for step in vector["inputs"]["steps"]], vector["expected"])


@pytest.mark.parametrize("mode", list(VECTORS["normalisation/modes"]["expected"]))
def test_reductions(mode: str) -> None:
    args, case = VECTORS["normalisation/modes"]["args"], Case("losses", anchor="old_logprob")
    norm = args["norm"] if mode.endswith("norm") else None
    reduction = reduction_of({"loss_agg_mode": mode, "norm": norm})
    losses, _ = token_losses(case.view, LossConfig.model_validate({"surrogate": PLAIN}))
    total = (losses.detach() * case.scaled(reduction, prompts=args["prompt_groups"])).sum()
    close(total, VECTORS["normalisation/modes"]["expected"][mode])


@pytest.mark.parametrize("mode", list(VECTORS["normalisation/fully-masked-sequence"]["expected"]))
def test_a_sequence_without_a_trained_token_counts_nowhere(mode: str) -> None:
    vector = VECTORS["normalisation/fully-masked-sequence"]
    case = Case("losses", anchor="old_logprob", mask=vector["inputs"]["mask"])
    losses, _ = token_losses(case.view, LossConfig.model_validate({"surrogate": PLAIN}))
    reduction = reduction_of({"loss_agg_mode": mode})
    close((losses.detach() * case.scaled(reduction)).sum(), vector["expected"][mode])
