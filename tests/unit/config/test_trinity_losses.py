"""Arguments of Trinity-RFT's losses and advantages become pieces, and its defaults are written where ours differ."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trinity_mq.config import load_config
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.algorithm.checks import algorithm_problems
from trinity_mq.config.algorithm.presets import ALIASES, PRESETS
from trinity_mq.config.algorithm.trinity_losses import POLICY_LOSSES
from trinity_mq.trinity_rft.migration import Migration, migrate
from trinity_mq.trinity_rft.migration.algorithm import ADVANTAGE_DEFAULTS, ALGORITHMS, POLICY_LOSS_DEFAULTS

Section = dict[str, Any]


def section_of(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def at(config: Any, place: str) -> Any:
    for part in place.split("."):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


def of_loss(name: str, **arguments: Any) -> Section:
    return {"policy_loss_fn": name, "policy_loss_fn_args": arguments}


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        (of_loss("ppo", clip_range=0.1, clip_range_high=0.3, clip_ratio_c="1.0e6"),
         {"surrogate.low": 0.1, "surrogate.high": 0.3, "surrogate.dual": 1e6}),
        (of_loss("ppo", enable_sequence_masking=True),
         {"correction.0.kind": "sequence_mask", "correction.0.bound": 0.1, "correction.0.against": "anchor"}),
        (of_loss("ppo", enable_sequence_masking=True, delta_sequence_masking=0.3), {"correction.0.bound": 0.3}),
        (of_loss("ppo", enable_sequence_masking=False), {"correction": ()}),
        (of_loss("ppo", fallback_to_policy_gradient=True, enable_sequence_masking=True),
         {"ratio.kind": "self", "correction": ()}),
        (of_loss("gspo", clip_range_low=0.01, loss_agg_mode="seq-mean-token-mean"),
         {"ratio.kind": "sequence", "surrogate.low": 0.01, "surrogate.high": 4e-4, "reduction.kind": "sequence"}),
        (of_loss("cispo", clip_range_low=0.2, clip_range_high=0.3),
         {"surrogate.floor": 0.8, "surrogate.cap": 1.3, "surrogate.mask_low": None}),
        (of_loss("cispo", clip_range_low=1.0, enable_mask_clip=True),
         {"surrogate.floor": 0.0, "surrogate.mask_low": None, "surrogate.mask_high": 0.28}),
        (of_loss("cispo", enable_mask_clip=True, mask_clip_range_low=0.4, mask_clip_range_high=0.5),
         {"surrogate.mask_low": 0.4, "surrogate.mask_high": 0.5}),
        (of_loss("cispo", enable_mask_clip=False, mask_clip_range_low=0.4), {"surrogate.mask_low": None}),
        (of_loss("sapo", tau_pos=2.0, tau_neg=3.0), {"surrogate.positive": 2.0, "surrogate.negative": 3.0}),
        (of_loss("topr", advantage_threshold=0.5), {"surrogate.threshold": 0.5, "surrogate.only": "negative"}),
        (of_loss("sppo", epsilon=0.1), {"surrogate.kind": "log_ratio", "surrogate.epsilon": 0.1}),
        (of_loss("opmd", tau=0), {"surrogate.divisor": 1.0}),
        (of_loss("opmd", tau=0.99), {"surrogate.divisor": 1.99, "surrogate.kind": "log_linear"}),
        (of_loss("rec", clip_mode="two-side", weight="advantage", temp=0.5, epsilon_low=0.1, epsilon_high=0.3),
         {"surrogate.keep": "two_side", "surrogate.weight": "advantage", "surrogate.temperature": 0.5,
          "surrogate.low": 0.1, "surrogate.high": 0.3}),
        (of_loss("rec", clip_mode="ring", epsilon_low_prime=0.4, epsilon_high_prime=0.5, weight="none"),
         {"surrogate.keep": "ring", "surrogate.outer_low": 0.4, "surrogate.outer_high": 0.5}),
        (of_loss("rec", clip_mode="gspo-one-side", weight="gspo_importance_sampling", loss_agg_mode="token-mean"),
         {"surrogate.keep": "one_side", "surrogate.weight": "ratio", "ratio.kind": "sequence",
          "reduction.kind": "sequence"}),
        (of_loss("rec", regularizer="k2", regularizer_coef="0.5"),
         {"regularisers.0.kind": "square", "regularisers.0.coef": 0.5}),
        (of_loss("rec", regularizer="forward-kl", regularizer_coef=0.5), {"regularisers.0.kind": "likelihood"}),
        (of_loss("rec", regularizer="k2", regularizer_coef=0.0), {"regularisers": ()}),
        (of_loss("rec", fix_opd_advantage=True, clip_mode="none", weight="none"), {"regularisers.0.coef": 0.5}),
        (of_loss("m2po", m2_threshold=0.01, log_ratio_clip=20.0), {"correction.0.bound": 0.01}),
        (of_loss("sft_phi", cutoff_prob=0.5), {"imitation.cutoff": 0.5, "imitation.weight": "uncertainty"}),
        (of_loss("mix", mu=0.25, clip_range=0.2, sft_loss_agg_mode="token-mean", ngpus_trainer=4),
         {"weights.rl": 0.75, "weights.ce": 0.25, "reduction.kind": "token"}),
        (of_loss("mix", use_token_level_loss_in_sft=False, loss_agg_mode="seq-mean-token-mean"),
         {"reduction.kind": "sequence"}),
        (of_loss("mix_chord", mu_peak=0.5, mu_valley=0.02, mu_warmup_steps=200, mu_decay_steps=400),
         {"ce_schedule.peak": 0.5, "ce_schedule.valley": 0.02, "ce_schedule.warmup_steps": 200,
          "ce_schedule.decay_steps": 400}),
        (of_loss("mix_chord", mu_peak=0.5, mu_valley=0.02), {"ce_schedule.peak": 0.02, "ce_schedule.valley": 0.02}),
        (of_loss("mix_chord", mu_peak=0.5, mu_valley=0.02, mu_warmup_steps=9), {"ce_schedule.decay_steps": 1}),
        (of_loss("mix_chord", enable_phi_function=False), {"imitation.weight": "none"}),
        ({"algorithm_type": "dpo", "policy_loss_fn_args": {"beta": 0.3, "label_smoothing": 0.1}},
         {"pair.beta": 0.3, "pair.label_smoothing": 0.1}),
        ({"algorithm_type": "asymre", "advantage_fn_args": {"baseline_shift": -0.3}}, {"estimator.shift": -0.3}),
        ({"algorithm_type": "rec", "advantage_fn_args": {"drop": None, "std_normalize": False}},
         {"estimator.drop": "none", "estimator.scale": "none"}),
        ({"advantage_fn": "asymre_verl"}, {"estimator.shift": -0.1}),
        ({"advantage_fn": "opmd_verl", "advantage_fn_args": {"opmd_baseline": "logavgexp", "tau": 0.99}},
         {"estimator.baseline": "logavgexp", "estimator.tau": 0.99}),
        ({"advantage_fn": "step_wise_grpo", "advantage_fn_args": {"enable_step_norm": True, "std_cal_level": "none"}},
         {"estimator.step_norm": True, "estimator.scale": "none"}),
        ({"advantage_fn": "clipb", "advantage_fn_args": {"mu": 2.0, "epsilon": 1e-5}},
         {"correction.0.kind": "entropy_clip", "correction.0.bound": 2.0, "estimator.epsilon": 1e-5}),
        ({"advantage_fn": "clipv", "advantage_fn_args": {"mu": 8.0, "max_frac": 0.01}, **of_loss("m2po")},
         {"correction.0.kind": "second_moment", "correction.1.kind": "vocabulary_clip", "correction.1.bound": 8.0,
          "correction.1.share": 0.01}),
        ({"advantage_fn": "jsd", "advantage_fn_args": {"lambda_coef": 0.3, "chunk_size": 64, "temperature": 1.0}},
         {"estimator.kind": "jsd", "estimator.beta": 0.3}),
        ({"advantage_fn": "jsd", "advantage_fn_args": {"lambda_coef": 0, "kl_coef": 2.0}},
         {"estimator.kind": "distill", "estimator.kl_coef": 2.0}),
        ({"kl_loss_fn_args": {"kl_coef": 0.1}}, {"kl.kind": "k2", "kl.coef": 0.1}),
        ({"algorithm_type": "asymre", "kl_loss_fn_args": {"kl_coef": 0.1}}, {"kl": None}),
        ({"algorithm_type": "mix", "kl_loss_fn": "k3", "kl_loss_fn_args": {"kl_coef": 0.09}}, {"kl.coef": 0.1}),
        ({"algorithm_type": "mix", "entropy_loss_fn": "mix", "entropy_loss_fn_args": {"entropy_coef": 0.09}},
         {"entropy_coef": 0.1}),
        ({"entropy_loss_fn": "none", "entropy_loss_fn_args": {"entropy_coef": 0.1}}, {"entropy_coef": 0.0}),
        ({"entropy_coef": 0.2, "entropy_loss_fn_args": {"entropy_coef": 0.1}}, {"entropy_coef": 0.2}),
        ({"clip_range": 0.1, "clip_ratio_c": 5.0},
         {"surrogate.low": 0.1, "surrogate.high": 0.1, "surrogate.dual": 5.0}),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {"reduction.kind": "sequence"}),
        ({"kl_loss_fn": "low_var_kl"}, {"kl.kind": "k3_clamped", "kl.coef": 0.001}),
        ({"algorithm_type": "ppo", "kl_loss_fn": "none"}, {"kl": None}),
        ({"algorithm_type": "on_policy_distill", "kl_coef": 0.5}, {"estimator.kl_coef": 0.5}),
        ({"std_level": "batch"}, {"estimator.scale": "batch", "estimator.epsilon": 1e-4}),
        ({"algorithm_type": "ppo", "std_level": None}, {"estimator.kind": "gae"}),
        ({"algorithm_type": "rec", "advantage_fn_args": {"std_normalize": True}}, {"estimator.scale": "population"}),
        ({"advantage_fn": "rloo", **of_loss("sapo", loss_agg_mode="token-mean")},
         {"estimator.baseline": "leave_one_out", "surrogate.kind": "gate", "reduction.kind": "token"}),
        ({"algorithm_type": "grpo_verl"}, {"algorithm_type": "grpo"}),
        ({"bypass_old_logprobs": False}, {"anchor": "old"}),
        ({"algorithm_type": "decoupled", "bypass_old_logprobs": True}, {"anchor": "mu"}),
    ],
    ids=str,
)  # fmt: skip
def test_each_argument(section: Section, wanted: Section) -> None:
    config = section_of(**section)
    found = {place: at(config, place) for place in wanted}
    assert found == pytest.approx(wanted) if all(isinstance(one, float) for one in wanted.values()) else found == wanted


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (of_loss("nope"), "policy_loss_fn is 'nope', wanted one of ppo, gspo"),
        (of_loss("ppo", tau=1), "policy_loss_fn_args.tau is not known for the loss ppo, wanted one of clip_range"),
        (of_loss("importance_sampling", tau=1), "for the loss importance_sampling, wanted one of loss_agg_mode"),
        (of_loss("opmd", tau="x"), "tau is 'x', wanted a number"),
        (of_loss("opmd", tau=True), "tau is True, wanted a number"),
        (of_loss("rec", clip_mode="both"), "clip_mode is 'both', wanted one of none, one-side"),
        (of_loss("rec", clip_mode={}), "clip_mode is {}, wanted one of none"),
        (of_loss("rec", clip_mode="ring", weight="gspo_importance_sampling"), "wanted gspo-one-side: only that mode"),
        (of_loss("rec", clip_mode="gspo-one-side", weight="importance_sampling"), "wanted one ratio for both"),
        (of_loss("rec", clip_mode="ring", fix_opd_advantage=True), "wanted none and none: only then its gradient"),
        (of_loss("rec", regularizer="k9"), "regularizer is 'k9', wanted one of none, k2, forward-kl"),
        (of_loss("m2po", log_ratio_clip=5), "log_ratio_clip is 5, wanted 20"),
        (of_loss("mix", grpo_loss_agg_mode="seq-mean-token-sum"), "wanted one: both parts have the one"),
        (of_loss("ppo", loss_agg_mode="mean"), "loss_agg_mode is 'mean', wanted one of token-mean"),
        ({"algorithm_type": "vespo", "policy_loss_fn_args": {"tau": 1}}, "no meaning for vespo, which is no loss of"),
        ({"advantage_fn_args": {"duplicate_experiences": True}}, "wanted False: a step is not filled up with copies"),
        ({"advantage_fn": "gigpo", "advantage_fn_args": {"step_reward_key": "r"}}, "wanted 'step_reward'"),
        ({"advantage_fn": "jsd", "advantage_fn_args": {"temperature": 2.0}}, "temperature is 2.0, wanted 1.0"),
        ({"algorithm_type": "ppo", "std_level": "batch"}, "no meaning for the estimator 'gae': remove it"),
        ({"kl_loss_fn_args": {"coef": 0.1}}, "kl_loss_fn_args.coef is not known, wanted one of kl_coef"),
        ({"entropy_loss_fn": "max"}, "entropy_loss_fn is 'max', wanted one of none, default, mix"),
        ({"entropy_loss_fn_args": {"coef": 0.1}}, "entropy_loss_fn_args.coef is not known, wanted one of entropy_coef"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_an_error(section: Section, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        section_of(**section)
    assert words in str(caught.value)


TOKEN_WEIGHT = {"kind": "weight", "level": "token", "high": 2.0}


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        ({"bypass_mode": False}, ("old", "clip", [])),
        ({"bypass_mode": True}, ("mu", "clip", [])),
        ({"rollout_is": "token"}, ("old", "clip", [TOKEN_WEIGHT])),
        ({"rollout_is": "token", "bypass_mode": True}, ("mu", "clip", [])),
        ({"rollout_is": "token", "bypass_mode": True, "loss_type": "reinforce"}, ("mu", "log_linear", [TOKEN_WEIGHT])),
        ({"rollout_is": "sequence", "rollout_is_threshold": 5},
         ("old", "clip", [{"kind": "weight", "level": "sequence", "high": 5.0}])),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
         ("old", "clip", [{**TOKEN_WEIGHT, "low": 0.5, "high": 5.0, "beyond": "mask", "normalize": True}])),
        ({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
         ("old", "clip",
          [{"kind": "reject", "estimate": "k1", "level": "sequence_mean", "low": 0.999, "high": 1.001}])),
        ({"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "2.0, 0.1"},
         ("old", "clip", [{"kind": "reject", "estimate": "k1", "level": "token", "low": 0.5, "high": 2.0},
                          {"kind": "reject", "estimate": "k3", "level": "sequence_max", "high": 0.1}])),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 4, "rollout_rs_threshold_lower": 0.5},
         ("old", "clip", [{"kind": "reject", "estimate": "k1", "level": "sequence_mean", "low": 0.25, "high": 2.0}])),
        ({"rollout_rs": "token", "rollout_rs_threshold": 4},
         ("old", "clip", [{"kind": "reject", "estimate": "k1", "level": "token", "low": 0.25, "high": 4.0}])),
    ],
    ids=str,
)  # fmt: skip
def test_rollout_correction(rules: Section, wanted: tuple[str, str, list[Section]]) -> None:
    config = section_of(rollout_correction=rules)
    corrections = section_of(correction=wanted[2]).correction
    assert (config.anchor, config.surrogate.kind, config.correction) == (wanted[0], wanted[1], corrections)
    assert list(algorithm_problems(config, 0, 4096)) == []


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"rollout_token_veto_threshold": 1e-4}, "wanted one of bypass_mode, loss_type"),
        ({"rollout_token_veto_threshold": 1e-4}, "a veto of a whole answer by one token has no counterpart"),
        ({"rollout_is": "geometric"}, "rollout_is is 'geometric', wanted one of token, sequence"),
        ({"rollout_is": "token", "rollout_is_threshold": "x"}, "rollout_is_threshold is 'x', wanted a number above 0"),
        ({"rollout_is": "sequence", "rollout_is_batch_normalize": True}, "wanted token: weights are divided by"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold is missing"),
        ({"rollout_rs": "k1", "rollout_rs_threshold": 2}, "rollout_rs is 'k1', wanted token, seq_sum"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "has 2 bounds, wanted 1 or 3"),
        ({"loss_type": "dpo"}, "loss_type is 'dpo', wanted ppo_clip or reinforce"),
        ("x", "rollout_correction is 'x', wanted settings by name"),
    ],
)
def test_a_rollout_correction_without_a_counterpart_says_what_is_missing(rules: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        section_of(rollout_correction=rules)
    assert words in str(caught.value)


def test_corrections_of_the_loss_stay_beside_those_of_the_rollout() -> None:
    config = section_of(algorithm_type="m2po", rollout_correction={"rollout_is": "token"})
    assert [rule.kind for rule in config.correction] == ["second_moment", "weight"]


def migrated(algorithm: Section, **other: Any) -> tuple[Migration, AlgorithmConfig]:
    found = migrate({"model": {"model_path": "m"}, "algorithm": algorithm, **other})
    return found, AlgorithmConfig.model_validate(found.settings["algorithm"])


CLIP = {"surrogate.kind": "clip", "surrogate.low": 0.2, "surrogate.high": 0.2, "surrogate.dual": 3.0}
TOKEN: Section = {"reduction.kind": "token", "anchor": "mu", "entropy_coef": 0.0, "correction": ()}
K2: Section = {"kl.kind": "k2", "kl.coef": 0.001}
NO_KL: Section = {"kl": None}
GROUP = {"estimator.baseline": "mean", "estimator.scale": "group", "estimator.epsilon": 1e-6,
         "estimator.std_threshold": None}  # fmt: skip
LOG: Section = {"surrogate.kind": "log_linear"}

DEFAULTS: dict[str, Section] = {
    "sft": {"weights.rl": 0.0, "weights.ce": 1.0, "imitation.weight": "none", **NO_KL, **TOKEN, "optimizer.lr": 1e-6},
    "cpt": {"weights.ce": 1.0, **NO_KL, **TOKEN, "optimizer.lr": 1e-6},
    "raft": {"weights.ce": 1.0, **NO_KL, **TOKEN, "optimizer.lr": 1e-6},
    "dpo": {"pair.beta": 0.1, "pair.label_smoothing": 0.0, "optimizer.lr": 1e-6, **NO_KL},
    "ppo": {**CLIP, **K2, **TOKEN, "estimator.kind": "gae", "estimator.lam": 1.0, "repeat_times": 1},
    "grpo": {**CLIP, **K2, **TOKEN, **GROUP, "repeat_times": 2},
    "grpo_verl": {**CLIP, **K2, **TOKEN, **GROUP},
    "dapo": {**CLIP, **NO_KL, **TOKEN, **GROUP, "repeat_times": 16},
    "reinforceplusplus": {**CLIP, **K2, **TOKEN, "estimator.kind": "discounted", "estimator.gamma": 1.0},
    "rloo": {**CLIP, **K2, **TOKEN, "estimator.baseline": "leave_one_out", "estimator.scale": "none"},
    "opmd": {**LOG, **K2, **TOKEN, "surrogate.divisor": 2.0, "estimator.baseline": "mean", "estimator.scale": "none"},
    "asymre": {**LOG, **NO_KL, **TOKEN, "surrogate.divisor": 2.0, "estimator.shift": -0.1},
    "topr": {**K2, **TOKEN, "surrogate.cap": 1.0, "surrogate.threshold": 0.0, "estimator.baseline": "none"},
    "cispo": {**K2, **TOKEN, **GROUP, "surrogate.floor": 0.0, "surrogate.cap": 1.28, "surrogate.mask_high": None},
    "gspo": {**K2, **GROUP, "surrogate.low": 3e-4, "surrogate.high": 4e-4, "surrogate.dual": None,
             "reduction.kind": "sequence"},
    "sapo": {**K2, **TOKEN, **GROUP, "surrogate.positive": 1.0, "surrogate.negative": 1.05},
    "mix": {**CLIP, **TOKEN, **GROUP, "weights.rl": 0.9, "kl.kind": "k2", "kl.coef": 0.001 / 0.9, "repeat_times": 8},
    "mix_chord": {**CLIP, **K2, **TOKEN, **GROUP, "ce_schedule.peak": 0.1, "ce_schedule.valley": 0.1,
                  "ce_schedule.decay_steps": 0, "imitation.weight": "uncertainty"},
    "sppo": {**NO_KL, **TOKEN, "surrogate.epsilon": 0.3, "estimator.baseline": "mean", "estimator.scale": "none"},
    "rec": {**LOG, **K2, **TOKEN, "surrogate.keep": "all", "surrogate.weight": "none", "estimator.scale": "none"},
    "multi_step_grpo": {**CLIP, **K2, **TOKEN, **GROUP, "estimator.step_norm": False, "repeat_times": 8},
    "gigpo": {**CLIP, **K2, **TOKEN, "estimator.omega": 1.0, "estimator.scale": "none", "estimator.epsilon": 1e-6},
    "on_policy_distill": {**CLIP, **NO_KL, **TOKEN, "estimator.kl_coef": 1.0, "repeat_times": 1},
    "jsd": {**CLIP, **NO_KL, **TOKEN, "estimator.beta": 0.5, "estimator.kl_coef": 1.0},
    "m2po": {**NO_KL, "surrogate.kind": "linear", "correction.0.bound": 0.04, **GROUP},
}  # fmt: skip
"""Defaults of Trinity-RFT 0.6's algorithms, as read from their classes, in the names here."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_alone_has_trinitys_defaults(name: str) -> None:
    found, config = migrated({"algorithm_type": name})
    wanted = DEFAULTS[name]
    assert {place: at(config, place) for place in wanted} == wanted
    assert config.algorithm_type == ALIASES.get(name, name)
    assert not [one for one in found.left_out if one.matters]


def test_the_defaults_name_functions_that_are_known() -> None:
    assert set(POLICY_LOSS_DEFAULTS) == set(POLICY_LOSSES)
    for name, algorithm in ALGORITHMS.items():
        assert ALIASES.get(name, name) in PRESETS
        assert algorithm.policy_loss_fn in POLICY_LOSSES
        section_of(advantage_fn=algorithm.advantage_fn or None)
    for name, arguments in ADVANTAGE_DEFAULTS.items():
        section_of(advantage_fn=name, advantage_fn_args=dict(arguments))


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        ({"algorithm_type": "grpo", "policy_loss_fn": "rec", "policy_loss_fn_args": {"clip_mode": "ring"}},
         {"surrogate.outer_low": 0.4, "surrogate.outer_high": 0.4, "surrogate.weight": "none"}),
        ({"algorithm_type": "grpo", "policy_loss_fn": "rec"}, {"surrogate.keep": "all", "surrogate.weight": "none"}),
        ({"algorithm_type": "grpo", "kl_loss_fn_args": {"kl_coef": "1e-2"}}, {"kl.kind": "k2", "kl.coef": 0.01}),
        ({"algorithm_type": "grpo", "kl_loss_fn": "k1", "kl_loss_fn_args": {"kl_coef": 0}}, {"kl": None}),
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {"clip_range_low": "${oc.env:NO_SUCH,0.1}"}},
         {"surrogate.high": 0.2}),
        ({"algorithm_type": "grpo", "loss_agg_mode": "seq-mean-token-sum"}, {"reduction.kind": "sequence_sum"}),
        ({"algorithm_type": "mix", "policy_loss_fn_args": {"mu": 0.2, "ppo_mini_batch_size": 8}},
         {"weights.ce": 0.2, "kl.coef": 0.00125}),
        ({"algorithm_type": "grpo", "advantage_fn": "clipv", "advantage_fn_args": {"max_frac": 0.1}},
         {"correction.0.bound": 2.0, "correction.0.share": 0.1}),
        ({"algorithm_type": "grpo", "add_strategy": "step_wise_grpo"}, {"algorithm_type": "multi_step_grpo"}),
        ({"algorithm_type": "asymre", "entropy_loss_fn_args": {"entropy_coef": 0.1}}, {"entropy_coef": 0.0}),
        ({"algorithm_type": "asymre", "entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": 0.1}},
         {"entropy_coef": 0.1}),
        ({"algorithm_type": "grpo", "bypass_old_logprobs": False}, {"anchor": "old"}),
    ],
    ids=str,
)  # fmt: skip
def test_the_rest_of_a_section_has_trinitys_defaults(algorithm: Section, wanted: Section) -> None:
    found = migrate({"model": {"model_path": "m"}, "algorithm": algorithm})
    config = load_config(found.settings).algorithm
    assert {place: at(config, place) for place in wanted} == pytest.approx(wanted)


def test_intended_differences_are_comments() -> None:
    for name in ("dpo", "sapo", "jsd", "ppo", "gigpo", "mix", "mix_chord"):
        found, _ = migrated({"algorithm_type": name})
        assert "Trinity-RFT" in found.comments["algorithm", "algorithm_type"][0]


@pytest.mark.parametrize("name", ["reclip", "opmd_reweight_adv"])
def test_an_algorithm_of_somebody_else_stays_for_the_check_of_the_result(name: str) -> None:
    found = migrate({"model": {"model_path": "m"}, "algorithm": {"algorithm_type": name, "policy_loss_fn": "own"}})
    assert found.settings["algorithm"]["algorithm_type"] == name
    assert found.settings["algorithm"]["policy_loss_fn"] == "own"


@pytest.mark.parametrize(
    ("functions", "kept", "absent"),
    [
        ({"policy_loss_fn": "own", "policy_loss_fn_args": {"x": 1}}, {"kl", "estimator"}, {"surrogate", "reduction"}),
        ({"advantage_fn": "own", "advantage_fn_args": {"x": 1}}, {"kl", "surrogate"}, {"estimator"}),
        ({"kl_loss_fn": "own", "kl_loss_fn_args": {"x": 1}}, {"estimator", "surrogate"}, {"kl"}),
        ({"entropy_loss_fn": "own", "entropy_loss_fn_args": {"x": 1}}, {"kl", "surrogate"}, {"entropy_coef"}),
    ],
)
def test_a_function_of_the_user_stays_beside_trinitys_defaults(
    functions: Section, kept: set[str], absent: set[str]
) -> None:
    found = migrate({"model": {"model_path": "m"}, "algorithm": {"algorithm_type": "grpo", **functions}})
    section = found.settings["algorithm"]
    assert {name: section[name] for name in functions} == functions
    assert kept <= section.keys()
    assert not absent & section.keys()
