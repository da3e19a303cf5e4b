from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from trinity_mq.telemetry import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Broker:
    def __init__(self, url: str) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"Broker({self.url})"


def lines(run_dir: Path, agent: str = "trainer-0") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "logs" / f"{agent}.jsonl").read_text().splitlines()]


def test_one_json_line_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second one replaces the first
        setup_logging("trainer", "trainer-0", tmp_path)
    get_logger("trinity_mq.test").bind(ticket="t1").info("step_done", step=3, loss=float("nan"))
    (line,) = lines(tmp_path)
    assert list(line)[:5] == ["time", "level", "role", "agent", "event"]
    assert line["event"] == "step_done"
    assert (line["role"], line["agent"], line["level"]) == ("trainer", "trainer-0", "info")
    assert (line["step"], line["ticket"], line["loss"]) == (3, "t1", None)
    assert line["logger"] == "trinity_mq.test"
    assert line["time"].endswith("Z")
    assert capsys.readouterr() == ("", "")


def test_errors_are_short_on_stderr_and_whole_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("trainer", "trainer-0", tmp_path)
    try:
        raise ValueError("no such\ntensor")
    except ValueError:
        get_logger("x").exception("load_failed", path="/m")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "trainer: load_failed path=/m: ValueError: no such tensor\n"
    (line,) = lines(tmp_path)
    assert "Traceback" in line["exception"]
    assert "_logger" not in line


def test_an_error_line_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("runner", "runner-0", tmp_path)
    evil = "\x1b]52;c;x\x07\u202e\ud800"
    get_logger("trinity_mq.x").error("refused", **{evil: evil}, reason=f"unknown workflow {evil}")
    logging.getLogger("x").error("no %s", evil)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:15] for line in lines] == ["runner: unknown", r"runner: no \u001b"[:15]]
    assert all(line.isprintable() for line in lines)
    written = [json.loads(line) for line in (tmp_path / "logs" / "runner-0.jsonl").read_text().splitlines()]
    assert [line["event"] for line in written] == ["refused", f"no {evil}"]
    assert written[0]["reason"] == f"unknown workflow {evil}"


def test_libraries_and_warnings_arrive_in_the_same_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("runner", "trainer-0", tmp_path)
    logging.getLogger("some.library").info("hello %s", "there", extra={"job": 4})
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("some.library").exception("broke")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", stacklevel=1)
    first, second, third = lines(tmp_path)
    assert (first["event"], first["job"], first["logger"]) == ("hello there", 4, "some.library")
    assert "KeyError" in second["exception"]
    assert "old thing" in third["event"]
    assert third["level"] == "warning"
    assert capsys.readouterr().err == "runner: broke: KeyError: 'k'\n"


def test_passwords_are_masked_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("runner", "trainer-0", tmp_path)
    url = "amqp://guest:hunter2@localhost:5672/"
    try:
        raise ConnectionError(f"cannot reach {url}")
    except ConnectionError:
        get_logger("x").exception("gone", url=url, nested={"urls": [url]}, thing=Broker(url))
    logging.getLogger("lib").error("tried %s", url)
    assert "hunter2" not in (tmp_path / "logs" / "trainer-0.jsonl").read_text()
    assert "hunter2" not in capsys.readouterr().err
    assert lines(tmp_path)[0]["url"] == "amqp://guest:***@localhost:5672/"


WRITER = """
import sys
from pathlib import Path
from trinity_mq.telemetry import get_logger, setup_logging

setup_logging("runner", "isolated", Path(sys.argv[1]), max_bytes=20_000)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 150):
    get_logger("writer").info("counted", number=number)
"""


def test_a_full_log_begins_anew_and_keeps_the_file_before(tmp_path: Path) -> None:
    setup_logging("trainer", "trainer-0", tmp_path, max_bytes=10_000)
    for number in range(500):
        get_logger("here").info("counted", number=number)
    kept = [*lines(tmp_path, "trainer-0.1"), *lines(tmp_path)]
    assert [line["number"] for line in kept] == list(range(500 - len(kept), 500))
    assert 50 < len(kept) < 200
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 20_400


def test_a_new_file_that_cannot_be_opened_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("trainer", "trainer-0", tmp_path, max_bytes=1000)
    log, whole = get_logger("here"), logging.FileHandler._open
    full = OSError(28, "No space left on device")

    def refuse(self: logging.FileHandler) -> Any:
        raise full

    for number in range(40):
        monkeypatch.setattr(logging.FileHandler, "_open", refuse if 10 <= number < 20 else whole)
        log.info("counted", number=number)
    assert [line["number"] for line in lines(tmp_path)][-1] == 39
    assert capsys.readouterr().err.count("cannot be written: No space left on device") == 1


def test_a_file_that_another_process_is_moving_is_written_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finds the file full just before this one moves it: moved twice, its lines would be lost."""
    setup_logging("runner", "isolated", tmp_path, max_bytes=20_000)
    log, replace, moved = get_logger("here"), os.replace, 0

    def other_first(source: str, target: Path) -> None:
        nonlocal moved
        moved += 1
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), "5000"], check=True)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", other_first)
        number = 0
        while not moved:
            log.info("counted", number=number)
            number += 1
    log.info("counted", number=number)
    kept = [line["number"] for name in ("isolated.1", "isolated") for line in lines(tmp_path, name)]
    assert sorted(kept) == [*range(number + 1), *range(5000, 5150)]
    assert moved == 1


def test_processes_that_share_a_log_begin_it_anew_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(1000 * number)]) for number in range(3)
    ]
    assert [one.wait() for one in processes] == [0, 0, 0]
    found = [*lines(tmp_path, "isolated.1"), *lines(tmp_path, "isolated")]
    assert len(found) > 100, "each file that was begun anew was full"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["isolated.1.jsonl", "isolated.jsonl"]
    assert (tmp_path / "logs" / "isolated.1.jsonl").stat().st_size >= 20_000
