"""The pure decisions of the rollout side: order, pacing, tickets, closed tickets, intake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trinity_agents.explorer.state import ExplorerState, PendingTask
from trinity_agents.explorer.task_source import TaskSource
from trinity_mq.config import Config, load_config
from trinity_mq.config.agents import ExplorerConfig, RefillConfig
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket, sort_batch_id
from trinity_mq.messages import TaskBody, TaskResult, TaskSubmission


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


def config(**buffer: object) -> Config:
    return load_config({"model": {"tiny": {}}, "buffer": {"batch_size": 4, **buffer}})


def test_epochs_give_every_task_the_last_batch_being_what_is_left() -> None:
    state, taskset = ExplorerState(), Endless(10)
    intake = TaskSource(config(total_epochs=1), state, taskset)
    assert intake.total_batches == 3
    sizes = []
    while not intake.is_over:
        sizes.append(len(intake.take()))
        state.opened += 1
    assert sizes == [4, 4, 2]


def test_pending_tasks_come_first() -> None:
    state, taskset = ExplorerState(), Endless(100)
    intake = TaskSource(config(total_steps=5), state, taskset)
    state.pending.append(PendingTask(task=TaskBody(raw_task={"mine": 1}), given_back=True))
    batch = intake.take()
    assert batch[0].task.raw_task == {"mine": 1}
    assert len(batch) == 4
    assert taskset.given == 3
    assert not state.pending


def test_under_epochs_what_comes_from_elsewhere_displaces_no_task() -> None:
    state, taskset = ExplorerState(), Endless(10)
    intake = TaskSource(config(total_epochs=1), state, taskset)
    state.pending += [PendingTask(task=TaskBody(raw_task={"again": n}), given_back=True) for n in range(6)]
    taken = []
    while not intake.is_over:
        taken.append([one.task.raw_task for one in intake.take()])
        state.opened += 1
    assert [len(batch) for batch in taken] == [8, 6, 2]
    assert sorted(one["n"] for batch in taken for one in batch if "n" in one) == list(range(10))


def refilling(maximum: float, **buffer: object) -> Config:
    """Batches of four tasks, of which one at a time may be under way."""
    return config(**buffer).model_copy(update={"explorer": ExplorerConfig(refill=RefillConfig(max=maximum))})


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
    intake = TaskSource(config(), state, None)
    assert not intake.has_tasks
    one = TaskSubmission(task=TaskBody(raw_task={"question": "1"}))
    task = intake.completed(one.task)
    room = intake.room
    intake.submit(task, SubmissionRef(submission_id="s"))
    assert [pending.task for pending in state.pending] == [task]
    assert (state.accepted, intake.room) == (["s"], room - 1)
    assert task.workflow == config().buffer.taskset.workflow
    assert task.repeat_times == config().algorithm.repeat_times
