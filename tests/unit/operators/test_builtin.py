"""Built-in operators that sample, de-duplicate, shape and measure, and the metrics before any operator."""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.operators.test_operators import chain
from trinity_agents.operator.chain_run import outcome_metrics
from trinity_mq.config import OperatorConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.operators import OPERATORS, OperatorConfigError, create_operators

LENGTHS = {"max_response_length": 10, "cache_length": 4}
SHAPING = {
    "reward_shaping_configs": [
        {"stats_key": "quality", "weight": 0.5},
        {"stats_key": "cost", "op_type": "DIV", "weight": 2},
    ]
}
ALONE = sorted({*OPERATORS} - {"human_review"})
"""Operators that need nobody else; the tests of human review are beside those of its agent."""
ARGUMENTS: dict[str, dict[str, Any]] = {"length_penalty": LENGTHS, "reward_shaping_mapper": SHAPING}


def exp(
    task: int = 0, run: int = 0, step: int = 0, reward: float | None = 1.0, length: int = 2, **how: Any
) -> Experience:
    eid = EID(batch=1, task=task, run=run, step=step)
    tokens = how.pop("tokens", [1, 2, *range(length)])
    return Experience(eid=eid, tokens=tokens, prompt_length=2, reward=reward, **how)


def own(metrics: dict[str, float]) -> dict[str, float]:
    """An operator's metrics by their short names."""
    return {key.rpartition("/")[2]: value for key, value in metrics.items() if "/0_" in key and "time/" not in key}


# -- DAPO dynamic sampling


async def test_dynamic_sampling_keeps_tasks_of_which_some_runs_are_right() -> None:
    right, wrong = {"accuracy": 1.0}, {"accuracy": 0.0}
    mixed = [exp(0, 0, metrics=right), exp(0, 1, metrics=wrong), exp(0, 2, metrics=wrong)]
    all_right = [exp(1, run, metrics=right, reward=0.0) for run in range(2)]
    all_wrong = [exp(2, run, metrics=wrong, reward=1.0) for run in range(2)]
    alone = [exp(3, 0, metrics=right)]
    kept, metrics = await chain("dapo_dynamic_sampling", mixed + all_right + all_wrong + alone)
    assert kept == mixed
    dropped = {"dropped_all_correct": 2, "dropped_all_wrong": 2, "dropped_too_few": 1}
    assert own(metrics) == {"filtered_count": 5, **dropped}


async def test_dynamic_sampling_goes_by_the_last_step_and_else_by_the_reward() -> None:
    steps = [
        exp(0, run, step, metrics={"accuracy": float(run == 0 or step == 0)}) for run in range(2) for step in (1, 0)
    ]
    rewards = [exp(1, run, reward=0.4 + run / 5) for run in range(2)]
    unknown = [exp(2, run, reward=None if run else 1.0) for run in range(2)]
    kept, metrics = await chain("dapo_dynamic_sampling", steps + rewards + unknown, correct_threshold=0.5)
    assert kept == steps + rewards
    assert own(metrics)["dropped_too_few"] == 2
    assert (await chain("dapo_dynamic_sampling", rewards, metric_key="score"))[0] == []


# -- de-duplication


async def test_equal_runs_of_a_task_are_kept_once() -> None:
    first = [exp(0, 0, 0, tokens=[1, 2, 3]), exp(0, 0, 1, tokens=[1, 2, 4])]
    again = [exp(0, 1, 1, tokens=[1, 2, 4]), exp(0, 1, 0, tokens=[1, 2, 3])]
    shorter = [exp(0, 2, 0, tokens=[1, 2, 3])]
    swapped = [exp(0, 3, 0, tokens=[1, 2, 4]), exp(0, 3, 1, tokens=[1, 2, 3])]
    other_task = [exp(1, 0, 0, tokens=[1, 2, 3]), exp(1, 0, 1, tokens=[1, 2, 4])]
    kinds = (torch.int32, torch.int64)
    wide = [exp(2, run, tokens=torch.tensor([1, 2, 3], dtype=kind)) for run, kind in enumerate(kinds)]
    kept, metrics = await chain("deduplication", first + again + shorter + swapped + other_task + wide)
    assert kept == [*first, *shorter, *swapped, *other_task, wide[0]]
    assert own(metrics) == {"filtered_count": 3, "duplicate_runs": 2}


async def test_the_mask_and_what_was_seen_tell_runs_apart() -> None:
    masked = [exp(0, run, action_mask=[True, bool(run)]) for run in range(2)]
    pictures = [exp(1, run, multi_modal_inputs={"pixels": torch.zeros(2)}) for run in range(2)]
    pairs = [Experience(eid=EID(1, 2, run), tokens=[1], chosen=[2], rejected=[3 + run % 2]) for run in range(3)]
    exps = masked + pictures + pairs
    kept, _ = await chain("deduplication", exps)
    assert kept == exps[:-1]
    kept, metrics = await chain("deduplication", [exps[0], copy.deepcopy(exps[0])])
    assert kept == exps[:1]
    assert own(metrics) == {"filtered_count": 1, "duplicate_runs": 0}, "the same experience twice"


# -- rewards


async def test_rewards_are_shaped_by_statistics() -> None:
    exps = [
        exp(run=0, reward=1.0, info={"quality": 2.0}),
        exp(run=1, reward=1.0, metrics={"quality": 2.0, "cost": 4.0}),
        exp(run=2, reward=1.0, info={"cost": 0.0, "quality": "high"}),
        exp(run=3, reward=None, info={"quality": 2.0}),
        exp(run=4, reward=1.0, info={"quality": np.float32(4.0), "cost": math.nan}),
    ]
    kept, metrics = await chain("reward_shaping_mapper", exps, **SHAPING)
    assert [each.reward for each in kept] == [2.0, 2.0 / 8.0, 1.0, None, 3.0]
    assert own(metrics) == {
        "shaped_count": 3,
        "reward_diff_mean": pytest.approx((1.0 - 0.75 + 0.0 + 2.0) / 4),
        "reward_diff_max": 2.0,
        "reward_diff_min": -0.75,
    }
    for op, reward in {"ADD": 5.0, "SUB": -1.0, "MUL": 6.0, "DIV": 2 / 3}.items():
        configs = [{**X, "op_type": op, "weight": 1.5}]
        kept, _ = await chain("reward_shaping_mapper", [exp(reward=2.0, info={"x": 2})], reward_shaping_configs=configs)
        assert kept[0].reward == pytest.approx(reward), op


async def test_long_responses_lose_reward() -> None:
    exps = [exp(run=run, reward=1.0, length=length) for run, length in enumerate((1, 6, 7, 8, 10, 30))]
    exps.append(exp(run=9, reward=None, length=30))
    kept, metrics = await chain("length_penalty", exps, **LENGTHS, penalty_factor=0.5)
    assert [each.reward for each in kept] == [1.0, 1.0, 0.875, 0.75, 0.5, 0.5, None]
    assert (own(metrics)["penalized_count"], own(metrics)["reward_diff_min"]) == (4, -0.5)


@pytest.mark.parametrize("name", ALONE)
async def test_huge_rewards_are_no_obstacle(name: str) -> None:
    huge = {"metrics": {"quality": 1e308, "accuracy": -1e308}, "info": {"cost": 1e-308}}
    rewards = (1e308, -1e308, 1e308)
    exps = [exp(task, run, reward=reward, **huge) for task in range(2) for run, reward in enumerate(rewards)]
    _, metrics = await chain(name, exps, **ARGUMENTS.get(name, {}))
    assert metrics["experience_pipeline/experience_count"] <= 6


X = {"stats_key": "x"}
ARGUMENTS_THAT_DO_NOT_FIT = [
    ("reward_filter", {"threshold": "x"}, "threshold is 'x'"),
    ("reward_filter", {"threshold": None}, "threshold is None"),
    ("reward_filter", {"threshold": [1]}, r"threshold is \[1\]"),
    ("reward_std_filter", {"threshold": {}}, "threshold is {}"),
    ("dapo_dynamic_sampling", {"correct_threshold": "half"}, "correct_threshold is 'half'"),
    ("dapo_dynamic_sampling", {"metric_key": 3}, "metric_key is 3"),
    ("length_penalty", {"max_response_length": 10.5, "cache_length": 4}, "max_response_length is 10.5"),
    ("length_penalty", LENGTHS | {"penalty_factor": "x"}, "penalty_factor is 'x'"),
    ("reward_shaping_mapper", {"reward_shaping_configs": 3}, "reward_shaping_configs is 3"),
    *(
        ("reward_shaping_mapper", {"reward_shaping_configs": [wrong]}, r"reward_shaping_configs\[0\].*wanted stats_key")
        for wrong in ({}, {"stats_key": 1}, {**X, "op_type": "POW"}, {**X, "weight": "1"}, {"x": 1}, 3)
    ),
    *(
        ("length_penalty", {"max_response_length": most, "cache_length": cache}, "wanted 1 to max_response_length")
        for most, cache in ((10, 0), (10, 11), (0, 0))
    ),
    ("reward_filter", {"treshold": 1.0}, "treshold"),
]


@pytest.mark.parametrize(("name", "args", "message"), ARGUMENTS_THAT_DO_NOT_FIT)
def test_arguments_that_do_not_fit_are_refused_when_the_operator_is_made(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(OperatorConfigError, match=f"operator '{name}' cannot be made.*{message}"):
        create_operators([OperatorConfig(name=name, args=args)])


@pytest.mark.parametrize("args", [{"threshold": math.nan}, {"a": [{"b": math.inf}]}, {"a": {"b": (-math.inf,)}}])
def test_arguments_that_are_no_finite_numbers_are_refused_when_the_configuration_is_read(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"args.* is (nan|-?inf), wanted a finite number"):
        OperatorConfig(name="reward_filter", args=args)


async def test_pass_rates() -> None:
    exps = [exp(0, run, step, reward=float(run == 0)) for run in range(4) for step in range(run + 1)]
    exps += [exp(1, run, reward=1.0) for run in range(2)] + [exp(2, 0, reward=None, info={"kept": 1})]
    kept, metrics = await chain("pass_rate_calculator", exps)
    assert [each.info.get("pass_rate") for each in kept] == [0.25] * 10 + [1.0] * 2 + [None]
    assert kept[-1].info == {"kept": 1}
    found = {key.removeprefix("selection/"): value for key, value in metrics.items() if key.startswith("selection/")}
    half = dict.fromkeys(("valid_ratio", "strict_valid_ratio", "<1_ratio", "<15_16_ratio"), 0.5)
    assert found == {"pass_rate": 0.625, ">0_ratio": 1.0, ">1_16_ratio": 1.0, **half}


# -- a list of experiences

NUMBERS = st.none() | st.floats(-4, 4) | st.sampled_from([0.0, 1.0, math.nan, math.inf])
STATISTICS = st.dictionaries(st.sampled_from(["accuracy", "quality", "cost"]), st.floats(-2, 2), max_size=3)


@st.composite
def experiences(draw: st.DrawFn) -> list[Experience]:
    found = []
    for _ in range(draw(st.integers(0, 12))):
        place = {"task": draw(st.integers(0, 2)), "run": draw(st.integers(0, 3)), "step": draw(st.integers(0, 1))}
        cut = draw(st.sampled_from([None, None, "response_truncated"]))
        response = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        how = {"info": draw(STATISTICS), "metrics": draw(STATISTICS), "reward": draw(NUMBERS)}
        found.append(exp(**place, **how, truncate_status=cut, tokens=[5, 5, *response]))
    return found


@pytest.mark.parametrize("name", ALONE)
@given(exps=experiences())
@settings(max_examples=10, deadline=None)
async def test_an_operator_by_itself_takes_a_list_and_leaves_its_experiences_as_they_were(
    name: str, exps: list[Experience]
) -> None:
    given_before = copy.deepcopy(exps)
    (operator,) = create_operators([OperatorConfig(name=name, args=ARGUMENTS.get(name, {}))])
    kept, _ = await operator.process(exps)
    assert kept == (await chain(name, ExperienceBatch.of(exps), **ARGUMENTS.get(name, {})))[0]
    assert exps == given_before


def runs(groups: list[list[float | None]], accuracy: list[list[float]] | None = None) -> ExperienceBatch:
    return ExperienceBatch.of(
        [
            Experience(
                eid=EID(batch=1, task=task, run=run),
                tokens=[1, 2, 3],
                prompt_length=1,
                reward=reward,
                metrics={} if accuracy is None else {"accuracy": accuracy[task][run]},
            )
            for task, group in enumerate(groups)
            for run, reward in enumerate(group)
        ]
    )


def test_rewards_are_over_runs_and_groups_that_teach_nothing_are_counted() -> None:
    found = outcome_metrics(runs([[1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.5], [None, 2.0], [None]]))
    rewards = [1, 1, 0, 0, 0, 0, 0.5, 2]
    assert found == pytest.approx(
        {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.stdev(rewards),
            "reward/min": 0.0,
            "reward/max": 2.0,
            "groups/size": 2.0,
            "groups/zero_std_all_correct": 1.0,
            "groups/zero_std_all_wrong": 1.0,
            "reward_std_within_group": statistics.stdev([0, 0.5]) / 3,
        }
    )


def test_what_is_right_says_the_accuracy_where_there_is_one() -> None:
    """With a penalty of form alone, every reward may be negative, and a right answer is worth no more than 0."""
    found = outcome_metrics(runs([[-1.0, -1.0], [0.5, 0.5]], accuracy=[[1.0, 1.0], [0.0, 0.0]]))
    assert (found["groups/zero_std_all_correct"], found["groups/zero_std_all_wrong"]) == (1.0, 1.0)
    unknown = outcome_metrics(runs([[0.5, 0.5]], accuracy=[[math.nan, math.nan]]))
    assert (unknown["groups/zero_std_all_correct"], unknown["groups/zero_std_all_wrong"]) == (0.0, 0.0)


def test_without_a_reward_there_is_nothing_to_tell() -> None:
    assert outcome_metrics(runs([[None, None]])) == outcome_metrics(ExperienceBatch.of([])) == {}
    alone = outcome_metrics(runs([[1.0]]))
    assert alone["groups/size"] == 1.0
    assert "reward_std_within_group" not in alone
    assert alone["reward/std"] == 0.0
    steps = [
        Experience(eid=EID(batch=1, task=0, run=0, step=step), tokens=[1, 2], prompt_length=1, reward=reward)
        for step, reward in enumerate([5.0, 5.0, 1.0])
    ]
    last = outcome_metrics(ExperienceBatch.of(steps))
    assert (last["reward/mean"], last["reward/max"], last["groups/size"]) == (1.0, 1.0, 1.0), "the last step counts"
