"""``trinity-mq logs``: lines of all agents merged by time, chosen, written for people, and followed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_mq.cli.main import main
from trinity_mq.errors import CommandError
from trinity_mq.observability.logs.files import LineFilter, LogFiles, LogLine, format_line, parse, since
from trinity_mq.runtime.process import mark_run_over


def line(second: float, agent: str = "runner-0", event: str = "runs_failed", **fields: Any) -> str:
    role = agent.partition("-")[0]
    stamp = f"2026-11-26T12:00:{second:09.6f}Z"
    return json.dumps({"time": stamp, "level": "info", "role": role, "agent": agent, "event": event, **fields})


def put(folder: Path, agent: str, *lines: str) -> Path:
    path = folder / "logs" / f"{agent}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{one}\n" for one in lines))
    return path


def found(text: str) -> LogLine:
    made = parse(text)
    assert made is not None
    return made


def test_lines_of_all_agents_come_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "runner-0", line(1, batch=1), '{"torn": ', line(3, batch=2))
    put(tmp_path, "trainer-0", line(2, "trainer-0", "batch_done", batch=1, outcome="trained", train_step=7))
    put(tmp_path, "empty")
    assert main(["logs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [one.split()[2] for one in shown] == ["runner-0", "trainer-0", "runner-0"]
    assert shown[1].endswith("trainer-0    batch done batch=1 outcome=trained train_step=7")
    assert "\x1b" not in "".join(shown)
    assert main(["logs", str(tmp_path), "--lines", "1", "--json"]) == 0
    assert capsys.readouterr().out == line(3, batch=2) + "\n"


@given(st.lists(st.lists(st.integers(0, 59), max_size=8).map(sorted), max_size=5))
def test_the_merge_is_the_sorted_whole(tmp_path_factory: pytest.TempPathFactory, files: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("run")
    for number, seconds in enumerate(files):
        put(folder, f"runner-{number}", *(line(second, f"runner-{number}") for second in seconds))
    merged = [one.time for one in LogFiles(folder).merged()]
    assert merged == sorted(merged)
    assert len(merged) == sum(map(len, files))


def test_lines_are_chosen() -> None:
    lines = [
        found(text)
        for text in (
            line(1, batch=4, ticket="t4"),
            line(2, batch=5, ticket="t5"),
            line(3, "operator-0", ticket="t4", level="warning"),
            line(4, "operator-0", ticket="t5"),
            line(5, "explorer-0", batch="4/gsm8k"),
            line(6, "explorer-0", "Nothing_Found"),
        )
    ]

    def chosen(**how: Any) -> list[int]:
        one = LineFilter(**how)
        return [number for number, each in enumerate(lines, 1) if one.takes(each)]

    assert chosen() == [1, 2, 3, 4, 5, 6]
    assert chosen(batch="4") == [1, 3], "a line that names only the ticket belongs to its batch"
    assert chosen(batch="4/gsm8k") == [5]
    assert chosen(agent="operator") == chosen(agent="operator-0") == [3, 4]
    assert chosen(level="warning") == [3]
    assert chosen(grep="nothing_found") == [6]
    assert chosen(since=lines[3].time) == [4, 5, 6]
    assert chosen(batch="4", level="error") == []


def test_a_line_cannot_command_the_terminal() -> None:
    text = format_line(found(line(1, event="a\x1b[31mb", reason="two\nlines \x07", exception="Trace\nValueError: no")))
    assert "\n" not in text
    assert "\x1b" not in text
    assert "error=" in text
    assert "ValueError: no" in text
    assert format_line(found(line(1, level="error")), colour=True).startswith("\x1b[31m")
    for name in ("level", "agent", "event", "batch", "ticket", "exception", "more", "\x1b]52;c;x\x07"):
        evil = format_line(found(line(1, **{name: "\x1b]52;c;x\x07\u202e"})), colour=True)
        assert evil.isprintable(), name


def test_no_line_of_a_log_file_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder may be somebody else's."""
    fields = json.loads(line(1))
    odd: list[Any] = [None, 5, "", " \n", [1], {"a": [1]}, "\ud800", 1e308, True]
    lines = [json.dumps({**fields, name: value}) for name in [*fields, "exception", "batch"] for value in odd]
    times = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59", "0001-01-01T00:00:00"]
    put(tmp_path, "runner-0", *lines, *(json.dumps({**fields, "time": time}) for time in times), "[]", "5", "null")
    for more in ((), ("--agent", "x"), ("--batch", "1"), ("--level", "error"), ("--grep", "x"), ("--json",)):
        assert main(["logs", str(tmp_path), *more]) == 0
    assert "runs failed" in capsys.readouterr().out


def test_ages() -> None:
    assert [since(text, lambda: 1000.0) for text in (None, "90", "10m", "0.1h")] == [None, 910.0, 400.0, 640.0]
    with pytest.raises(CommandError, match="such as 10m"):
        since("soon")


def test_files_that_were_replaced_or_renamed_are_read_once_and_whole(tmp_path: Path) -> None:
    path = put(tmp_path, "runner-0", line(1), line(2))
    files = LogFiles(tmp_path)

    def appended() -> list[str]:
        lines, more = files.read_appended()
        assert not more
        return [one.text for one in lines]

    assert len(list(files.merged())) == 2
    assert appended() == []
    put(tmp_path, "runner-0", line(3))
    path.replace(path.with_name("runner-0.1.jsonl"))
    put(tmp_path, "runner-0", line(4))
    assert appended() == [line(3), line(4)], "a file that was renamed goes on where it was"
    assert appended() == []
    assert len(list(LogFiles(tmp_path).merged())) == 4, "a log in two files is read whole"
    (tmp_path / "logs").rename(tmp_path / "earlier")  # as by --fresh
    put(tmp_path, "runner-0", line(5))
    assert appended() == [line(5)]
    with path.open("a") as file:
        file.write(line(6)[:20])
        file.flush()
        assert appended() == [], "half a line is none yet"
        file.write(line(6)[20:] + "\n")
    assert appended() == [line(6)]


async def following(folder: Path, *words: str, out: int = subprocess.PIPE) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "trinity_mq.cli.main", "logs", str(folder), "--follow", *words]
    return await asyncio.create_subprocess_exec(*argv, stdout=out, stderr=subprocess.PIPE)


async def next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().rstrip()


async def test_it_follows_until_the_run_is_over(tmp_path: Path) -> None:
    put(tmp_path, "runner-0", line(1, batch=41))
    lock = tmp_path / "lock"
    with lock.open("w") as held:
        held.write(str(os.getpid()))
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        process = await following(tmp_path, "--batch", "41")
        assert (await next_line(process)).endswith("batch=41")
        put(tmp_path, "runner-0", line(2, batch=42), line(3, batch=41, n=2))
        assert (await next_line(process)).endswith("batch=41 n=2")
        put(tmp_path, "trainer-0", line(4, "trainer-0", batch=41, n=3))
        assert "trainer-0" in await next_line(process)
        mark_run_over(tmp_path)
        put(tmp_path, "supervisor", line(5, "supervisor", batch=41, n=4))
        assert (await next_line(process)).endswith("n=4"), "its supervisor still works"
        assert process.returncode is None
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    put(tmp_path, "runner-0", line(1))
    reader, writer = os.pipe()
    process = await following(tmp_path, out=writer)
    os.close(writer)
    assert await asyncio.to_thread(os.read, reader, 1)
    os.close(reader)
    deadline = time.monotonic() + 20
    while process.returncode is None and time.monotonic() < deadline:
        put(tmp_path, "runner-0", line(2))
        await asyncio.sleep(0.2)
    assert process.stderr is not None
    assert (await process.stderr.read(), process.returncode) == (b"", 1)


def test_a_run_without_logs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("name: x\nmodel: {tiny: {}}\n")
    assert main(["logs", str(tmp_path)]) == 1
    assert "no agent of this run has started on this machine" in capsys.readouterr().err
