from __future__ import annotations

import json
import math
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.telemetry import MetricsWriter, read_metrics, sparkline
from trinity_mq.telemetry.tail import Tail


def test_one_line_a_step(tmp_path: Path) -> None:
    before = time.time()
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "sample/staleness/max": 1})
    writer.write(2, {"actor/pg_loss": float("nan"), "actor/grad_norm": float("inf")})
    writer.write(3, {"a": np.float32(0.5), "b": np.int64(3), "c": True})  # type: ignore[dict-item]
    writer.close()
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert list(first)[:4] == ["time", "role", "agent", "step"]
    assert before - 1 <= first.pop("time") <= time.time() + 1
    fields = {"role": "trainer", "agent": "trainer-0", "step": 1}
    assert first == {**fields, "actor/pg_loss": 0.5, "sample/staleness/max": 1}
    assert (third["a"], third["b"], third["c"]) == (0.5, 3, 1)
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
