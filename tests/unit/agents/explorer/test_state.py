"""The explorer's state file."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_agents.explorer.state import NEWEST_FORMAT, ExplorerState, PendingTask, StateFile, TicketStatistics
from trinity_agents.explorer.task_source import TaskSource, task_stats
from trinity_agents.simulation import Simulation, killed
from trinity_mq.config import Config, TasksetConfig, load_config
from trinity_mq.config.agents import ExplorerConfig, RefillConfig
from trinity_mq.data import Taskset, TaskStats, open_taskset
from trinity_mq.dispatch.batch_metrics import taskset_metrics
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket, sort_batch_id
from trinity_mq.messages import TaskBody, TaskResult, TaskSubmission
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.state_formats import NewerStateError
from trinity_mq.testing.virtual_time import run_virtually


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

    def follow() -> None:
        state.following.add(ticket.make_manifest(), (), {0: ticket.tasks[0]})
        ticket.grace = 1.0

    def close() -> None:
        ticket.manifest = ticket.make_manifest()

    steps: list[Callable[[], Any]] = [
        lambda: state.pending.extend(pending[:3]),
        lambda: ticket.record(a_result(ticket, 2)),
        lambda: (ticket.record(a_result(ticket, 0, 1)), ticket.cancel_rest("enough"), state.pending.pop(0)),
        lambda: state.pending.insert(0, pending[3]),
        follow,
        close,
        lambda: (state.tickets.pop(ticket.ticket), state.following.tickets[ticket.ticket].returned([])),
        lambda: (state.following.tickets.clear(), state.pending.clear(), state.due.append(3)),
    ]
    file = StateFile(path)
    assert file.load() == ExplorerState(), "a missing file is a fresh start"
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


def test_a_save_writes_what_changed_and_not_what_is_open(tmp_path: Path) -> None:
    ticket = a_ticket(tasks=1000)
    state = ExplorerState(
        tickets={ticket.ticket: ticket}, pending=[PendingTask(task=TaskBody(raw_task={"n": n})) for n in range(1000)]
    )
    file = StateFile(tmp_path / "explorer.db")
    asyncio.run(file.save(state))
    with sqlite3.connect(tmp_path / "explorer.db") as database:  # each row that is written from now on is noted
        database.execute("CREATE TABLE written (name)")
        database.execute("CREATE TRIGGER note AFTER INSERT ON part BEGIN INSERT INTO written VALUES (new.name); END")
    ticket.record(a_result(ticket, 7))
    ticket.time_left -= 1
    state.pending.append(PendingTask(task=TaskBody(raw_task={"n": -1})))
    asyncio.run(file.save(state))
    with sqlite3.connect(tmp_path / "explorer.db") as database:
        written = [name for (name,) in database.execute("SELECT name FROM written")]
    assert written == ["core", f"ticket/{ticket.ticket}/result/7/0", "pending/1000/task", "writer"]


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


async def test_a_cancelled_save_is_written_before_the_next(tmp_path: Path) -> None:
    file, state = StateFile(tmp_path / "explorer.db"), ExplorerState()
    await file.save(state)
    with closing(sqlite3.connect(tmp_path / "explorer.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the next write waits for the lock
        state.opened = 1
        first = asyncio.create_task(file.save(state))
        await asyncio.sleep(0.05)
        for _ in range(2):
            first.cancel()
            await asyncio.sleep(0)
        state.opened = 2
        second = asyncio.create_task(file.save(state))
        await asyncio.sleep(0.05)
        assert not first.done()
        other.execute("ROLLBACK")
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


class Full(StateFile):
    """On a disk without room for another page, until ``is_full`` is False."""

    is_full = True

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        with super()._database() as database:
            if self.is_full:
                pages = database.execute("PRAGMA page_count").fetchone()[0]
                database.execute(f"PRAGMA max_page_count = {pages}")
            yield database


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    asyncio.run(StateFile(tmp_path / "explorer.db").save(ExplorerState()))
    file = Full(tmp_path / "explorer.db")
    file.load()
    ticket = a_ticket()
    ticket.record(a_result(ticket, 0))
    state = ExplorerState(
        pending=[PendingTask(task=TaskBody(raw_task={"text": "x" * 100_000}))],
        tickets={ticket.ticket: ticket},
        accepted=["s"],
        observations=[TicketStatistics(ticket=ticket.ticket, stats={"train": [TaskStats(0, 0.5, 2)]})],
    )
    state.following.add(ticket.make_manifest())
    before = state.model_dump()
    with pytest.raises(OSError, match="the explorer's state cannot be used: database or disk is full") as caught:
        asyncio.run(file.save(state))
    assert caught.value.errno == errno.ENOSPC
    assert StateFile(tmp_path / "explorer.db").load() == ExplorerState()
    file.is_full = False  # as for a save that waited for the failed write
    asyncio.run(file.save(state))
    assert StateFile(tmp_path / "explorer.db").load().model_dump() == {**before, "accepted": []}
    assert asyncio.run(file.known(["s"])) == {"s"}


def test_the_file_of_a_newer_release_is_refused_and_left_as_it_is_and_one_without_a_format_gets_one(
    tmp_path: Path,
) -> None:
    """Release 0.1.0 wrote no format."""
    path, state = tmp_path / "explorer.db", ExplorerState(opened=3)
    asyncio.run(StateFile(path).save(state))
    newer = NEWEST_FORMAT + 1
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


# -- the pure decisions of the rollout side: order, tickets, closed tickets, intake


def test_order_of_batch_ids() -> None:
    assert sorted([3, "3/b", 2, "4/a", "x", "10/z", 10], key=sort_batch_id) == [2, 3, "3/b", "4/a", 10, "10/z", "x"]


def ticket(tasks: int = 2, repeat: int = 4, size: int | None = None) -> Ticket:
    bodies = [TaskBody(workflow="w", repeat_times=repeat) for _ in range(tasks)]
    return new_ticket(1, bodies, deliver="pipeline", lane="train", time_left=10.0, max_repeat_times=size)


def result(
    of: Ticket, task: int, base: int = 0, attempt: str = "a", outcome: str = "finished", runs: list[int] | None = None
) -> TaskResult:
    done = [base, base + 1] if runs is None else runs
    return TaskResult.model_validate(
        {
            "batch": 1,
            "ticket": of.ticket,
            "task_id": task,
            "run_base": base,
            "repeat_times": 2,
            "attempt": attempt,
            "outcome": outcome,
            "runs": done,
            "parts": 1 if done else 0,
        }
    )


def test_the_first_outcome_of_a_slice_decides_and_others_are_counted() -> None:
    one = ticket(1, 4, 2)
    assert one.record(result(one, 0, 2, "a"))
    assert not one.record(result(one, 0, 2, "b"))
    assert not one.record(result(one, 0, 2, "a")), "the same attempt said twice is no duplicate"
    assert one.duplicates == 1
    assert not one.is_complete
    assert not one.record(result(one, 9, 0)), "no slice of ours"
    assert one.record(result(one, 0, 0, "c", "failed", []))
    assert one.is_complete
    manifest = one.make_manifest()
    assert [accepted.attempt for accepted in manifest.accepted] == ["a"]
    assert manifest.outcomes == {"finished": 1, "failed": 1}


class Endless:
    def __init__(self, size: int) -> None:
        self.size, self.given = size, 0

    def __len__(self) -> int:
        return self.size

    def next_batch(self, size: int) -> list[TaskBody]:
        self.given += size
        return [TaskBody(raw_task={"n": self.given - size + i}) for i in range(size)]

    def state(self) -> dict[str, object]:
        return {"epoch": self.given // self.size, "cursor": self.given % self.size}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state["epoch"] * self.size + state["cursor"]


def settings_with(**buffer: object) -> Config:
    return load_config({"model": {"tiny": {}}, "buffer": {"batch_size": 4, **buffer}})


def test_under_epochs_what_comes_from_elsewhere_displaces_no_task() -> None:
    state, taskset = ExplorerState(), Endless(10)
    intake = TaskSource(settings_with(total_epochs=1), state, taskset)
    state.pending += [PendingTask(task=TaskBody(raw_task={"again": n}), given_back=True) for n in range(6)]
    taken = []
    while not intake.is_over:
        taken.append([one.task.raw_task for one in intake.take()])
        state.opened += 1
    assert [len(batch) for batch in taken] == [8, 6, 2]
    assert sorted(one["n"] for batch in taken for one in batch if "n" in one) == list(range(10))


def refilling(maximum: float, **buffer: object) -> Config:
    """Batches of four tasks, of which one at a time may be under way."""
    return settings_with(**buffer).model_copy(update={"explorer": ExplorerConfig(refill=RefillConfig(max=maximum))})


def test_as_much_is_owed_as_the_batches_under_way_can_take() -> None:
    settings = refilling(0.5, total_steps=9)
    state = ExplorerState()
    ahead = settings.synchronizer.model_copy(update={"sync_interval": 2, "sync_offset": 1})
    intake = TaskSource(settings.model_copy(update={"synchronizer": ahead}), state, Endless(100))
    intake.replace_filtered(100)
    assert state.refill_debt == 3 * 2
    assert [len(intake.take()) for _ in range(4)] == [6, 6, 6, 4]
    intake.replace_filtered(100)
    one_open = settings.explorer.model_copy(update={"max_open_batches": 1})
    intake = TaskSource(settings.model_copy(update={"synchronizer": ahead, "explorer": one_open}), state, None)
    intake.replace_filtered(1)
    assert state.refill_debt == 2, "a restart under a lower bound"


def test_submitted_tasks_alone_pay_once_there_are_enough() -> None:
    state = ExplorerState()
    intake = TaskSource(refilling(1.0), state, None)
    intake.replace_filtered(3)
    state.pending += [PendingTask(task=TaskBody()) for _ in range(2)]
    assert (len(intake.take()), state.refill_debt) == (2, 3)
    state.pending += [PendingTask(task=TaskBody()) for _ in range(6)]
    assert (len(intake.take()), state.refill_debt) == (6, 1)


@given(
    maximum=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
    epochs=st.booleans(),
    reports=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=30),
)
def test_no_debt_is_paid_twice_and_none_beyond_the_bounds(
    maximum: float, epochs: bool, reports: list[tuple[int, int]]
) -> None:
    state, settings = ExplorerState(), refilling(maximum, **({} if epochs else {"total_steps": 100}))
    intake = TaskSource(settings, state, Endless(400))
    filtered = paid = 0
    for groups, given_back in reports:
        state.pending += [PendingTask(task=TaskBody(), given_back=True) for _ in range(given_back)]
        intake.replace_filtered(groups)
        filtered += groups
        before, on_top = state.refill_debt, min(len(state.pending), 4 + state.refill_debt) if epochs else 0
        assert 0 <= before <= settings.max_refill
        size = len(intake.take()) - on_top
        assert size == 4 + before, "one batch under way: all that is owed is paid by the next"
        assert state.refill_debt == 0
        paid += before
    assert paid <= filtered
    if maximum == 0.0:
        assert paid == 0


def test_a_submission_is_completed_from_the_taskset() -> None:
    state = ExplorerState()
    intake = TaskSource(settings_with(), state, None)
    assert not intake.has_tasks
    one = TaskSubmission(task=TaskBody(raw_task={"question": "1"}))
    task = intake.completed(one.task)
    room = intake.room
    intake.submit(task, SubmissionRef(submission_id="s"))
    assert [pending.task for pending in state.pending] == [task]
    assert (state.accepted, intake.room) == (["s"], room - 1)
    assert task.workflow == settings_with().buffer.taskset.workflow
    assert task.repeat_times == settings_with().algorithm.repeat_times


POOLS = {
    "selector_type": "difficulty_pools",
    "pools": [{"threshold": 0.0, "weight": 1.0}, {"threshold": 0.5, "weight": 4.0}],
}


def a_taskset(folder: Path) -> Taskset:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": ""}) + "\n" for i in range(20)))
    config = TasksetConfig.model_validate({"path": str(path), "data_selector": POOLS, "workflow": "none", "limit": 20})
    return open_taskset(config, repeat_times=2, seed=3)


def a_complete_ticket(outcomes: list[tuple[str, list[float]]], **more: Any) -> Ticket:
    """Return a complete ticket whose tasks, from index 0, have these outcomes and rewards."""
    tasks = [TaskBody(repeat_times=2, index={"taskset": "ab"[n % 2], "index": n}) for n in range(len(outcomes))]
    ticket = new_ticket(1, tasks, deliver="pipeline", lane="train", time_left=60.0, **more)
    for task_slice, (outcome, rewards) in zip(ticket.slices, outcomes, strict=True):
        task_slice.result = TaskResult(
            batch=1,
            ticket=ticket.ticket,
            task_id=task_slice.task_id,
            attempt="a" * 32,
            outcome=outcome,  # type: ignore[arg-type]
            runs=list(range(len(rewards))),
            metrics=[{"reward": reward} for reward in rewards],
        )
    return ticket


def test_what_a_ticket_says_of_its_tasks() -> None:
    ticket = a_complete_ticket(
        [
            ("finished", [1.0, 0.0]),
            ("finished", [0.25, math.nan]),  # no finite reward: the run says nothing
            ("failed", []),
            ("finished", [1.0, 1.0]),  # submitted
            ("cancelled", [1.0]),  # the rest of it was cut off
        ],
        submissions=[SubmissionRef(submission_id="s", task_id=3)],
        whole_tasks_only=True,
    )
    assert task_stats(ticket) == {"a": [TaskStats(0, 0.5, 2)], "b": [TaskStats(1, 0.25, 1)]}
    assert taskset_metrics(ticket) == {
        "rollout/taskset/a/tasks": 3.0,
        "rollout/taskset/b/tasks": 2.0,
        "rollout/taskset/a/reward": 0.5,
        "rollout/taskset/b/reward": 1.0,
    }


def test_a_ticket_observed_twice_counts_once(tmp_path: Path) -> None:
    config = load_config({"name": "told", "model": {"tiny": {}}, "buffer": {"total_steps": 4}})
    state, ticket = ExplorerState(), a_complete_ticket([("finished", [1.0, 0.0])])
    ticket.tasks[0].index["taskset"] = "train"
    source = TaskSource(config, state, a_taskset(tmp_path))
    metrics = source.observe(ticket)
    assert metrics == source.observe(ticket)
    assert metrics["selector/train/pool/0.5"] == 1
    assert [one.stats for one in state.observations] == [{"train": [TaskStats(0, 0.5, 2)]}]
    again = TaskSource(config, loaded := state.model_copy(), a_taskset(tmp_path))
    assert again.observe(ticket) == metrics
    assert loaded.observations == []  # they are in the file
    fixed = open_taskset(TasksetConfig(path=str(tmp_path / "tasks.jsonl")))
    assert TaskSource(config, ExplorerState(), fixed).observe(ticket) == {}


def run_killed(folder: Path, *moments: float) -> tuple[Simulation, list[Taskset]]:
    """Run a simulation whose taskset has a selector that learns, and whose explorer is killed after so many seconds,
    each time anew. Return it with the taskset of each life.
    """
    folder.mkdir()
    tasksets: list[Taskset] = []
    sim = Simulation(folder, batches=8, taskset=lambda: tasksets.append(a_taskset(folder)) or tasksets[-1])

    async def explorers() -> None:
        for moment in moments:
            task = asyncio.create_task(sim.make_explorer().run())
            await asyncio.wait([task], timeout=moment)
            if not await killed(task):
                return
        await sim.make_explorer().run()

    run_virtually(sim.run(explorer=explorers), limit=1000)
    return sim, tasksets


@pytest.mark.parametrize("moments", [(), (2.0,), (3.13, 2.07), (1.5, 4.0, 3.3)])
def test_each_ticket_is_observed_once_and_a_restored_selector_knows_all_of_it(
    tmp_path: Path, moments: tuple[float, ...]
) -> None:
    sim, tasksets = run_killed(tmp_path / "run", *moments)
    told = sim.state().observations
    assert len({one.ticket for one in told}) == len(told) == 8
    results: dict[str, set[int]] = {}
    for result in sim.published(TaskResult):
        if result.outcome == "finished":
            results.setdefault(result.ticket, set()).add(result.task_id)
    for one in told:  # the fake runner's rewards are 1
        assert {stats.reward for stats in one.stats["train"]} == {1.0}
        assert len(one.stats["train"]) == len(results[one.ticket]) == 2
    again = a_taskset(sim.folder)
    for one in told:
        again.observe(one.stats)
    saved = sim.state().taskset
    assert saved is not None
    again.restore(saved)
    assert again.metrics() == tasksets[-1].metrics()
    assert again.next_batch(30) == tasksets[-1].next_batch(30)
    counts = sim.values("selector/train/observed_tasks")
    assert sorted({step for step, _ in counts}) == list(range(1, 9))
    assert 2 <= counts[-1][1] <= 16
