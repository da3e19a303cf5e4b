from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.telemetry import aggregate_eval_runs, aggregate_eval_tasks, aggregate_runs, aggregate_tasks
from trinity_mq.telemetry.aggregate import best_and_worst, best_of_sizes, pass_at


def test_runs_to_task_and_tasks_to_batch() -> None:
    runs = [
        {"x": 1, "n:sum": 1, "x:max": 1, "x:min": 1, "x:last": 5, "x:mean": 1, "x:other": 1, "ok": True, "why": "x"},
        {"x": 3, "n:sum": 2, "x:max": 4, "x:min": 0, "x:last": 2, "x:mean": 3, "x:other": 3, "ok": False, "why": None},
    ]
    ends = {"x:max": 4.0, "x:min": 0.0, "x:last": 2.0, "x:mean": 2.0, "x:other": 2.0}
    assert aggregate_runs(runs) == {"x": 2.0, "n:sum": 3.0, **ends, "ok": 0.5}, "what is no number is left out"
    tasks = [{"accuracy": 1.0, "tokens:sum": 10.0, "n:max": 3}, {"accuracy": 0.0, "tokens:sum": 5.0, "n:max": 7}]
    accuracy = {"rollout/accuracy/mean": 0.5, "rollout/accuracy/max": 1.0, "rollout/accuracy/min": 0.0}
    assert aggregate_tasks(tasks, "rollout") == {**accuracy, "rollout/tokens/sum": 15.0, "rollout/n/max": 7.0}


def test_eval_runs_have_mean_deviation_best_and_worst() -> None:
    """The reference system estimates the same by 1000 resamples: 0.77, 0.246, 0.94 and 0.056."""
    assert aggregate_eval_runs([{"acc": 1}, {"acc": 0}, {"acc": 1}, {"acc": 0}]) == {
        "acc/mean@4": 0.5,
        "acc/std@4": 0.5,
        "acc/best@2": 0.75,
        "acc/worst@2": 0.25,
        "acc/best@4": 0.9375,
        "acc/worst@4": 0.0625,
    }


def test_an_accuracy_has_pass_at_k_without_replacement() -> None:
    found = aggregate_eval_runs([{"accuracy": value} for value in (1, 0, 0, 1, 0)])
    assert {key: value for key, value in found.items() if key.startswith("pass@")} == pytest.approx(
        {"pass@2": 1 - 3 / 10, "pass@4": 1.0, "pass@5": 1.0}
    )
    graded = aggregate_eval_runs([{"accuracy": 0.5}, {"accuracy": 1.0}])
    assert not any(key.startswith("pass@") for key in graded), "only right and wrong can be counted"


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_one(runs: list[bool], k: int) -> None:
    k = min(k, len(runs))
    draws = list(itertools.combinations(runs, k))
    assert pass_at(sum(runs), len(runs), k) == pytest.approx(statistics.fmean(map(any, draws)))


def test_the_answer_of_the_majority_has_one_value() -> None:
    found = aggregate_eval_runs([{"accuracy": 1.0, "majority": 1.0}, {"accuracy": 0.0, "majority": 1.0}])
    assert {key for key in found if "majority" in key} == {"majority@2"}
    assert aggregate_eval_tasks([found, {"majority@2": 0.0}], "eval/x")["eval/x/majority@2"] == 0.5


def test_durations_of_an_evaluation_are_plain_means() -> None:
    runs = [{"time/run_execution": 2.0, "time/other:sum": 1.0, "timely": 1.0}, {"time/run_execution": 3.0}]
    durations = {"time/run_execution": 2.5, "time/other": 1.0}
    assert aggregate_eval_runs(runs) == durations | {"timely/mean@1": 1.0, "timely/std@1": 0.0}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), st.integers(1, 4))
def test_best_and_worst_of_k_are_the_means_over_all_draws(values: list[float], k: int) -> None:
    draws = list(itertools.product(values, repeat=k))
    best, worst = best_and_worst(values, k)
    assert best == pytest.approx(statistics.fmean(map(max, draws)), abs=1e-9)
    assert worst == pytest.approx(statistics.fmean(map(min, draws)), abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), min_size=1, max_size=6))
def test_many_tasks_at_once_are_each_as_if_aggregated_alone(tasks: list[list[float]]) -> None:
    found = [aggregate_eval_runs([{"a": value, "b": -value} for value in values]) for values in tasks]
    for values, metrics in zip(tasks, found, strict=True):
        n = len(values)
        assert metrics[f"a/mean@{n}"] == pytest.approx(statistics.fmean(values), abs=1e-9)
        assert metrics[f"a/std@{n}"] == pytest.approx(statistics.pstdev(values), abs=1e-9)
        assert metrics.keys() == {f"{key}/{what}" for key in "ab" for what in names(n)}
        for k in best_of_sizes(n):
            best, worst = best_and_worst(values, k)
            assert (metrics[f"a/best@{k}"], metrics[f"a/worst@{k}"]) == pytest.approx((best, worst), abs=1e-9)
            assert (metrics[f"b/best@{k}"], metrics[f"b/worst@{k}"]) == pytest.approx((-worst, -best), abs=1e-9)


def names(n: int) -> list[str]:
    return [f"mean@{n}", f"std@{n}", *(f"{what}@{k}" for k in best_of_sizes(n) for what in ("best", "worst"))]


def test_a_value_that_is_not_finite_spoils_its_own_metric_only() -> None:
    runs = [{"a": 1.0, "b": float("inf")}, {"a": 2.0, "b": 0.0}]
    found = aggregate_eval_runs(runs)
    assert found["a/mean@2"] == 1.5
    assert found["b/best@2"] == float("inf")
    assert math.isfinite(found["a/best@2"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e308, 10**400, -(10**400)], ids=range(6))
def test_no_number_ends_who_aggregates_it(value: float) -> None:
    runs = [{"a": value, "b:sum": value, "c:max": value}, {"a": -value, "b:sum": -value, "c:max": 1}, {"a": 1e308}]
    task = aggregate_runs(runs)
    assert all(isinstance(found, float) for found in task.values())
    assert aggregate_tasks([task, task], "x").keys() == {"x/a/mean", "x/a/max", "x/a/min", "x/b/sum", "x/c/max"}
    tasks = [aggregate_eval_runs(runs)] * 2
    assert "a/best@2" in tasks[0]
    assert aggregate_eval_tasks(tasks, "x", detailed=True).keys() >= {"x/a/best@2/std"}
