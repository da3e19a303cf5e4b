"""Group-relative advantages: values by hand, who is dropped, what is counted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config.estimators import GroupEstimator
from trinity_mq.experience import EID, Experience, ExperienceBatch


def experience(task: int, run: int, reward: float | None, step: int = 0, mask: list[bool] | None = None) -> Experience:
    return Experience(
        eid=EID(7, task, run, step), tokens=[3, 4, 5, 6], prompt_length=1, reward=reward, action_mask=mask or [True] * 3
    )


def config(**settings: Any) -> GroupEstimator:
    return GroupEstimator(**{"epsilon": 1e-4, "min_group_runs": 2, **settings})


def advantages(runs: list[Experience], args: GroupEstimator) -> tuple[list[Experience], dict[str, float]]:
    kept, metrics = estimate(ExperienceBatch.of(runs), args)
    return kept.to_list(), metrics


def ids(experiences: list[Experience]) -> list[str]:
    return [one.eid.uid for one in experiences]


def value(one: Experience) -> float:
    assert one.advantages is not None
    return float(one.advantages[0])


def test_divides_by_the_unbiased_deviation_of_the_group() -> None:
    runs = [experience(0, run, reward) for run, reward in enumerate([1.0, 0.0, 0.0, 0.0])]
    kept, metrics = advantages(runs, config(scale="group", epsilon=1e-4))
    # mean 1/4; sum of squares 9/16 + 3/16 = 3/4; over 3 = 1/4; deviation 1/2
    assert [value(one) for one in kept] == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3)
    assert metrics["group_advantages/reward_mean/mean"] == 0.25
    assert metrics["group_advantages/reward_std/max"] == pytest.approx(0.5)
    assert metrics["rollout/zero_variance_groups"] == metrics["rollout/partial_groups"] == 0


def test_divides_by_the_deviation_of_all_centred_rewards_as_the_recipe_does() -> None:
    rewards = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    runs = [experience(task, run, float(rewards[task, run])) for task in range(6) for run in range(4)]
    kept, _ = advantages(runs, config(scale="batch"))
    expected = rewards - rewards.mean(1, keepdim=True)
    expected = expected / (expected.std() + 1e-4)
    torch.testing.assert_close(torch.tensor([value(one) for one in kept]), expected.flatten())


def test_divides_by_nothing() -> None:
    kept, metrics = advantages(
        [experience(0, 0, 3.0), experience(0, 1, 1.0), experience(1, 0, 5.0), experience(1, 1, 1.0)],
        config(scale="none"),
    )
    assert [value(one) for one in kept] == [1.0, -1.0, 2.0, -2.0]
    means = {name.rpartition("/")[2]: found for name, found in metrics.items() if "reward_mean" in name}
    assert means == {"mean": 2.5, "max": 3.0, "min": 2.0}


def test_a_run_of_many_steps_weighs_once_and_counts_by_its_last_step() -> None:
    steps = [experience(0, 0, reward, step) for step, reward in [(2, 1.0), (0, 9.0), (1, 9.0)]]
    others = [experience(0, 1, 0.0), experience(0, 2, 0.5)]
    kept, metrics = advantages([*steps, *others], config(scale="none"))
    assert ids(kept) == ids([*steps, *others])
    assert [value(one) for one in kept] == [0.5, 0.5, 0.5, -0.5, 0.0]
    assert metrics["group_advantages/reward_mean/mean"] == 0.5


def test_is_zero_where_the_mask_is_and_float32() -> None:
    runs = [experience(0, 0, 1.0, mask=[True, False, True]), experience(0, 1, 0.0)]
    (first, _), _ = advantages(runs, config(scale="none"))
    assert first.advantages is not None
    assert first.advantages.dtype == torch.float32
    assert first.advantages.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("level", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_rounded(level: str) -> None:
    runs = [experience(0, run, 0.1) for run in range(3)]
    kept, metrics = advantages(runs, config(scale=level))
    assert [value(one) for one in kept] == [0.0, 0.0, 0.0]
    assert metrics["rollout/zero_variance_groups"] == 1
    assert metrics["group_advantages/reward_std/mean"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("level", ["group", "batch", "none"])
def test_a_group_of_one_gets_zero(level: str) -> None:
    kept, metrics = advantages([experience(0, 0, 5.0)], config(scale=level, min_group_runs=1))
    assert [value(one) for one in kept] == [0.0]
    assert metrics["rollout/zero_variance_groups"] == 1


def test_small_groups_are_dropped_and_counted_and_do_not_move_the_scale() -> None:
    whole = [experience(0, run, float(run)) for run in range(4)]
    small = [experience(1, 0, 100.0), experience(1, 1, -100.0)]
    kept, metrics = advantages([small[0], *whole, small[1]], config(scale="batch", min_group_runs=3))
    assert ids(kept) == ids(whole)
    assert metrics["rollout/partial_groups"] == 1
    alone, _ = advantages([experience(0, run, float(run)) for run in range(4)], config(scale="batch"))
    assert [value(one) for one in kept] == [value(one) for one in alone]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_run_without_a_reward_is_dropped_with_all_its_steps(missing: float | None) -> None:
    bad = [experience(0, 3, 1.0, step=0), experience(0, 3, missing, step=1)]
    good = [experience(0, run, float(run)) for run in range(3)]
    kept, metrics = advantages([*bad, *good], config(scale="none"))
    assert ids(kept) == ids(good)
    assert [value(one) for one in kept] == [-1.0, 0.0, 1.0]
    assert metrics["rollout/missing_rewards"] == 1
    assert metrics["rollout/partial_groups"] == 0


@pytest.mark.parametrize("level", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [(1e308, -1e308, 1e308, 0.0), (1.7e308, 1.7e308, 1.7e308, 1.6e308), (1e38, -3e38)])
def test_huge_rewards_give_finite_advantages_and_metrics(level: str, rewards: tuple[float, ...]) -> None:
    runs = [experience(task, run, reward) for task in range(2) for run, reward in enumerate(rewards)]
    kept, metrics = advantages(runs, config(scale=level))
    assert ids(kept) == ids(runs)
    assert all(math.isfinite(value(one)) for one in kept)
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["rollout/missing_rewards"] == 0


def test_a_group_that_loses_all_its_runs_is_partial_and_nothing_is_left_to_average() -> None:
    kept, metrics = advantages([experience(0, run, None) for run in range(4)], config())
    assert kept == []
    assert metrics == {"rollout/missing_rewards": 4, "rollout/partial_groups": 1, "rollout/zero_variance_groups": 0}
    assert advantages([], config())[0] == []


def test_a_pair_of_answers_is_refused_by_name() -> None:
    pair = Experience(eid=EID(7, 0, 0), tokens=[3, 4], chosen=[5], rejected=[6], reward=1.0)
    with pytest.raises(ValueError, match="dpo"):
        advantages([pair, experience(0, 1, 0.0)], config())


@settings(deadline=None, max_examples=50)
@given(rewards=st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=5), min_size=1, max_size=4), data=st.data())
def test_order_does_not_matter_and_groups_sum_to_zero(rewards: list[list[float]], data: st.DataObject) -> None:
    def batch() -> list[Experience]:
        return [experience(task, run, one) for task, group in enumerate(rewards) for run, one in enumerate(group)]

    level = data.draw(st.sampled_from(["group", "batch", "none"]))
    kept, _ = advantages(batch(), config(scale=level))
    sums: dict[str, float] = {}
    for one in kept:
        sums[one.eid.tid] = sums.get(one.eid.tid, 0.0) + value(one)
    assert list(sums.values()) == pytest.approx([0.0] * len(rewards), abs=1e-4)
    shuffled = batch()
    random.Random(0).shuffle(shuffled)
    again, _ = advantages(shuffled, config(scale=level))
    assert {one.eid.rid: value(one) for one in again} == pytest.approx(
        {one.eid.rid: value(one) for one in kept}, abs=1e-4
    )
