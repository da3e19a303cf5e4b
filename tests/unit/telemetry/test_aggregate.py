from __future__ import annotations

import pytest

from trinity_mq.telemetry import aggregate_eval_runs, aggregate_eval_tasks, aggregate_runs, aggregate_tasks


def test_runs_to_task_keeps_the_ends_of_keys() -> None:
    assert aggregate_runs([{"a": 1, "n:sum": 1}, {"a": 3, "n:sum": 2}]) == {"a": 2.0, "n:sum": 3.0}


def test_every_end() -> None:
    runs = [
        {"x:max": 1, "x:min": 1, "x:last": 5, "x:mean": 1, "x:other": 1},
        {"x:max": 4, "x:min": 0, "x:last": 2, "x:mean": 3, "x:other": 3},
    ]
    assert aggregate_runs(runs) == {"x:max": 4.0, "x:min": 0.0, "x:last": 2.0, "x:mean": 2.0, "x:other": 2.0}


def test_what_is_no_number_is_left_out_and_a_bool_counts() -> None:
    assert aggregate_runs([{"ok": True, "why": "x"}, {"ok": False, "why": None}, {}]) == {"ok": 0.5}


def test_tasks_to_batch() -> None:
    tasks = [{"accuracy": 1.0, "tokens:sum": 10.0, "n:max": 3}, {"accuracy": 0.0, "tokens:sum": 5.0, "n:max": 7}]
    assert aggregate_tasks(tasks, "rollout") == {
        "rollout/accuracy/mean": 0.5,
        "rollout/accuracy/max": 1.0,
        "rollout/accuracy/min": 0.0,
        "rollout/tokens/sum": 15.0,
        "rollout/n/max": 7.0,
    }


def test_eval_runs_match_the_reference_figures() -> None:
    """The figures of acc [1, 0, 1, 0] were read off the reference system."""
    found = aggregate_eval_runs([{"acc": 1}, {"acc": 0}, {"acc": 1}, {"acc": 0}])
    assert found == pytest.approx(
        {
            "acc/mean@4": 0.5,
            "acc/std@4": 0.5,
            "acc/best@2": 0.77,
            "acc/worst@2": 0.246,
            "acc/best@4": 0.94,
            "acc/worst@4": 0.056,
        }
    )


def test_eval_of_one_run_has_no_best_of() -> None:
    assert aggregate_eval_runs([{"accuracy": 1.0, "time/run_execution": 2.0}]) == {
        "accuracy/mean@1": 1.0,
        "accuracy/std@1": 0.0,
        "time/run_execution": 2.0,
    }


@pytest.mark.parametrize(("n", "sizes"), [(2, {2}), (3, {2, 3}), (8, {2, 4, 8}), (9, {2, 4, 8, 9})])
def test_eval_sizes(n: int, sizes: set[int]) -> None:
    found = aggregate_eval_runs([{"a": float(i)} for i in range(n)])
    assert {int(key.rpartition("@")[2]) for key in found if "best@" in key} == sizes
    assert all(0 <= found[f"a/worst@{k}"] < found[f"a/mean@{n}"] < found[f"a/best@{k}"] <= n - 1 for k in sizes)


def test_eval_tasks_to_evaluation() -> None:
    tasks = [{"acc/mean@1": 1.0}, {"acc/mean@1": 0.0}, {"acc/mean@1": 0.5}]
    assert aggregate_eval_tasks(tasks, "eval/x") == {"eval/x/acc/mean@1": 0.5}
    detailed = aggregate_eval_tasks(tasks, "eval/x", detailed=True)
    assert set(detailed) == {f"eval/x/acc/mean@1/{each}" for each in ("mean", "max", "min", "std")}
    assert detailed["eval/x/acc/mean@1/std"] == pytest.approx((0.5 / 3) ** 0.5)


def test_nothing_gives_nothing() -> None:
    assert (
        aggregate_runs([]) == aggregate_tasks([], "x") == aggregate_eval_runs([]) == aggregate_eval_tasks([], "x") == {}
    )
