"""Properties that all estimators share, and what is particular to each."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.algorithms.estimators.runs import LARGEST, are_equal, center, deviation
from trinity_mq.algorithms.estimators.teacher import distillation_advantages
from trinity_mq.algorithms.plugins import PluginError
from trinity_mq.config.estimators import (
    DiscountedEstimator,
    DistillEstimator,
    DotsEstimator,
    Estimator,
    EstimatorPlugin,
    GaeEstimator,
    GigpoEstimator,
    GroupEstimator,
    LengthPenaltyWeights,
)
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.runtime.plugins import UnknownNameError

GROUP: dict[str, GroupEstimator] = {
    "mean": GroupEstimator(),
    "leave_one_out": GroupEstimator(baseline="leave_one_out", scale="batch"),
    "logavgexp": GroupEstimator(baseline="logavgexp", scale="none"),
    "length_weighted": GroupEstimator(baseline="length_weighted", scale="population"),
    "second_best": GroupEstimator(baseline="second_best", scale="batch_raw"),
    "max_rl": GroupEstimator(scale="mean"),
    "whitened": GroupEstimator(scale="none", whiten=True),
    "balanced": GroupEstimator(scale="none", drop="balance"),
    "step_norm": GroupEstimator(step_norm=True),
}
ALL: dict[str, Estimator] = {
    **GROUP,
    "none": GroupEstimator(baseline="none", scale="none"),
    "nonzero": GroupEstimator(scale="none", nonzero_scale=True),
    "ranked": GroupEstimator(rank_penalty=0.5),
    "sized": GroupEstimator(length_penalty=LengthPenaltyWeights()),
    "roles": GroupEstimator(baseline="role_mean", scale="none"),
    "discounted": DiscountedEstimator(gamma=0.9),
    "gae": GaeEstimator(gamma=0.99, lam=0.95),
    "gigpo": GigpoEstimator(scale="group", gamma=0.9),
}


def experience(
    run: int, reward: float | None = 0.0, mask: Sequence[bool] = (True,), task: int = 0, step: int = 0, **fields: Any
) -> Experience:
    return Experience(
        eid=EID(7, task, run, step, f"{step:012x}"),
        tokens=[3] * (1 + len(mask)),
        prompt_length=1,
        action_mask=list(mask),
        reward=reward,
        **fields,
    )


@st.composite
def batches(draw: st.DrawFn, *, low: float = -4.0, equal: bool = False) -> list[Experience]:
    """Experiences of up to three tasks with two to five runs of one to three steps."""
    rewards = st.integers(int(low * 8), 32).map(lambda number: number / 8)  # exact in float32
    logprobs = st.floats(-5, 0, width=32)
    rows = []
    for task in range(draw(st.integers(1, 3))):
        common = draw(rewards)
        for run in range(draw(st.integers(2, 5))):
            reward = common if equal else draw(rewards)
            for step in range(draw(st.integers(1, 3))):
                mask = draw(st.lists(st.booleans(), min_size=1, max_size=4))
                row = experience(
                    run,
                    reward,
                    mask,
                    task,
                    step,
                    logprobs=[draw(logprobs) for _ in mask],
                    info={"env_state_hash": draw(st.integers(0, 2)), "role": draw(st.sampled_from("ab"))},
                )
                rows.append(row)
    return rows


def advantages(
    rows: Sequence[Experience], args: Estimator, values: Mapping[str, list[float]] | None = None
) -> dict[str, list[float]]:
    """Return the advantages by the id of the experience."""
    given: dict[str, Any] = {}
    if isinstance(args, GaeEstimator):
        flat = [value for one in rows for value in (values or {}).get(one.eid.uid, [0.25] * one.action_mask.shape[0])]
        given["values"] = torch.tensor(flat)
    if isinstance(args, GroupEstimator) and args.baseline == "role_mean":
        given["baselines"] = {}
    kept, metrics = estimate(ExperienceBatch.of(rows), args, **given)
    assert all(map(math.isfinite, metrics.values()))
    return {one.eid.uid: one.advantages.tolist() for one in kept}


def same(found: Mapping[str, list[float]], expected: Mapping[str, list[float]], tolerance: float = 1e-5) -> None:
    assert {uid: pytest.approx(row, rel=tolerance, abs=tolerance) for uid, row in expected.items()} == dict(found)


@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("name", ALL)
@given(rows=batches(), data=st.data())
def test_tokens_that_are_not_trained_have_no_part_and_get_nothing(
    name: str, rows: list[Experience], data: st.DataObject
) -> None:
    before = advantages(rows, ALL[name])
    for row in rows:
        assert row.action_mask is not None
        assert row.logprobs is not None
        row.logprobs = torch.where(row.action_mask, row.logprobs, data.draw(st.sampled_from([-99.0, math.nan])))
    values = {
        one.eid.uid: [0.25 if flag else data.draw(st.sampled_from([5.0, math.nan])) for flag in one.action_mask]
        for one in rows
    }
    after = advantages(rows, ALL[name], values)
    same(after, before, 0)
    for row in rows:
        trained = row.action_mask.tolist()
        assert not any(value for value, flag in zip(after.get(row.eid.uid, []), trained, strict=False) if not flag)


@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("name", ALL)
@given(rows=batches(), seed=st.integers(0, 1000))
def test_the_order_of_experiences_does_not_matter(name: str, rows: list[Experience], seed: int) -> None:
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    same(advantages(shuffled, ALL[name]), advantages(rows, ALL[name]))


@settings(deadline=None, max_examples=20)
@pytest.mark.parametrize("name", [*GROUP, "nonzero", "gigpo"])
@given(rows=batches(equal=True))
def test_equal_rewards_teach_nothing(name: str, rows: list[Experience]) -> None:
    if name == "gigpo":  # its steps have returns of their own: one step each
        rows = [row for row in rows if row.eid.step == 0]
    found = advantages(rows, ALL[name])
    assert len(found) == len(rows)
    assert not any(value for row in found.values() for value in row)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_and_a_batch_without_rewards_are_empty(name: str) -> None:
    assert advantages([], ALL[name]) == {}
    rows = [experience(run, None, logprobs=[-1.0], info={"env_state_hash": 1, "role": "a"}) for run in range(3)]
    assert advantages(rows, ALL[name]) == {}


def test_advantages_are_finite_in_float32() -> None:
    rows = [experience(run, reward) for run, reward in enumerate([1e-30, 2e-30])]
    (low, high) = first(advantages(rows, GroupEstimator(shift=-1e20, epsilon=0.0)))
    assert low == high == pytest.approx(1e30)
    values = torch.full((2,), -1e200, dtype=torch.float64)
    kept, _ = estimate(ExperienceBatch.of(rows), GaeEstimator(whiten=False), values=values)
    assert [one.advantages.tolist() for one in kept] == [[pytest.approx(1e30)]] * 2


@pytest.mark.parametrize("name", GROUP)
def test_equal_rewards_whose_mean_is_rounded_are_equal(name: str) -> None:
    rows = [experience(run, 0.1, [True] * (run + 1)) for run in range(3)]
    assert first(advantages(rows, GROUP[name])) == [0.0] * 3
    assert first(advantages(rows, GROUP[name].model_copy(update={"scale": "none"}))) == [0.0] * 3
    assert advantages(rows, GROUP[name].model_copy(update={"std_threshold": 0.0})) == {}


def test_without_trained_tokens_lengths_weigh_equally() -> None:
    rows = [experience(run, float(run), [False]) for run in range(3)]
    kept, metrics = estimate(ExperienceBatch.of(rows), GROUP["length_weighted"])
    assert len(kept) == 3
    assert metrics["rollout/zero_variance_groups"] == 0


def first(found: Mapping[str, list[float]]) -> list[float]:
    return [row[0] for row in found.values()]


def test_small_groups_count_only_where_runs_are_compared() -> None:
    rows = [experience(0, 2.0, info={"env_state_hash": 1}), *(experience(run, float(run), task=1) for run in range(3))]
    batch = ExperienceBatch.of(rows)
    assert len(estimate(batch, GROUP["mean"], min_group_runs=2)[0]) == 3
    assert len(estimate(batch, ALL["none"], min_group_runs=2)[0]) == 4
    assert len(estimate(batch, ALL["none"].model_copy(update={"min_group_runs": 2}), min_group_runs=1)[0]) == 3
    assert estimate(batch, GROUP["mean"], min_group_runs=4)[1]["rollout/partial_groups"] == 2
    for compares, number in ((True, 3), (False, 4)):
        function = EstimatorPlugin(kind=f"{HERE}.above", compares=compares)
        assert len(estimate(batch, function, min_group_runs=2)[0]) == number


def test_surplus_runs_below_the_mean_are_dropped_the_same_way_again() -> None:
    rows = [experience(run, 1.0 if run < 2 else 0.0) for run in range(8)]
    kept, metrics = estimate(ExperienceBatch.of(rows), GROUP["balanced"])
    assert sorted(one.reward or 0.0 for one in kept) == [0.0, 0.0, 1.0, 1.0]
    assert [float(one.advantages[0]) for one in kept if one.reward] == [0.5, 0.5], "the mean is that of the kept"
    assert metrics["rollout/surplus_runs"] == 4
    again, _ = estimate(ExperienceBatch.of(rows[::-1]), GROUP["balanced"])
    assert {one.eid.run for one in again} == {one.eid.run for one in kept}
    others = [experience(run, 1.0 if run < 2 else 0.0, task=task) for task in range(20) for run in range(8)]
    chosen = {}
    for one in estimate(ExperienceBatch.of(others), GROUP["balanced"])[0]:
        chosen.setdefault(one.eid.task, set()).add(one.eid.run)
    assert len({frozenset(runs) for runs in chosen.values()}) > 5, "not the same runs of every task"


def test_without_its_greedy_run_a_task_is_partial() -> None:
    args = GroupEstimator(baseline="greedy", scale="none")
    rows = [
        experience(0, 1.0),
        experience(1, 0.25, info={"greedy": True}),
        experience(0, 1.0, task=1),
        experience(1, None, task=1, info={"greedy": True}),
        experience(0, 1.0, task=2, info={"greedy": True}),
    ]
    kept, metrics = estimate(ExperienceBatch.of(rows), args)
    assert [(one.eid.task, one.eid.run, float(one.advantages[0])) for one in kept] == [(0, 0, 0.75)]
    assert metrics["rollout/partial_groups"] == 2
    assert metrics["rollout/missing_rewards"] == 1
    assert advantages([], args) == {}
    with pytest.raises(
        ValueError, match=r"no experience of the batch has info\['greedy'\].* buffer.taskset.workflow_args.greedy_base"
    ):
        advantages([experience(run, 1.0) for run in range(2)], args)


def test_each_role_of_a_run_has_a_reward_and_a_baseline() -> None:
    baselines = {"seller": 0.5}
    rows = [
        experience(0, 1.0, step=0, info={"role": "seller"}),
        experience(0, -1.0, step=1, info={"role": "buyer"}),
        experience(0, -1.0, step=2, info={"role": "buyer"}),
    ]
    args = GroupEstimator(baseline="role_mean", scale="none", decay=0.5)
    kept, _ = estimate(ExperienceBatch.of(rows), args, baselines=baselines)
    assert [float(one.advantages[0]) for one in kept] == [0.5, -1.0, -1.0]
    assert baselines == {"seller": 0.75, "buyer": -0.5}
    with pytest.raises(ValueError, match="no earlier baselines were given; the trainer keeps them"):
        estimate(ExperienceBatch.of(rows), args)
    for info in ({}, {"role": ""}):
        rows[1].info = info
        with pytest.raises(ValueError, match=rf"experience {rows[1].eid.uid} has info\['role'\].*Set experience\.info"):
            estimate(ExperienceBatch.of(rows), args, baselines=baselines)
    assert baselines == {"seller": 0.75, "buyer": -0.5}, "nothing was learned from a batch that cannot be used"


def test_a_likelier_run_is_worth_less_than_one_of_equal_reward() -> None:
    rows = [experience(run, 1.0, logprobs=[-float(run)]) for run in range(3)]
    likely, middle, unlikely = first(advantages(rows, GroupEstimator(scale="none", rank_penalty=0.3)))
    assert (likely, middle, unlikely) == pytest.approx((-0.1, 0.0, 0.1))
    with pytest.raises(ValueError, match="has no logprobs, wanted one per response token; rank_penalty compares"):
        advantages([experience(run, 1.0) for run in range(2)], GroupEstimator(rank_penalty=0.3))


def test_a_run_of_several_steps_is_one_trajectory() -> None:
    rows = [experience(0, 8.0, [True, False, True], step=1), experience(0, 3.0, [True], step=0)]
    found = advantages(rows, DiscountedEstimator(gamma=0.5, whiten=False))
    assert list(found.values()) == [[4.0, 0.0, 8.0], [2.0]]


def test_rewards_of_tokens_replace_the_reward_of_the_run() -> None:
    rows = [experience(0, 8.0, [True, True], token_level_reward=[1.0, 2.0]), experience(1, 4.0, [True, False])]
    rows += [experience(2, 1.0, [True, True], token_level_reward=[1.0, math.nan]), experience(3, None)]
    kept, metrics = estimate(ExperienceBatch.of(rows), DiscountedEstimator(whiten=False))
    assert [one.advantages.tolist() for one in kept] == [[3.0, 2.0], [4.0, 0.0]]
    assert metrics["rollout/missing_rewards"] == 2
    assert metrics["group_advantages/reward_mean/mean"] == 3.5


def test_values_belong_to_the_tokens_of_the_whole_batch_also_where_runs_are_dropped() -> None:
    rows = [experience(0, None, [True, True]), experience(1, 1.0, [True])]
    kept, _ = estimate(ExperienceBatch.of(rows), GaeEstimator(whiten=False), values=torch.tensor([9.0, 9.0, 0.25]))
    assert [one.advantages.tolist() for one in kept] == [[0.75]]


@pytest.mark.parametrize(
    ("args", "given", "says"),
    [
        (GaeEstimator(), {}, "got no values, wanted the values of a critic"),
        (GaeEstimator(), {"values": torch.zeros(3)}, r"values has shape \[3\], wanted \[2\]"),
        (GaeEstimator(), {"values": torch.tensor([0.0, math.nan])}, "values is nan at response token 1"),
        (DiscountedEstimator(), {"token_penalty": torch.zeros(1)}, r"token_penalty has shape \[1\], wanted \[2\]"),
        (
            DiscountedEstimator(),
            {"values": torch.zeros(2)},
            "values is given to the estimator 'discounted', which does not use it",
        ),
        (GroupEstimator(), {"token_penalty": torch.zeros(2)}, "token_penalty is given to the estimator 'group'"),
    ],
)
def test_what_the_caller_must_give_is_said(args: Estimator, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        estimate(ExperienceBatch.of([experience(run, float(run)) for run in range(2)]), args, **given)


def test_states_of_different_tasks_are_never_compared() -> None:
    rows = [
        experience(run, float(run + 10 * task), task=task, info={"env_state_hash": "start"})
        for task in range(2)
        for run in range(2)
    ]
    args = GigpoEstimator(epsilon=0.0)
    assert first(advantages(rows, args)) == [-1.0, 1.0, -1.0, 1.0]


def test_a_step_without_state_or_reward_is_named_or_dropped() -> None:
    rows = [experience(0, 1.0, info={"env_state_hash": 1}), experience(1, 1.0)]
    with pytest.raises(ValueError, match=r"experience 7/0/1/0/0+ has no info\['env_state_hash'\]"):
        advantages(rows, GigpoEstimator())
    rows = [
        experience(0, 1.0, info={"env_state_hash": 1}),
        experience(1, 1.0, info={"env_state_hash": 1}),
        experience(2, 1.0, step=0, info={"env_state_hash": 1, "step_reward": math.nan}),
        experience(2, 1.0, step=1, info={"env_state_hash": 1}),
    ]
    kept, metrics = estimate(ExperienceBatch.of(rows), GigpoEstimator())
    assert [one.eid.run for one in kept] == [0, 1]
    assert metrics["rollout/missing_rewards"] == 1


def above(rewards: list[float], *, threshold: float = 0.0) -> list[float]:
    return [1.0 if reward > threshold else -1.0 for reward in rewards]


def too_few(rewards: list[float]) -> list[float]:
    return rewards[1:]


def broken(rewards: list[float]) -> list[float]:
    return [1 / (reward - reward) for reward in rewards]


def endless(rewards: list[float]) -> list[float]:
    return [math.inf for _ in rewards]


HERE = __name__


def test_a_function_of_ones_own_gets_the_rewards_of_a_task_in_the_order_of_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def noted(rewards: list[float], *, threshold: float) -> list[float]:
        seen.append(list(rewards))
        return above(rewards, threshold=threshold)

    monkeypatch.setitem(globals(), "noted", noted)
    rows = [experience(run, float(run), task=task) for run in (2, 0, 1) for task in range(2)]
    rows += [experience(3, None), experience(0, 1.0, task=9)]
    args = EstimatorPlugin(kind=f"{HERE}.noted", args={"threshold": 0.5})
    kept, metrics = estimate(ExperienceBatch.of(rows), args, min_group_runs=2)
    assert seen == [[0.0, 1.0, 2.0]] * 2
    assert [(one.eid.run, float(one.advantages[0])) for one in kept] == [
        *[(2, 1.0)] * 2,
        *[(0, -1.0)] * 2,
        *[(1, 1.0)] * 2,
    ]
    assert metrics["rollout/missing_rewards"] == metrics["rollout/partial_groups"] == 1


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "above",
            {"treshold": 1},
            r"cannot be called with rewards and args .*'treshold'.*it is above\(rewards.*wanted def above",
        ),
        ("too_few", {}, r"returned \[1.0\] for the rewards \[0.0, 1.0\], wanted 2 finite numbers"),
        ("endless", {}, r"returned \[inf, inf\]"),
        ("broken", {}, r"for the rewards \[0.0, 1.0\] of one task, raised ZeroDivisionError"),
        ("HERE", {}, r"wanted a plain function: def HERE\(rewards: list\[float\]"),
    ],
)
def test_a_function_that_does_not_fit_is_named_with_what_is_wanted(name: str, args: dict[str, Any], says: str) -> None:
    rows = [experience(run, float(run)) for run in range(2)]
    with pytest.raises(PluginError, match=says):
        estimate(ExperienceBatch.of(rows), EstimatorPlugin(kind=f"{HERE}.{name}", args=args))


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownNameError, match=r"estimator '.*\.abve': module .* has no 'abve'; did you mean 'above'"):
        advantages([experience(0)], EstimatorPlugin(kind=f"{HERE}.abve"))


# -- groups


def test_divides_by_nothing() -> None:
    rows = [
        experience(run, reward, task=task) for task, run, reward in [(0, 0, 3.0), (0, 1, 1.0), (1, 0, 5.0), (1, 1, 1.0)]
    ]
    kept, metrics = estimate(ExperienceBatch.of(rows), GroupEstimator(scale="none"))
    assert [float(one.advantages[0]) for one in kept] == [1.0, -1.0, 2.0, -2.0]
    means = {name.rpartition("/")[2]: value for name, value in metrics.items() if "reward_mean" in name}
    assert means == {"mean": 2.5, "max": 3.0, "min": 2.0}
    assert metrics["group_advantages/reward_std/max"] == pytest.approx(8**0.5)


@pytest.mark.parametrize(
    ("args", "rewards", "wanted"),
    [
        pytest.param(GroupEstimator(shift=-0.1, scale="none"), [1.0] * 3, [0.1] * 3, id="a baseline below the mean"),
        pytest.param(GROUP["max_rl"], [-3.0, 1.0], [0.0] * 2, id="a mean that is not positive divides nothing"),
        pytest.param(GROUP["second_best"], [1.0, 1.0, 0.0], [0.0] * 3, id="ties for the best get nothing"),
        pytest.param(GroupEstimator(shift=-0.1, scale="none"), [2.0], [0.0], id="a shifted group of one gets nothing"),
        pytest.param(ALL["none"], [2.0], [2.0], id="a group of one that is not compared gets its reward"),
        *(
            pytest.param(ALL[name], [2.0], [0.0], id=f"a group of one, {name}")
            for name in (*GROUP, "nonzero", "ranked", "sized", "gigpo")
        ),
    ],
)
def test_advantages_by_hand(args: Estimator, rewards: list[float], wanted: list[float]) -> None:
    rows = [experience(run, one, logprobs=[-1.0], info={"env_state_hash": 1}) for run, one in enumerate(rewards)]
    assert first(advantages(rows, args)) == pytest.approx(wanted)


def test_a_run_of_many_steps_weighs_once_and_counts_by_its_last_step() -> None:
    rows = [experience(0, reward, step=step) for step, reward in [(2, 1.0), (0, 9.0), (1, 9.0)]]
    rows += [experience(1, 0.0), experience(2, 0.5)]
    kept, metrics = estimate(ExperienceBatch.of(rows), GroupEstimator(scale="none"))
    assert [float(one.advantages[0]) for one in kept] == [0.5, 0.5, 0.5, -0.5, 0.0]
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_small_groups_are_dropped_and_counted_and_do_not_move_the_scale() -> None:
    whole = [experience(run, float(run)) for run in range(4)]
    small = [experience(0, 100.0, task=1), experience(1, -100.0, task=1)]
    args = GroupEstimator(scale="batch", min_group_runs=3)
    kept, metrics = estimate(ExperienceBatch.of([small[0], *whole, small[1]]), args)
    assert metrics["rollout/partial_groups"] == 1
    assert {one.eid.uid: one.advantages.tolist() for one in kept} == advantages(whole, args)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_run_without_a_reward_is_dropped_with_all_its_steps(missing: float | None) -> None:
    rows = [
        experience(3, 1.0, step=0),
        experience(3, missing, step=1),
        *(experience(run, float(run)) for run in range(3)),
    ]
    kept, metrics = estimate(ExperienceBatch.of(rows), GroupEstimator(scale="none"))
    assert [(one.eid.run, float(one.advantages[0])) for one in kept] == [(0, -1.0), (1, 0.0), (2, 1.0)]
    assert (metrics["rollout/missing_rewards"], metrics["rollout/partial_groups"]) == (1, 0)


def test_a_group_that_loses_all_its_runs_is_partial_and_nothing_is_left_to_average() -> None:
    kept, metrics = estimate(ExperienceBatch.of([experience(run, None) for run in range(4)]), GroupEstimator())
    assert not kept
    assert metrics == {"rollout/missing_rewards": 4, "rollout/partial_groups": 1, "rollout/zero_variance_groups": 0}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "rewards", [(1e308, -1e308, 1e300, 0.0), (1.7e308, 1.7e308, 1.7e308, 1.6e308), (1e38, -3e38)], ids=str
)
def test_huge_rewards_give_finite_advantages(name: str, rewards: tuple[float, ...]) -> None:
    rows = [
        experience(run, reward, logprobs=[-1.0 - run], info={"env_state_hash": 1, "role": "a"})
        for run, reward in enumerate(rewards)
    ]
    found = advantages(rows, ALL[name])
    assert found
    assert all(map(math.isfinite, (value for row in found.values() for value in row)))


# -- the numbers of a group, computed for the few runs it has, are those of numpy

NUMBERS = st.lists(st.floats(-LARGEST, LARGEST) | st.sampled_from([0.0, 1.0]), min_size=2, max_size=300).map(np.array)


@given(NUMBERS, st.sampled_from([0, 1]))
def test_the_deviation_is_that_of_numpy_and_exactly_0_for_equal_numbers(values: np.ndarray, ddof: int) -> None:
    wanted = 0.0 if values.min() == values.max() else float(np.std(values, ddof=ddof))
    assert deviation(values, ddof) == wanted
    assert are_equal(values) == (values.min() == values.max())
    assert np.array_equal(center(values), np.zeros(len(values)) if are_equal(values) else values - np.mean(values))


def test_numbers_that_are_none_are_not_equal() -> None:
    assert not are_equal(np.array([1.0, np.nan]))
    assert not are_equal(np.array([np.nan, np.nan]))


DISTILL = DistillEstimator()


def taught(
    run: int,
    student: Sequence[float] | None,
    teacher: Sequence[float] | None,
    *,
    mask: Sequence[bool] = (True, True, True),
    **fields: Any,
) -> Experience:
    return experience(run, None, mask, logprobs=student, teacher_logprobs=teacher, **fields)


def listed(experiences: Sequence[Experience]) -> list[list[float]]:
    return [one.advantages.tolist() for one in experiences]


def test_metrics_are_over_runs_and_no_other_run_changes_an_advantage():
    alone = taught(0, [-1.0] * 3, [-2.0] * 3)
    long = [taught(1, [-1.0] * 3, [-4.0] * 3, step=step) for step in range(20)]
    kept, metrics = distillation_advantages(ExperienceBatch.of([alone, *long]), DistillEstimator(kl_coef=0.25))
    assert listed(kept) == [[-0.25] * 3] + [[-0.75] * 3] * 20
    assert metrics["advantage/kl/mean"] == 2.0, "the distance itself; a run of twenty steps weighs as one of one"
    assert (metrics["advantage/kl/min"], metrics["advantage/kl/max"]) == (1.0, 3.0)
    by_itself, _ = distillation_advantages(ExperienceBatch.of([alone]), DISTILL)
    assert listed(by_itself) == [[-1.0] * 3]


@pytest.mark.parametrize("who", ["student", "teacher"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_run_with_a_number_that_is_none_is_dropped_whole(who, value):
    odd = {"student": [-1.0] * 3, "teacher": [-1.0] * 3, who: [-1.0, value, -1.0]}
    given = [
        taught(0, [-1.0] * 3, [-1.5] * 3),
        taught(1, [-1.0] * 3, [-1.5] * 3, step=0),
        taught(1, odd["student"], odd["teacher"], step=1),
        taught(2, odd["student"], odd["teacher"], mask=(True, False, True)),
    ]
    kept, metrics = distillation_advantages(ExperienceBatch.of(given), DISTILL)
    assert [one.eid.run for one in kept] == [0, 2], "what is not trained on may be anything"
    assert listed(kept) == [[-0.5] * 3, [0.0] * 3]
    assert metrics["rollout/nonfinite_logprobs"] == 1
    assert metrics["advantage/kl/mean"] == 0.25


def test_where_nothing_is_trained_on_no_teacher_is_needed():
    given = [taught(0, None, None, mask=(False,) * 3), taught(1, [-1.0] * 3, [-2.0] * 3)]
    kept, metrics = distillation_advantages(ExperienceBatch.of(given), DISTILL)
    assert listed(kept) == [[0.0] * 3, [-1.0] * 3]
    assert metrics["advantage/kl/mean"] == 1.0
    alone, metrics = distillation_advantages(ExperienceBatch.of(given[:1]), DISTILL)
    assert listed(alone) == [[0.0] * 3]
    assert metrics == {"rollout/nonfinite_logprobs": 0.0}


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"teacher": None}, r"7/0/1/0\S* \(.*\) has no teacher_logprobs.*on_policy_distill_workflow.*auxiliary_models"),
        ({"student": None}, r"has no logprobs, wanted one per response token; the engine returns them"),
        (None, r"\(dpo\) has no action_mask"),
    ],
)
def test_what_is_missing_is_named_with_what_brings_it(lacks, said):
    whole = {"student": [-1.0] * 3, "teacher": [-1.0] * 3}
    pair = Experience(eid=EID(7, 0, 0), tokens=[1, 2], chosen=[3], rejected=[4], prompt_length=2)
    other = pair if lacks is None else taught(1, **{**whole, **lacks})
    with pytest.raises(ValueError, match=said):
        distillation_advantages(ExperienceBatch.of([taught(0, **whole), other]), DISTILL)


def test_the_gradient_leads_to_the_teacher():
    """Over all samples of a one-token policy the expected gradient is that of KL(student || teacher)."""
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    teacher = torch.tensor([0.1, 0.6, 0.3]).log()
    student = logits.log_softmax(-1)
    torch.nn.functional.kl_div(teacher, student, log_target=True, reduction="sum").backward()
    wanted = logits.grad.clone()
    logits.grad = None
    found = torch.zeros(3)
    for token in range(3):
        old = student.detach()[token : token + 1]
        one = taught(token, old.tolist(), teacher[token : token + 1].tolist(), mask=(True,))
        ((kept,), _) = distillation_advantages(ExperienceBatch.of([one]), DISTILL)
        loss = -(kept.advantages * (logits.log_softmax(-1)[token : token + 1] - old).exp()).sum()
        found += old.exp() * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found, wanted)


def pack(run: int, rewards: Sequence[Any], hints: Sequence[Any], tokens: int = 1, task: int = 0) -> list[Experience]:
    """Return the experiences of a run of a pack: a task, the hints after it, the next task, and so on."""
    rows = []
    for place, reward in enumerate(rewards):
        for kind, key, value in (("solve_task", "task_idx", reward), ("gen_hint", "hint_idx", [*hints, None][place])):
            if kind == "solve_task" or place < len(hints):
                info = {"exp_type": kind, key: place, "task_rewards": list(rewards)}
                rows.append(experience(run, value, [True] * tokens, task, len(rows), info=info))
    return rows


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        # returns of run 0: task 0 (1 + 0 + 1) / 3, hint 0 (-0.1 + 0 + 1) / 3, task 1 (0 + 1) / 2, hint 1 (0 + 1) / 2,
        # task 2 1; of run 1: 0, 0 / 3, 0, (-0.2 + 0) / 2, 0
        (DotsEstimator(), [1 / 3, 0.15, 0.25, 0.3, 0.5]),
        (DotsEstimator(returns="sliding_window_mean", window=1), [0.5, -0.05, 0.0, 0.1, 0.5]),
        (DotsEstimator(returns="discounted", gamma=0.5), [0.625, 0.075, 0.25, 0.35, 0.5]),
        (
            DotsEstimator(temperature=0.5),
            [value * math.exp(value / 0.5) for value in (1 / 3, 0.15, 0.25, 0.3, 0.5)],
        ),
    ],
)
def test_a_part_of_a_pack_gains_by_the_rest_of_its_pack(args: DotsEstimator, wanted: list[float]) -> None:
    rows = [*pack(0, [1.0, 0.0, 1.0], [-0.1, 0.0]), *pack(1, [0.0, 0.0, 0.0], [0.0, -0.2])]
    kept, metrics = estimate(ExperienceBatch.of(rows), args)
    found = [float(one.advantages[0]) for one in kept]
    assert found[:5] == pytest.approx(wanted)
    if args.temperature is None:
        assert found[5:] == pytest.approx([-value for value in wanted])
    assert metrics["group_advantages/reward_mean/mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("level", ["batch", "task"])
def test_many_tokens_of_a_bad_run_are_balanced(level: str) -> None:
    balanced = [*pack(0, [1.0, 1.0], [0.0], tokens=3), *pack(1, [0.0, 0.0], [0.0], tokens=4)]
    others = [*pack(0, [1.0, 1.0], [0.0], tokens=2, task=1), *pack(1, [0.0, 0.0], [0.0], tokens=1, task=1)]

    def totals(**settings: Any) -> list[float]:
        kept, _ = estimate(ExperienceBatch.of(balanced + others), DotsEstimator(level=level, **settings))
        sums = [sum(float(one.advantages.sum()) for one in kept if one.eid.task == task) for task in (0, 1)]
        return sums if level == "task" else [sum(sums)]

    plain, weighted, moved = totals(), totals(adaptive=True), totals(center=True)
    if level == "batch":
        assert plain == weighted == moved == [0.0], "a mean of 0 stays"
        return
    assert (plain[0] < 0, weighted[0], moved[0]) == (True, pytest.approx(0, abs=0.1), pytest.approx(0, abs=1e-6))
    assert plain[1] == weighted[1] == moved[1] > 0


def test_runs_of_packs_without_a_reward_are_dropped_and_counted() -> None:
    rows = [*pack(0, [1.0, 0.0], [0.0]), *pack(1, [0.0, 0.0], [0.0]), *pack(2, [1.0, math.nan], [0.0])]
    alone = pack(0, [1.0, 0.0], [0.0], task=1)
    kept, metrics = estimate(ExperienceBatch.of(rows + alone), DotsEstimator(min_group_runs=2))
    assert {(one.eid.task, one.eid.run) for one in kept} == {(0, 0), (0, 1)}
    assert (metrics["rollout/missing_rewards"], metrics["rollout/partial_groups"]) == (1.0, 1.0)
    kept, _ = estimate(ExperienceBatch.of(alone), DotsEstimator())
    assert [float(one.advantages[0]) for one in kept] == [0.0] * 3
    assert advantages([], DotsEstimator()) == {}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (None, "has exp_type None and task_rewards None in its info, wanted exp_type solve_task or gen_hint"),
        ({"exp_type": "solve_task", "task_rewards": []}, "the rewards of all tasks of the pack"),
        (
            {"exp_type": "gen_hint", "task_rewards": [1.0]},
            r"info\['hint_idx'\] None, wanted the number of one of the 1",
        ),
        ({"exp_type": "solve_task", "task_idx": 1, "task_rewards": [1.0]}, r"info\['task_idx'\] 1"),
    ],
)
def test_what_is_no_part_of_a_pack_says_so(info: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        advantages([experience(0, 1.0, info=info or {})], DotsEstimator())
