"""What does not fit into a message is an outcome with its reason, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.explorer import training_batches
from trinity_agents.simulation import NumberedTasks, Simulation, until
from trinity_mq.bus import Queue
from trinity_mq.messages import BatchClosed, Progress, SubmissionOutcome, TaskBody, TaskSlice
from trinity_mq.testing.virtual_time import run_virtually

LIMIT = 65536
SMALL_MESSAGES = (f"broker.max_message_bytes={LIMIT}", "explorer.max_consecutive_empty=100")
REPLIES = Queue(name="tmq.sim.replies.submit.test")


class OneWithAnImage(NumberedTasks):
    """Tasks of which the second is larger than a message."""

    def next_batch(self, size: int) -> list[TaskBody]:
        return [
            task.model_copy(update={"raw_task": {"n": 1, "image": b"x" * LIMIT}}) if task.raw_task["n"] == 1 else task
            for task in super().next_batch(size)
        ]


def test_a_task_larger_than_a_message_fails_with_the_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = (*SMALL_MESSAGES, "explorer.max_repeat_times_per_runner=1")
    sim = Simulation(tmp_path, settings, batches=3, taskset=OneWithAnImage)
    reasons: list[str | None] = []

    async def watch() -> None:
        await until(lambda: bool(sim.explorers) and sim.explorer.exploration is not None)
        dispatcher = sim.explorer.exploration.dispatcher  # type: ignore[union-attr]
        await until(lambda: any(ticket.batch == 1 for ticket in dispatcher.tickets.values()))
        (ticket,) = [ticket for ticket in dispatcher.tickets.values() if ticket.batch == 1]
        await until(lambda: bool(ticket.results_of(1)))
        reasons.extend(one.message for one in ticket.results_of(1))

    run_virtually(sim.run(beside=watch), limit=1000)
    assert sim.learners[0].steps == [1, 2, 3]
    first = sim.published(BatchClosed)[0]
    assert first.outcomes == {"finished": 2, "failed": 2}
    assert len(reasons) == 2
    assert all("over broker.max_message_bytes (65536)" in str(reason) for reason in reasons)
    (shown,) = sim.explorer.exploration.dispatcher.failures.listed()  # type: ignore[union-attr]
    assert shown.failed >= 2
    assert "over broker.max_message_bytes" in shown.text


def test_a_submission_larger_than_a_slice_is_refused_with_the_reason(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, (*SMALL_MESSAGES, "outsiders.format_args=[text]"), batches=2, taskset=None)
    make_bus = sim.bus

    def with_a_higher_limit() -> Any:
        bus = make_bus()
        bus.max_message_bytes = 1 << 20
        return bus

    async def scene() -> None:
        await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
        client = await sim.client()
        await client.declare(REPLIES)
        sim.bus = with_a_higher_limit  # type: ignore[method-assign]  # a client with other settings
        await sim.submit(1, reply_to=REPLIES.name, format_args={"text": "x" * LIMIT})
        await sim.submit(2, reply_to=REPLIES.name, format_args={"text": "x" * (LIMIT - 4096)})
        await sim.submit(3)
        await until(lambda: sim.explorer.exploration.state.opened == 1)  # type: ignore[union-attr]
        await sim.submit(4)

    run_virtually(sim.run(beside=scene), limit=1000)
    told = [one for one in asyncio.run(sim.replies()) if isinstance(one, SubmissionOutcome)]
    assert [(one.submission_id, one.outcome) for one in told] == [("s1", "failed"), ("s2", "failed")]
    assert all("broker.max_message_bytes leaves 57344" in str(one.message) for one in told)
    reasons = [headers.get("dead-reason") for headers in sim.dead_letters()]
    assert any("broker.max_message_bytes leaves 57344" in str(reason) for reason in reasons)
    assert [one.task.raw_task for one in sim.published(TaskSlice) if one.lane == "train"] == [{"s": 3}, {"s": 4}]
    assert sim.learners[0].steps == [1, 2]


def test_tasks_whose_slices_no_manifest_has_room_for_fail_before_they_run(tmp_path: Path) -> None:
    overrides = (*SMALL_MESSAGES, "explorer.max_repeat_times_per_runner=1", "buffer.batch_size=3")
    sim = Simulation(tmp_path, overrides, batches=1, taskset=None)

    async def scene() -> None:
        client = await sim.client()
        await client.declare(REPLIES)
        for number, runs in enumerate((2, 2000, 3)):
            await sim.submit(number, reply_to=REPLIES.name, repeat_times=runs)

    run_virtually(sim.run(beside=scene), limit=1000)
    told = {one.submission_id: one for one in asyncio.run(sim.replies()) if isinstance(one, SubmissionOutcome)}
    assert {name: one.outcome for name, one in told.items()} == {"s0": "finished", "s1": "failed", "s2": "finished"}
    assert "max_repeat_times_per_runner" in str(told["s1"].message)
    assert {one.task_id for one in sim.published(TaskSlice) if one.lane == "train"} == {0, 2}
    assert sim.learners[0].steps == [1]


def test_a_manifest_larger_than_a_message_fails_its_batch_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(tmp_path, SMALL_MESSAGES, batches=3)
    metrics = {f"rollout/{n:0100}": 1.0 for n in range(1000)}
    monkeypatch.setattr(training_batches, "rollout_metrics", lambda ticket, late: metrics if ticket.batch == 2 else {})
    run_virtually(sim.run(), limit=1000)
    assert [one.outcome for one in sim.published(Progress)] == ["trained", "failed", "trained"]
    assert "over broker.max_message_bytes" in str(sim.published(Progress)[1].reason)
