"""The explorer's state file."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.explorer import state as state_module
from trinity_agents.explorer.state import ExplorerState, PendingTask, StateFile
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket
from trinity_mq.messages import TaskBody, TaskResult
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.state_formats import NewerStateError


def test_what_is_saved_is_loaded_and_a_missing_file_is_a_fresh_start(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state" / "explorer.db")
    assert file.load() == ExplorerState()
    state = ExplorerState(opened=3, due=[2], pending=[PendingTask(task=TaskBody(raw_task={"n": 1}))])
    asyncio.run(file.save(state))
    assert StateFile(tmp_path / "state" / "explorer.db").load() == state


def a_ticket(tasks: int = 3) -> Ticket:
    bodies = [TaskBody(raw_task={"n": n}, repeat_times=2) for n in range(tasks)]
    more = {"submissions": [SubmissionRef(submission_id="s", task_id=1)], "max_repeat_times": 1}
    return new_ticket(1, bodies, deliver="pipeline", lane="train", time_left=60.0, **more)


def a_result(ticket: Ticket, task: int, run: int = 0) -> TaskResult:
    fields = {"batch": 1, "ticket": ticket.ticket, "task_id": task, "run_base": run, "attempt": "a" * 32}
    return TaskResult(**fields, outcome="finished", runs=[run], metrics=[{"reward": 1.0}])


def test_a_state_that_changes_step_by_step_is_loaded_as_it_was_last_saved(tmp_path: Path) -> None:
    """Every second time by a process that has loaded it and not saved the steps before."""
    path = tmp_path / "explorer.db"
    ticket, other = a_ticket(), a_ticket()
    state = ExplorerState(tickets={one.ticket: one for one in (ticket, other)})
    pending = [PendingTask(task=TaskBody(raw_task={"n": n})) for n in range(4)]

    steps: list[Callable[[], Any]] = [
        lambda: state.pending.extend(pending[:3]),
        lambda: ticket.record(a_result(ticket, 2)),
        lambda: (ticket.record(a_result(ticket, 0, 1)), ticket.cancel_rest("enough"), state.pending.pop(0)),
        lambda: state.pending.insert(0, pending[3]),
        lambda: (state.following.add(ticket.make_manifest(), (), {0: ticket.tasks[0]}), setattr(ticket, "grace", 1.0)),
        lambda: setattr(ticket, "manifest", ticket.make_manifest()),
        lambda: (state.tickets.pop(ticket.ticket), state.following.tickets[ticket.ticket].returned([])),
        lambda: (state.following.tickets.clear(), state.pending.clear(), state.due.append(3)),
    ]
    file = StateFile(path)
    asyncio.run(file.save(state))
    for number, step in enumerate(steps):
        step()
        asyncio.run(file.save(state))
        reader = StateFile(path)
        found = reader.load()
        assert found.model_dump() == state.model_dump()
        if number % 2:
            file, state = reader, found
            ticket = state.tickets.get(ticket.ticket, ticket)


def test_a_save_writes_what_changed_and_not_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    pack = state_module._pack
    monkeypatch.setattr(state_module, "_pack", lambda content: (written.append(content), pack(content))[1])
    ticket = a_ticket(tasks=1000)
    state = ExplorerState(
        tickets={ticket.ticket: ticket}, pending=[PendingTask(task=TaskBody(raw_task={"n": n})) for n in range(1000)]
    )
    file = StateFile(tmp_path / "explorer.db")
    asyncio.run(file.save(state))
    written.clear()
    first = a_result(ticket, 7)
    ticket.record(first)
    ticket.time_left -= 1
    state.pending.append(PendingTask(task=TaskBody(raw_task={"n": -1})))
    asyncio.run(file.save(state))
    assert written == [first, state.pending[-1]]


def test_submissions_are_known_however_many_came_since(tmp_path: Path) -> None:
    file, state = StateFile(tmp_path / "explorer.db"), ExplorerState()
    state.accepted += [f"s{n}" for n in range(20_000)]
    asyncio.run(file.save(state))
    assert state.accepted == []
    state.accepted.append("last")
    asyncio.run(file.save(state))
    for reader in (file, StateFile(tmp_path / "explorer.db")):
        assert asyncio.run(reader.known(["s0", "s19999", "last", "s20000", ""])) == {"s0", "s19999", "last"}


def commits(path: Path) -> int:
    """Return the number of transactions that changed an SQLite file: its file change counter."""
    return int.from_bytes(path.read_bytes()[24:28], "big")


async def test_saves_that_are_asked_for_at_once_share_a_write(tmp_path: Path) -> None:
    file, state = StateFile(tmp_path / "explorer.db"), ExplorerState()
    await file.save(state)
    before = commits(tmp_path / "explorer.db")

    async def save(number: int) -> None:
        state.opened = number
        await file.save(state)
        assert StateFile(tmp_path / "explorer.db").load().opened >= number

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(save(number))
    assert commits(tmp_path / "explorer.db") - before == 2, "the first, and one for all who asked while it was written"


async def test_a_cancelled_save_is_written_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    write = StateFile._write

    def slow(self: StateFile, changes: Any) -> None:
        if not began.is_set():
            began.set()
            go_on.wait(10)
        write(self, changes)

    monkeypatch.setattr(StateFile, "_write", slow)
    file, state = StateFile(tmp_path / "explorer.db"), ExplorerState(opened=1)
    first = asyncio.create_task(file.save(state))
    await asyncio.to_thread(began.wait)
    first.cancel()
    state.opened = 2
    second = asyncio.create_task(file.save(state))
    await asyncio.sleep(0)
    go_on.set()
    await second
    assert first.cancelled()
    assert file.load().opened == 2


@pytest.mark.parametrize("content", [b"", b"\xc1", b"SQLite format 3\0" + b"\xff" * 5000])
def test_damage_is_one_line_that_names_the_file_and_the_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "explorer.db"
    path.write_bytes(content)
    with pytest.raises(FatalError) as caught:
        StateFile(path).load()
    assert str(path) in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_another_wrote_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    """It had the lock while we were cut off, and let it go before we were back: the lock alone tells nothing."""
    path = tmp_path / "explorer.db"
    mine, other = StateFile(path), StateFile(path)
    asyncio.run(mine.save(ExplorerState(opened=1)))
    taken_over = other.load()
    taken_over.opened = 5
    asyncio.run(other.save(taken_over))
    with pytest.raises(RestartRequested, match="another explorer has resumed"):
        asyncio.run(mine.save(ExplorerState(opened=2)))
    assert StateFile(path).load().opened == 5


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path / "explorer.db")
    asyncio.run(file.save(ExplorerState()))
    with sqlite3.connect(tmp_path / "explorer.db") as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    connect = sqlite3.connect

    def with_a_full_disk(*what: Any, **how: Any) -> sqlite3.Connection:
        database = connect(*what, **how)
        database.execute(f"PRAGMA max_page_count = {pages}")
        return database

    monkeypatch.setattr(sqlite3, "connect", with_a_full_disk)
    state = ExplorerState(pending=[PendingTask(task=TaskBody(raw_task={"text": "x" * 100_000}))])
    with pytest.raises(OSError, match="the explorer's state cannot be used: database or disk is full") as caught:
        asyncio.run(file.save(state))
    assert caught.value.errno == errno.ENOSPC
    assert StateFile(tmp_path / "explorer.db").load() == ExplorerState()


def test_the_file_of_a_newer_release_is_refused_and_left_as_it_is_and_one_without_a_format_gets_one(
    tmp_path: Path,
) -> None:
    """Release 0.1.0 wrote no format."""
    path, state = tmp_path / "explorer.db", ExplorerState(opened=3)
    asyncio.run(StateFile(path).save(state))
    newer = state_module.NEWEST_FORMAT + 1
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {newer}")
        before = path.read_bytes()
        with pytest.raises(NewerStateError) as refused:
            StateFile(path).load()
        assert path.read_bytes() == before
        for words in (
            f"{path} has format {newer}",
            f"reads formats 1 to {newer - 1}",
            "Upgrade trinity-mq here, or re",
        ):
            assert words in str(refused.value)
        database.execute("PRAGMA user_version = 0")
        file = StateFile(path)
        assert file.load() == state
        asyncio.run(file.save(ExplorerState(opened=4)))
        assert database.execute("PRAGMA user_version").fetchone() == (newer - 1,)
    assert StateFile(path).load().opened == 4
