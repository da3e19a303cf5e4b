"""Submitted tasks are taken in as they are needed, saved in groups, and each is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.explorer.test_state import commits
from trinity_agents.explorer import loop
from trinity_agents.explorer.task_source import LEAST_PENDING
from trinity_agents.simulation import Simulation, until
from trinity_mq.bus import Envelope, Queue
from trinity_mq.messages import SubmissionOutcome, TaskBody, TaskSlice, TaskSubmission
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually

MANY = 400
REPLIES = Queue(name="tmq.sim.replies.submit.test")


async def submit_many(sim: Simulation, count: int, **task: Any) -> None:
    client = await sim.client()
    await client.declare(*sim.topology.durable, REPLIES)
    for number in range(count):
        await sim.submit(number, reply_to=REPLIES.name, **task)


def answers(sim: Simulation) -> dict[str, list[str]]:
    """The outcomes sent, by submission."""
    told: dict[str, list[str]] = {}
    for one in asyncio.run(sim.replies()):
        assert isinstance(one, SubmissionOutcome)
        told.setdefault(one.submission_id, []).append(one.outcome)
    return told


def test_the_explorer_takes_in_what_it_needs_and_leaves_the_rest_in_the_broker(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=3, taskset=None, runner_seconds=lambda task_slice: 5.0)
    pending: list[int] = []
    waiting: list[int | None] = []

    async def scene() -> None:
        await submit_many(sim, MANY)
        await until(lambda: bool(sim.published(TaskSlice)))
        waiting.append(await (await sim.client()).depth(sim.topology.submitted.name))
        while not sim.state().finished:
            pending.append(len(sim.state().pending))
            await asyncio.sleep(0.5)

    run_virtually(sim.run(beside=scene), limit=3000)
    assert max(pending) <= LEAST_PENDING
    assert waiting[0] is not None
    assert waiting[0] > MANY - 2 * LEAST_PENDING
    assert commits(tmp_path / "state" / "explorer.db") < MANY / 4, "submissions are saved in groups"
    told = answers(sim)
    assert len(told) == MANY
    assert [told[f"s{n}"] for n in range(6)] == [["finished"]] * 6, "in the order in which they came"
    assert all(told[f"s{n}"] == ["cancelled"] for n in range(6, MANY)), "the rest is answered, once each"


def test_submitted_evaluations_are_taken_in_as_earlier_ones_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "OPEN_EVALUATIONS", 20)
    sim = Simulation(tmp_path, batches=1)
    most = 0

    async def scene() -> None:
        nonlocal most
        await submit_many(sim, 60, is_eval=True)
        await until(lambda: sim.explorer.exploration is not None)
        open_now = sim.explorer.exploration.batches  # type: ignore[union-attr]
        while not sim.explorer.exploration.state.finished:  # type: ignore[union-attr]
            most = max(most, open_now.open_submitted)
            await asyncio.sleep(0.05)

    run_virtually(sim.run(beside=scene), limit=3000)
    assert most == 20
    assert answers(sim) == {f"s{n}": ["finished"] for n in range(60)}


def test_a_group_with_repeats_and_unusable_bodies_loses_nothing_else(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2, taskset=None)

    async def scene() -> None:
        await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
        client = await sim.client()
        await client.declare(REPLIES)
        for number in (1, 1, 2):
            await sim.submit(number, reply_to=REPLIES.name)
        await sim.submit(2, reply_to=REPLIES.name)
        exchange = sim.topology.exchange("tasks")
        await client.publish(exchange, "submit", Envelope(body=b"\xc1", kind="task_submission"))
        for _ in range(2):
            await client.publish(exchange, "submit", envelope(TaskSubmission(task=TaskBody()), message_id=""))
        await until(lambda: sim.explorer.exploration.state.opened == 1)  # type: ignore[union-attr]
        await sim.submit(1, reply_to=REPLIES.name)
        await sim.submit(3, reply_to=REPLIES.name)

    run_virtually(sim.run(beside=scene), limit=1000)
    assert answers(sim) == {"s1": ["finished"], "s2": ["finished"], "s3": ["finished"]}
    reasons = sorted(str(headers["dead-reason"])[:24] for headers in sim.dead_letters())
    assert reasons == ["a submission needs a sub", "a submission needs a sub", "does not decode: body of"]


def test_a_submitter_cannot_take_the_id_of_a_gateways_submission(tmp_path: Path) -> None:
    """An agent knows its session's id, from which that of the submission follows: the gateway's would be a repeat."""
    sim = Simulation(tmp_path, batches=1, taskset=None)

    async def scene() -> None:
        await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
        client = await sim.client()
        await client.declare(REPLIES)
        body = TaskSubmission(task=TaskBody(), submission_id="sessions-0123")
        taken = envelope(body, message_id="m", reply_to=REPLIES.name)
        await client.publish(sim.topology.exchange("tasks"), "submit", taken)
        await until(lambda: bool(sim.dead_letters()))
        await sim.submit(1, reply_to=REPLIES.name)

    run_virtually(sim.run(beside=scene), limit=1000)
    assert answers(sim) == {"m": ["failed"], "s1": ["finished"]}
    assert ["sessions-" in str(headers["dead-reason"]) for headers in sim.dead_letters()] == [True]
