from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_mq.telemetry import (
    MetricsWriter,
    aggregate_eval_runs,
    aggregate_eval_tasks,
    aggregate_metrics,
    aggregate_runs,
    aggregate_tasks,
    read_metrics,
    sparkline,
)
from trinity_mq.telemetry.aggregate import best_and_worst, best_of_sizes, pass_at
from trinity_mq.telemetry.tail import Tail


def test_one_line_a_step(tmp_path: Path) -> None:
    before = time.time()
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "sample/staleness/max": 1})
    writer.write(2, {"actor/pg_loss": float("nan"), "actor/grad_norm": float("inf")})
    broken = "line\u2028breaks\u2029of\u0085unicode"
    writer.write(3, {"a": np.float32(0.5), "b": np.int64(3), "c": True, broken: 1.0})  # type: ignore[dict-item]
    writer.close()
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert list(first)[:4] == ["time", "role", "agent", "step"]
    assert before - 1 <= first.pop("time") <= time.time() + 1
    fields = {"role": "trainer", "agent": "trainer-0", "step": 1}
    assert first == {**fields, "actor/pg_loss": 0.5, "sample/staleness/max": 1}
    assert (third["a"], third["b"], third["c"], third[broken]) == (0.5, 3, 1, 1)
    assert (second["actor/pg_loss"], second["actor/grad_norm"]) == (None, None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def _write_many(run_dir: Path, agent: str) -> None:
    writer = MetricsWriter(run_dir, "runner", agent, tensorboard=False)
    for step in range(300):
        writer.write(step, {f"key/{n}": step + n / 7 for n in range(40)})
    writer.close()


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, f"runner-{n}")) for n in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    text = (tmp_path / "metrics.jsonl").read_text()
    # a writer that opens the file while another's line is half there adds a blank line, and nothing else
    found = [json.loads(line) for line in text.splitlines() if line]
    assert found == read_metrics(tmp_path / "metrics.jsonl")
    assert len(found) == 1200
    for n in range(4):
        assert [line["step"] for line in found if line["agent"] == f"runner-{n}"] == list(range(300))


def test_torn_lines_are_left_out_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "act')
    assert read_metrics(path) == [{"step": 1}]
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(3, {})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 3]


def test_tensorboard_reads_what_was_written_and_no_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from trinity_mq.telemetry import MetricsWriter\n"
        f"w = MetricsWriter(pathlib.Path({str(tmp_path)!r}), 'trainer', 'trainer-0')\n"
        "w.write(1, {'actor/pg_loss': 0.5, 'bad': float('nan')})\n"
        "w.write(2, {'actor/pg_loss': 0.25})\n"
        "w.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (tmp_path / "tensorboard" / "trainer").iterdir()
    scalars = [
        (event.step, value.tag, value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value)
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert scalars == [(1, "actor/pg_loss", 0.5), (2, "actor/pg_loss", 0.25)]


GREAT = 1.7e308


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        pytest.param([0, 1, 2, 3, 4, 5, 6, 7], 80, "▁▂▃▄▅▆▇█", id="it rises with the values"),
        pytest.param([0, 0, 0, 8, 8, 8], 2, "▁█", id="long series are averaged"),
        pytest.param([0.0, math.nan, 1.0], 80, "▁█", id="what is not finite is left out"),
        pytest.param([3, 3, 3], 80, "▁▁▁", id="constants are low"),
        pytest.param([math.inf], 80, "", id="nothing"),
        pytest.param([GREAT, GREAT, -GREAT, -GREAT], 2, "█▁", id="the greatest numbers there are"),
    ],
)
def test_a_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


@given(st.lists(st.floats()), st.integers(1, 80))
def test_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, sum(map(math.isfinite, values)))


def test_a_line_whose_handling_fails_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\nthird\nunfinished")
    tail = Tail(path)
    for line in tail.read():
        if line == b"second\n":
            break
    assert tail.offset == len(b"first\n")
    assert list(tail.read()) == [b"second\n", b"third\n"]
    assert list(Tail(path, tail.offset).read()) == []


def test_of_a_rotated_file_it_reads_only_its_own_inode(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n")
    tail = Tail(path, inode=path.stat().st_ino)
    path.rename(tmp_path / "lines.1")
    path.write_bytes(b"other\n")
    assert list(tail.read()) == []
    tail.path = tmp_path / "lines.1"
    assert list(tail.read()) == [b"first\n"]


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
        assert metrics.keys() == {f"{key}/{what}" for key in "ab" for what in names_of_runs(n)}
        for k in best_of_sizes(n):
            best, worst = best_and_worst(values, k)
            assert (metrics[f"a/best@{k}"], metrics[f"a/worst@{k}"]) == pytest.approx((best, worst), abs=1e-9)
            assert (metrics[f"b/best@{k}"], metrics[f"b/worst@{k}"]) == pytest.approx((-worst, -best), abs=1e-9)


def names_of_runs(n: int) -> list[str]:
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


def test_metrics_are_aggregated_with_the_arguments_of_trinity_rft():
    rows = [{"a": 1, "n:sum": 2, "text": "x"}, {"a": 3, "n:sum": 5}]
    assert aggregate_metrics(rows) == {"a/mean": 2.0, "a/max": 3.0, "a/min": 1.0, "n/sum": 7.0}
    assert aggregate_metrics(rows, "p", ["mean", "std", "median"]) == {"p/a/mean": 2.0, "p/a/std": 1.0, "p/n/sum": 7.0}
    assert aggregate_metrics([], "p") == {}
