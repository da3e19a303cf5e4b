"""``trinity-mq timeline`` on run folders as runs leave them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.cli.main import main
from trinity_mq.observability import timeline
from trinity_mq.observability.report.text import make_report
from trinity_mq.observability.timeline import Span, chrome_trace, spans, tracks
from trinity_mq.observability.waterfall import batches_of, lay_out
from trinity_mq.telemetry import trace
from trinity_mq.telemetry.trace import TraceSpan, record, span, start_trace, works_on
from trinity_mq.telemetry.trace_files import read_trace

LINES = [
    {"time": 1002.0 + n, "role": "trainer", "agent": "trainer-0", "step": n, "time/batch": 0.5} for n in range(1, 9)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "smoke"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return run


def activities(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]


def test_by_name_folder_or_file_it_goes_into_the_runs_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent.parent / "smoke.yaml").write_text("name: smoke\nmodel: {tiny: {}}\n")
    for target in ("smoke", "smoke.yaml", str(folder)):
        (folder / "timeline.json").unlink(missing_ok=True)
        assert main(["timeline", target]) == 0
        assert capsys.readouterr().out.strip().endswith("timeline.json")
        assert len(activities(folder / "timeline.json")) == 8
    assert "timeline.json" in make_report("smoke", folder)
    (folder / "timeline.json").unlink()
    assert main(["timeline", "smoke", "--steps", "3-4", "--out", "part.json"]) == 0
    assert activities(folder.parent.parent / "part.json") == ["train 3", "train 4"]
    assert not (folder / "timeline.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no run has left a folder there"),
        (["smoke", "--steps", "4-3"], "wanted FIRST-LAST"),
        (["smoke", "--steps", "all"], "wanted FIRST-LAST"),
        (["smoke", "--steps", "100-200"], "no batch from 100 to 200"),
        (["smoke", "--out", "no/such/folder.json"], "cannot be written"),
        (["smoke", "--json"], "add --batch N"),
        (["smoke", "--batch", "3"], "monitor.trace=true"),
        (["idle"], "no line with the duration"),
        (["new.yaml"], "runs/new: no run has left a folder there"),
        (["new.yaml", "--batch", "3"], "runs/new: no run has left a folder there"),
    ],
)
def test_a_timeline_that_cannot_be_written_is_one_line_of_error(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (folder.parent / "idle").mkdir()
    idle = '{"time": 1.0, "role": "trainer", "agent": "t", "step": 1, "x": 1.0}\n'
    (folder.parent / "idle" / "metrics.jsonl").write_text(idle)
    Path("new.yaml").write_text("name: new\nmodel: {tiny: {}}\n")
    assert main(["timeline", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_trace_without_a_batch_yet_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace").mkdir()
    who = {"role": "engine", "agent": "engine-0", "clock": "a", "pid": 1, "offset": 1000.0}
    applied = ["apply weights", None, "1.0", 10**6, 2 * 10**6, 8000, 1, 0, False]
    (folder / "trace" / "engine-0.jsonl").write_text(f"{json.dumps(who)}\n{json.dumps([applied])}\n")
    assert main(["timeline", "smoke", "--batch", "1"]) == 2
    assert "--batch is '1', but the 1 spans in" in capsys.readouterr().err


def test_a_batch_as_a_waterfall_as_medians_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace").mkdir()
    who = {"role": "explorer", "agent": "explorer-0", "clock": "a", "pid": 1, "offset": 1000.0}
    recorded = [
        span
        for batch in (1, 2)
        for span in (
            ["make ticket", batch, None, batch * 10**6, batch * 10**6 + 10_000, 8000, 1, 0, False],
            ["make manifest", batch, None, batch * 1_010_000 + 390_000, batch * 1_020_000 + 390_000, None, 1, 0, False],
        )
    ]
    (folder / "trace" / "explorer-0.jsonl").write_text(f"{json.dumps(who)}\n{json.dumps(recorded)}\n")
    assert main(["timeline", "smoke", "--batch", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("batch 1: 410 ms, no process worked on it for 390 ms\nstages (ms): rollout 400\n")
    assert "      0.0     10.0     1     10.0     8.0           explorer: make ticket\n" in out
    assert "     10.0    390.0  between 'explorer: make ticket' and 'explorer: make manifest'\n" in out
    assert main(["timeline", "smoke", "--batch", "1-9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["took"]) == ("1 to 2", pytest.approx(420))
    assert main(["timeline", "smoke", "--batch", "7"]) == 2
    assert "has no span of it; wanted 1 to 2" in capsys.readouterr().err
    assert not (folder / "timeline.json").exists()


# -- spans from metrics, as a Chrome trace


def line(role: str, step: int, at: float, **values: float) -> dict[str, Any]:
    return {"time": at, "role": role, "agent": f"{role}-0", "step": step, **values}


PERIOD = [
    line("explorer", 1, 1002.0, **{"time/explore": 2.0, "rollout/reward/mean": 0.5}),
    line("operator", 1, 1002.5, **{"time/operators": 0.25}),
    line("trainer", 1, 1004.0, **{"time/batch": 1.5, "time/train_step": 1.4, "sample/skipped_step": 0.0}),
    line("trainer", 1, 1004.5, **{"time/sync": 0.5, "sync/pause_ms": 3.0, "sync/transfer_ms": 400.0}),
    line("explorer", 1, 1006.0, **{"time/eval": 1.0}),
    line("trainer", 2, 1006.5, **{"time/batch": 0.5, "sample/skipped_step": 1.0}),
    line("trainer", 2, 1007.0, **{"time/save": 0.25}),
]


def test_lines_of_others_and_nonsense_tell_nothing() -> None:
    odd = [
        {},
        line("runner", 1, 1000.0, **{"time/explore": 2.0}),
        line("trainer", 1, 1000.0, **{"time/explore": 2.0}),
        line("trainer", 1, 1000.0, **{"time/batch": float("nan")}),
        line("trainer", 1, 1000.0, **{"time/batch": -1.0}),
        {**line("trainer", 1, 1000.0, **{"time/batch": 1.0}), "time": "noon"},
        {**line("trainer", 1, 1000.0, **{"time/batch": 1.0}), "step": None},
        {**line("trainer", 1, 1000.0), "time/batch": True},
        {**line("trainer", 1, 1000.0), "time/batch": None},
    ]
    assert spans(odd) == []


def events(lines: list[dict[str, Any]]) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """``(names of processes, activities)`` of the trace."""
    every = json.loads(chrome_trace(spans(lines)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in every if event["name"] == "process_name"}
    return names, [event for event in every if event["ph"] == "X"]


def test_the_trace_has_each_activity_in_microseconds_and_a_sync_with_the_explorer_too() -> None:
    processes, found = events(PERIOD)
    assert set(processes.values()) == {"explorer-0", "operator-0", "trainer-0"}
    shown = {(processes[event["pid"]], event["name"]): event for event in found}
    assert len(shown) == len(found) == 8
    explore, train = shown["explorer-0", "explore 1"], shown["trainer-0", "train 1"]
    assert (explore["ts"], explore["dur"], explore["args"]) == (0, 2_000_000, {"batch": 1})
    assert (train["ts"], train["dur"], train["args"]) == (2_500_000, 1_500_000, {"progress": 1})
    theirs, ours = shown["trainer-0", "sync 1"], shown["explorer-0", "sync 1"]
    assert theirs["args"] == {"progress": 1, "pause_ms": 3.0, "transfer_ms": 400.0}
    assert (theirs["ts"], theirs["dur"]) == (ours["ts"], ours["dur"]) == (4_000_000, 500_000)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=40))
def test_no_span_covers_another_in_its_track_and_none_is_lost(times: list[tuple[float, float]]) -> None:
    every = [Span("a", "explorer", "explore", n, start, start + seconds) for n, (start, seconds) in enumerate(times)]
    spread = tracks(every)
    assert sorted(span.step for track in spread for span in track) == list(range(len(times)))
    for track in spread:
        for before, after in itertools.pairwise(track):
            assert before.end <= after.start + timeline.SLACK


@pytest.fixture
def trace_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    trace.stop_trace()
    works_on(None)


def recorded(trace_folder: Path) -> list[TraceSpan]:
    trace.flush_trace()
    return read_trace(trace_folder)


def test_switched_off_nothing_is_written(trace_folder: Path) -> None:
    start_trace("runner", "runner-0", trace_folder, on=False)
    with span("decode slice", 1, size=3) as traced:
        traced.size = 4
    record("confirm", 1.0, 2.0, batch=1)
    assert trace.trace_headers() == {}
    assert list(trace_folder.iterdir()) == []


def test_a_span_has_its_times_its_processor_time_and_its_batch(trace_folder: Path) -> None:
    start_trace("runner", "runner-0", trace_folder, on=True)
    began = time.time()
    with span("decode slice") as traced:
        started = time.thread_time()
        while time.thread_time() - started < 0.01:
            pass
        traced.batch, traced.size = 7, 100
    with span("ask engine", 7, wait=True):
        pass
    with span("decode slice"):
        pass  # of no batch, as a message that does not decode
    work, wait = recorded(trace_folder)
    assert (work.role, work.agent, work.what, work.batch, work.bytes) == ("runner", "runner-0", "decode slice", 7, 100)
    assert work.cpu is not None
    assert 0.0099 <= work.cpu <= work.end - work.start + 0.001
    assert -0.01 <= work.start - began < 1
    assert (wait.wait, wait.cpu) == (True, None)


def test_many_spans_are_written_before_the_end(trace_folder: Path) -> None:
    start_trace("engine", "engine-0", trace_folder, on=True)
    began = time.monotonic()
    for _ in range(trace.BUFFERED + 1):
        record("generate", began, began, batch=1)
    assert len(read_trace(trace_folder)) == trace.BUFFERED
    assert len(recorded(trace_folder)) == trace.BUFFERED + 1


def test_clocks_of_one_host_are_kept_and_of_another_shifted_as_a_whole(tmp_path: Path) -> None:
    def write(agent: str, clock: str, offset: float, start: float) -> None:
        who = {"role": agent[:-2], "agent": agent, "clock": clock, "pid": 1, "offset": offset}
        line = ["work", 1, None, int(1e6 * start), int(1e6 * start), None, 1, 0, False]
        (tmp_path / "trace" / f"{agent}.jsonl").write_text(f"{json.dumps(who)}\n{json.dumps([line])}\n")

    (tmp_path / "trace").mkdir()
    write("explorer-0", "a", 1000.0, 5.0)
    write("runner-0", "a", 1003.0, 5.5)  # the clock of the day was set meanwhile: on one host that is no difference
    write("trainer-0", "b", 905.0, 101.0)
    starts = {one.agent: one.start for one in read_trace(tmp_path)}
    assert starts == {"explorer-0": 1005.0, "runner-0": 1005.5, "trainer-0": 1006.0}


def one(role: str, what: str, start: float, end: float, batch: int = 1, **more: object) -> TraceSpan:
    return TraceSpan(role=role, agent=f"{role}-0", what=what, start=start, end=end, batch=batch, **more)  # type: ignore[arg-type]


TRACE = [
    one("explorer", "make ticket", 10.0, 10.010, cpu=0.008),
    one("explorer", "confirm task_slice", 10.010, 10.030, wait=True, bytes=100),
    one("runner", "decode slice", 10.020, 10.021, cpu=0.001, bytes=100),
    one("runner", "ask engine", 10.021, 10.061, wait=True),
    one("runner", "decode slice", 10.022, 10.023, cpu=0.001, bytes=100),
    one("engine", "generate", 10.031, 10.051),
    one("explorer", "make manifest", 10.061, 10.062),
    one("operator", "read parts", 10.062, 10.070, wait=True),
    one("operator", "confirm batch_ready", 10.070, 10.072, wait=True),
    one("trainer", "train step", 10.050, 10.100, batch=0),
    one("trainer", "decode chunks", 10.100, 10.101),
    one("trainer", "train step", 10.101, 10.181),
    one("trainer", "write history", 10.181, 10.182),
    one("explorer", "commit at engine", 10.190, 10.200, wait=True, version="1.2"),
    one("explorer", "commit at engine", 10.090, 10.095, batch=0, wait=True, version="1.1"),
]


def test_the_waterfall_of_a_batch() -> None:
    found = lay_out(TRACE, "1")
    assert batches_of(TRACE) == ["1", "0"]
    assert found.took == pytest.approx(200)
    assert {name: round(took) for name, took in found.stages.items()} == {
        "rollout": 61,
        "closing": 1,
        "operators": 10,
        "wait for the trainer": 28,
        "training": 81,
        "sync": 19,
    }
    rows = {(row.who, row.what): row for row in found.rows}
    slices = rows["runner", "decode slice"]
    assert (slices.times, slices.bytes, round(slices.start), round(slices.total)) == (2, 200, 20, 2)
    assert slices.cpu == pytest.approx(2)
    assert round(slices.took) == 3
    assert rows["explorer", "commit at engine"].times == 1, "that of the version which came of this batch"
    assert [row.start for row in found.rows] == sorted(row.start for row in found.rows)
    assert found.worked["trainer"] == pytest.approx(82)
    assert found.worked_elsewhere == {"trainer": pytest.approx(50)}


def test_gaps_say_who_waited_for_whom_and_what_else_was_done() -> None:
    found = lay_out(TRACE, "1")
    by_start = {round(gap.start): gap for gap in found.gaps}
    lengths = {start: round(gap.took) for start, gap in by_start.items()}
    assert lengths == {10: 10, 21: 1, 23: 8, 51: 10, 62: 38, 182: 18}
    assert by_start[10].waits == ("explorer: confirm task_slice",)
    assert (by_start[23].after, by_start[23].before) == ("runner: decode slice", "engine: generate")
    assert by_start[23].waits == ("runner: ask engine", "explorer: confirm task_slice")
    assert (by_start[62].after, by_start[62].before) == ("explorer: make manifest", "trainer: decode chunks")
    assert by_start[62].waits == ()
    assert by_start[62].meanwhile == ("trainer: train step",), "the trainer had another batch"
    assert found.idle == pytest.approx(85)
