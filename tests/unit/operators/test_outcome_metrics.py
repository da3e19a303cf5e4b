"""Metrics of rewards and groups before any operator."""

from __future__ import annotations

import math
import statistics

import pytest

from trinity_agents.operator.chain_run import outcome_metrics
from trinity_mq.experience import EID, Experience, ExperienceBatch


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


def test_the_last_step_of_a_run_counts() -> None:
    steps = [
        Experience(eid=EID(batch=1, task=0, run=0, step=step), tokens=[1, 2], prompt_length=1, reward=reward)
        for step, reward in enumerate([5.0, 5.0, 1.0])
    ]
    found = outcome_metrics(ExperienceBatch.of(steps))
    assert (found["reward/mean"], found["reward/max"], found["groups/size"]) == (1.0, 1.0, 1.0)
