"""The algorithm section: presets, pieces over them, estimators, and the names of Trinity-RFT."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trinity_mq.algorithms.estimators import ESTIMATORS
from trinity_mq.config import AlgorithmConfig, load_config
from trinity_mq.config.algorithm import CriticConfig
from trinity_mq.config.algorithm.checks import algorithm_problems
from trinity_mq.config.algorithm.pieces import Clip, LossConfig, ReferenceKL, Truncate
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.reference import RewardKL
from trinity_mq.config.estimators import (
    KINDS,
    DiscountedEstimator,
    Estimator,
    EstimatorBase,
    EstimatorPlugin,
    GroupEstimator,
)


def loss_of(**section: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(section)


def pieces(config: AlgorithmConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LossConfig.model_fields}


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_valid_contradicts_itself_nowhere_and_says_what_it_is(name: str) -> None:
    preset, config = PRESETS[name], loss_of(algorithm_type=name)
    assert config.algorithm_type == name
    assert preset.summary.endswith(".")
    assert preset.source
    assert preset.formula
    assert preset.estimator["kind"]
    assert list(algorithm_problems(config, 0, 4096)) == []
    assert bool(list(algorithm_problems(config, 8, 4096))) == (name == "vespo"), "on old data"


def test_a_preset_overridden_piece_by_piece_is_the_one_written_by_hand() -> None:
    by_hand = loss_of(
        ratio={"kind": "sequence"},
        surrogate={"kind": "clip", "low": 3e-4, "high": 4e-4, "dual": None},
        reduction={"kind": "sequence"},
    )
    assert pieces(by_hand) == pieces(loss_of(algorithm_type="gspo"))
    assert loss_of(algorithm_type="gspo", ratio={"kind": "token"}).reduction.kind == "sequence"


def test_a_field_keeps_the_others_of_the_presets_piece_and_another_kind_does_not() -> None:
    assert loss_of(algorithm_type="dapo", surrogate={"low": 0.1}).surrogate == Clip(low=0.1, high=0.28, dual=10.0)
    assert loss_of(algorithm_type="dapo", surrogate={"kind": "truncate"}).surrogate == Truncate()
    assert loss_of(algorithm_type="ppo", kl=None).kl is None


def test_a_schedule_trains_on_samples_whatever_the_weight_of_rl() -> None:
    scheduled: dict[str, Any] = {"weights": {"rl": 0}, "ce_schedule": {}}
    [problem] = algorithm_problems(loss_of(estimator="none", **scheduled), 0, 4096)
    assert "algorithm.estimator is none, but ce_schedule gives rl a weight: sampled answers" in problem
    assert list(algorithm_problems(loss_of(entropy_coef=0.01, **scheduled), 0, 4096)) == []


def test_what_was_resolved_resolves_to_itself() -> None:
    config = AlgorithmConfig.model_validate({"clip_range_high": 0.3, "repeat_times": 4})
    assert AlgorithmConfig.model_validate(config.model_dump(mode="json")) == config


ADAPTIVE = {"adaptive": True, "kl_coef": 0.01, "target_kl": 0.1, "horizon": 100}


@pytest.mark.parametrize(
    ("section", "reward_kl"),
    [
        ({}, None),
        ({"kl_penalty_fn": "none"}, None),
        ({"kl_penalty_fn": "none", "kl_penalty_fn_args": ADAPTIVE}, None),
        ({"kl_penalty_fn_args": ADAPTIVE}, None),
        ({"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.0}}, None),
        ({"kl_penalty_fn": "k1"}, RewardKL()),
        ({"kl_penalty_fn": "low_var_kl"}, RewardKL(kind="k3_clamped")),
        ({"kl_penalty_fn": "corrected_k3", "kl_penalty_fn_args": {"kl_coef": 0.1}}, RewardKL(kind="k3", coef=0.1)),
        (
            {"kl_penalty_fn": "k2", "kl_penalty_fn_args": ADAPTIVE},
            RewardKL(kind="k2", coef=0.01, target=0.1, horizon=100),
        ),
        (
            {"kl_penalty_fn": "abs", "kl_penalty_fn_args": ADAPTIVE | {"adaptive": False}},
            RewardKL(kind="abs", coef=0.01),
        ),
    ],
)
def test_the_kl_penalty_of_trinity_is_the_kl_in_the_rewards(section: dict[str, Any], reward_kl: Any) -> None:
    config = loss_of(algorithm_type="reinforceplusplus", **section)
    assert config.reward_kl == reward_kl
    assert config.advantage_agent == ("operator" if reward_kl is None else "trainer")
    assert config.kl == ReferenceKL(kind="k2", coef=0.001), "the term in the loss is another one"
    in_the_rewards = loss_of(algorithm_type="reinforceplusplus", reward_kl={"kind": "k1"})
    assert list(algorithm_problems(in_the_rewards, 0, 4096)) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kl_penalty_fn": "k9"}, "kl_penalty_fn is 'k9', wanted one of k1, k2, k3"),
        ({"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"adaptive": True}}, "without target_kl or horizon, wanted"),
        ({"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"coef": 1}}, r"kl_penalty_fn_args\.coef is not known, wanted"),
        ({"reward_kl": {"coef": 0.0}}, "greater than 0"),
        ({"algorithm_type": "grpoo"}, "algorithm_type 'grpoo' is not known"),
        ({"surrogate": {"kind": "clipp"}}, "kind is not one of clip, truncate"),
        ({"surrogate": {"kind": "clip", "lo": 0.1}}, "Extra inputs"),
        ({"surrogate": {"low": "x"}}, "valid number"),
        ({"correction": [{"kind": "weight", "high": -1}]}, "greater than 0"),
        ({"reduction": {"constant": 9}}, "only constant and sequence_constant have a constant"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode is 'mean', wanted one of token-mean"),
        ({"estimator": {"kind": "grop"}}, "kind is 'grop', wanted one of group"),
        ({"kl_coef": 0.1}, "set kl: {kind: k2, coef: 0.1}"),
        ({"advantage_fn": "codd"}, "advantage_fn is 'codd', wanted one of ppo, grpo"),
        ({"surrogate": {"kind": "gate"}, "clip_range": 0.2}, "no meaning for the surrogate 'gate'"),
    ],
)
def test_errors_are_found_when_the_configuration_is_read(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig.model_validate(section)


VERL = {"trainer": {"critic_warmup": 3}, "critic": {"optim": {"lr": 1e-4}, "grad_clip": 2.0, "cliprange_value": 0.2}}


@pytest.mark.parametrize(
    ("trainer", "critic", "wanted"),
    [
        ({"critic_warmup": 5}, None, CriticConfig(warmup_steps=5)),
        ({"critic_warmup": 5, "trainer_config": None}, {"lr": 1e-3}, CriticConfig(warmup_steps=5, lr=1e-3)),
        ({"trainer_config": VERL}, {"lr": 1e-3}, CriticConfig(warmup_steps=3, lr=1e-3, clip_grad=2.0, value_clip=0.2)),
        ({"trainer_config": {"critic": {"optim": {}}}}, None, CriticConfig()),
    ],
)
def test_the_critic_of_trinity_is_found_in_its_trainer(trainer: Any, critic: Any, wanted: CriticConfig) -> None:
    algorithm = {"algorithm_type": "ppo"} | ({} if critic is None else {"critic": critic})
    config = load_config({"model": {"tiny": {}}, "algorithm": algorithm, "trainer": trainer | {"save_interval": 7}})
    assert config.algorithm.critic == wanted
    assert config.trainer.save_interval == 7


def test_the_constant_is_the_longest_answer_unless_it_is_said() -> None:
    data = {"model": {"tiny": {}, "max_response_tokens": 48}, "algorithm": {"algorithm_type": "dr_grpo"}}
    assert load_config(data).reduction.constant == 48
    assert load_config(data, ["algorithm.reduction.constant=7"]).reduction.constant == 7
    assert load_config(data, ["algorithm.reduction.kind=token"]).reduction.constant is None


ESTIMATOR: TypeAdapter[EstimatorBase] = TypeAdapter(Estimator)


def test_every_kind_is_a_function_and_agents_read_what_was_written() -> None:
    assert set(ESTIMATORS) == set(KINDS)
    assert ESTIMATOR.validate_python("discounted") == DiscountedEstimator()
    for one in (*map(ESTIMATOR.validate_python, KINDS), EstimatorPlugin(kind="my.own", args={"a": 1})):
        assert ESTIMATOR.validate_python(ESTIMATOR.dump_python(one, mode="json")) == one


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "grop",
            "kind is 'grop', wanted one of group, discounted, gigpo, cod, distill, jsd, gae, none, or the dotted path",
        ),
        ({"scale": "batch"}, "kind is None, wanted one of group"),
        ({"kind": "group", "epsilom": 1}, "epsilom"),
        ({"kind": "group", "tau": 0.0}, "greater than 0"),
        ({"kind": "group", "shift": float("nan")}, "finite"),
        ({"kind": "group", "baseline": "none"}, "scale is 'group' with baseline 'none', wanted none, batch or batch_"),
        ({"kind": "group", "baseline": "role_mean", "scale": "mean"}, "scale is 'mean' with baseline 'role_mean'"),
        (
            {"kind": "group", "baseline": "second_best", "shift": 1.0},
            "shift is 1.0 with baseline 'second_best', wanted 0",
        ),
        ({"kind": "jsd", "beta": 1.0}, "less than 1"),
        ({"kind": "my..function"}, "pattern"),
        ({"kind": "my.function", "args": {"a": float("inf")}}, "a is inf, wanted a finite number"),
    ],
)
def test_what_does_not_fit_is_said(given: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ESTIMATOR.validate_python(given)


def test_what_an_estimator_needs_depends_on_its_fields() -> None:
    given = {name: ESTIMATOR.validate_python({"kind": name}) for name in KINDS} | {
        "alone": GroupEstimator(baseline="none", scale="batch"),
        "roles": GroupEstimator(baseline="role_mean", scale="none"),
        "own": EstimatorPlugin(kind="my.own"),
    }
    assert {name for name, args in given.items() if args.compares_runs} == {"group", "gigpo", "cod", "own"}
    assert {name for name, args in given.items() if args.where == "trainer"} == {"roles", "gae"}
    needs = {"roles": ("roles",), "gae": ("critic",), "distill": ("teacher",), "jsd": ("teacher",)}
    assert {name: args.needs for name, args in given.items() if args.needs} == needs
    assert {name for name, args in given.items() if not args.needs_reward} == {"distill", "jsd", "none"}
