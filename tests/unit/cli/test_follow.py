from __future__ import annotations

from pathlib import Path

from trinity_mq.cli.run.follow import MetricsTail
from trinity_mq.telemetry import MetricsWriter


def test_new_lines_come_once(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.read() == []
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "actor/grad_norm": float("nan")})
    (first,) = tail.read()
    assert (first.role, first.id, first.step, first.values) == ("trainer", "trainer-0", 1, {"actor/pg_loss": 0.5})
    assert tail.read() == []
    writer.write(2, {})
    writer.write(3, {})
    writer.close()
    assert [message.step for message in tail.read()] == [2, 3]


def test_torn_and_unfinished_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"role": "trainer", "agent": "trainer-0", "step": 1}\n'
    path.write_bytes(
        b'{"role": "tra\n' + b"[1]\n" + b'{"role": "nobody", "agent": "x", "step": 1}\n' + line + line[:20]
    )
    tail = MetricsTail(tmp_path)
    assert [message.step for message in tail.read()] == [1]
    with path.open("ab") as file:
        file.write(line[20:])
    assert [message.step for message in tail.read()] == [1]


def test_a_run_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"role": "trainer", "agent": "trainer-0", "step": %d}\n'
    path.write_bytes(line % 1 + line % 2)
    tail = MetricsTail(tmp_path)
    assert len(tail.read()) == 2
    path.unlink()
    path.write_bytes(line % 7)
    assert [message.step for message in tail.read()] == [7]
