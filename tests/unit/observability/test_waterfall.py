"""A batch's trace: recorded by processes, read, and laid out as a waterfall."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.observability.waterfall import batches_of, lay_out, median_waterfall
from trinity_mq.telemetry import trace
from trinity_mq.telemetry.trace import BATCH, TraceSpan, record, shared_span, span, start_trace, works_on
from trinity_mq.telemetry.trace_files import read_trace


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    trace.stop_trace()
    works_on(None)


def recorded(folder: Path) -> list[TraceSpan]:
    trace.flush_trace()
    return read_trace(folder)


def test_switched_off_nothing_is_written(folder: Path) -> None:
    start_trace("runner", "runner-0", folder, on=False)
    with span("decode slice", 1, size=3) as traced:
        traced.size = 4
    record("confirm", 1.0, 2.0, batch=1)
    assert trace.trace_headers() == {}
    assert list(folder.iterdir()) == []


def test_a_span_has_its_times_its_processor_time_and_its_batch(folder: Path) -> None:
    start_trace("runner", "runner-0", folder, on=True)
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
    work, wait = recorded(folder)
    assert (work.role, work.agent, work.what, work.batch, work.bytes) == ("runner", "runner-0", "decode slice", 7, 100)
    assert work.cpu is not None
    assert 0.0099 <= work.cpu <= work.end - work.start + 0.001
    assert -0.01 <= work.start - began < 1
    assert (wait.wait, wait.cpu) == (True, None)


def test_work_for_several_batches_at_once_is_a_span_of_each(folder: Path) -> None:
    start_trace("engine", "engine-0", folder, on=True)
    with shared_span("generate", {1: 24, None: 4, 2: 4}):
        began = time.process_time()
        while time.process_time() - began < 0.032:
            pass
    first, second = recorded(folder)
    assert [(first.batch, first.count), (second.batch, second.count)] == [(1, 24), (2, 4)]
    assert (first.start, first.end) == (second.start, second.end)
    assert first.cpu is not None
    assert second.cpu is not None
    assert first.cpu >= 0.0239, "24 of 32 parts"
    assert first.cpu == pytest.approx(6 * second.cpu, abs=1e-5)


def test_the_batch_is_that_of_the_task_else_of_the_process(folder: Path) -> None:
    start_trace("operator", "operator-0", folder, on=True)
    works_on(3)

    def in_a_thread() -> None:
        with span("decode parts"):
            pass

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    token = BATCH.set("4")
    assert trace.trace_headers()["X-TMQ-Batch"] == "4"
    with span("make request"):
        pass
    BATCH.reset(token)
    assert [one.batch for one in recorded(folder)] == [3, "4"]


def test_many_spans_are_written_before_the_end(folder: Path) -> None:
    start_trace("engine", "engine-0", folder, on=True)
    began = time.monotonic()
    for _ in range(trace.BUFFERED + 1):
        record("generate", began, began, batch=1)
    assert len(read_trace(folder)) == trace.BUFFERED
    assert len(recorded(folder)) == trace.BUFFERED + 1


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


def test_medians_of_several_leave_out_what_is_seldom() -> None:
    def later(seconds: float, batch: int, factor: float) -> list[TraceSpan]:
        return [
            one("explorer", "make ticket", 10 + seconds, 10 + seconds + factor, batch),
            one("trainer", "train step", 12 + seconds, 12 + seconds + 2 * factor, batch),
        ]

    rare = one("trainer", "save checkpoint", 21.0, 21.1, 2)
    spans = [*later(0, 1, 0.1), *later(10, 2, 0.2), *later(20, 3, 0.6), rare]
    found = median_waterfall([lay_out(spans, str(batch)) for batch in (1, 2, 3)])
    assert found.batch == "1 to 3"
    assert [(row.what, round(row.total)) for row in found.rows] == [("make ticket", 200), ("train step", 400)]
    assert [round(gap.took) for gap in found.gaps] == [1650]  # between the two whose gap no rare span cuts
    assert found.worked["trainer"] == pytest.approx(500)
