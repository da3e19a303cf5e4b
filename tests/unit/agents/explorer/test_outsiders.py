"""What a submitter may not hand in, through a whole run: refused before anything is published for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest

from trinity_agents.explorer.state import ExplorerState, InFlightBatch, PendingTask, SubmittedTask
from trinity_agents.simulation import Simulation, until
from trinity_mq.bus import Envelope, Queue
from trinity_mq.bus.topology import BY_GATEWAY, Topology
from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import JSON_CONTENT_TYPE, BatchClosed, SubmissionOutcome, TaskBody, TaskSlice, TaskSubmission
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually

REPLIES = Queue(name="tmq.sim.replies.submit.test")
RECORDED = TaskBody(workflow="recorded_sessions", raw_task={"sessions": []})


async def publish(sim: Simulation, name: str, task: TaskBody, key: str, reply_to: str) -> None:
    client = await sim.client()
    message = envelope(TaskSubmission(task=task, submission_id=name), message_id=name, reply_to=reply_to)
    await client.publish(sim.topology.exchange("tasks"), key, message)
    await client.close()


def play(sim: Simulation, *submissions: tuple[str, TaskBody, str, str] | Envelope) -> None:
    """Hand in submissions, then one that is allowed, which ends the run."""

    async def scene() -> None:
        await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
        client = await sim.client()
        await client.declare(REPLIES, sim.topology.sessions)
        for submission in submissions:
            if isinstance(submission, Envelope):
                await client.publish(sim.topology.exchange("tasks"), "submit", submission)
            else:
                await publish(sim, *submission)
        await sim.submit(99, reply_to=REPLIES.name)

    run_virtually(sim.run(beside=scene), limit=1000)


def told(sim: Simulation) -> dict[str, SubmissionOutcome]:
    answers = [one for one in asyncio.run(sim.replies()) if isinstance(one, SubmissionOutcome)]
    return {one.submission_id: one for one in answers}


def trained(sim: Simulation) -> list[str]:
    return [one.task.workflow for one in sim.published(TaskSlice) if one.lane == "train"]


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ({"workflow": "program_workflow", "workflow_args": {"command": ["true"]}}, "outsiders.workflows"),
        ({"workflow": "none", "reward_fn": "subprocess.Popen"}, "outsiders.rewards"),
        ({"workflow": "none", "workflow_args": {"command": ["true"]}}, "outsiders.workflows"),
    ],
)
def test_code_that_is_not_open_is_answered_with_the_reason(tmp_path: Path, task: dict[str, Any], setting: str) -> None:
    sim = Simulation(tmp_path, ("buffer.batch_size=1",), batches=1, taskset=None)
    play(sim, ("evil", TaskBody.model_validate(task), "submit", REPLIES.name))
    assert (told(sim)["evil"].outcome, told(sim)["s99"].outcome) == ("failed", "finished")
    assert setting in str(told(sim)["evil"].message)
    assert [str(headers["dead-reason"]) for headers in sim.dead_letters()] == [told(sim)["evil"].message]
    assert trained(sim) == ["none"]
    assert sim.values("rollout/submissions/refused") == [(1, 1.0)]


def test_recorded_sessions_are_taken_from_the_gateway_alone(tmp_path: Path) -> None:
    """A submitter can publish any body, and any header, and with the routing key ``submit`` alone."""
    sim = Simulation(tmp_path, ("buffer.batch_size=1",), batches=2, taskset=None)
    sessions = sim.topology.sessions.name
    play(
        sim,
        ("forged", RECORDED, "submit", REPLIES.name),
        ("posing", RECORDED, "submit", sessions),
        ("own", RECORDED, BY_GATEWAY, sessions),
    )
    assert {name: one.outcome for name, one in told(sim).items()} == {"forged": "failed", "s99": "finished"}
    assert sorted(trained(sim)) == ["none", "recorded_sessions"]
    stream = sim.broker.queues[sessions].messages
    assert [one.message_id for one in stream] == ["outcome-own"]


CONTAINERS = MAX_CONTAINERS - 6
"""Lists in a task that a submission can hold; the complete task has maps that the submission left out."""


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (
            b'{"task": {"raw_task": {"x": [%d]}}}' % 10**30,
            JSON_CONTENT_TYPE,
            "task.raw_task.x.0: an integer of 100 bits",
        ),
        (b'{"task": {"raw_task": {"x": "\\ud800"}}}', JSON_CONTENT_TYPE, "task.raw_task.x: half a surrogate pair"),
        (
            b'{"task": {"raw_task": {"x": 1e999}}}',
            JSON_CONTENT_TYPE,
            "1e999 is beyond the range of 64-bit floats",
        ),
        (b'{"task": {"repeat_times": "%d"}}' % 10**30, JSON_CONTENT_TYPE, "task.repeat_times: "),
        (b'{"task": {"raw_task": ' + b"[" * 100_000, JSON_CONTENT_TYPE, "is not JSON"),
        (b'{"task": {}, "task": {}}', "application/msgpack", "is not msgpack"),
        (msgpack.packb({"task": {"raw_task": {"x": [[]] * CONTAINERS}}}), None, "more than 262144 lists and maps"),
    ],
    ids=["integer", "surrogate", "infinity", "digits", "deep", "type", "containers"],
)
def test_content_that_cannot_travel_becomes_a_dead_letter(
    tmp_path: Path, body: bytes, content_type: str | None, reason: str
) -> None:
    sim = Simulation(tmp_path, ("buffer.batch_size=1",), batches=1, taskset=None)
    message = Envelope(body=body, kind="task_submission", content_type=content_type or "", message_id="evil")
    play(sim, message)
    (letter,) = sim.dead_letters()
    assert reason in str(letter["dead-reason"])
    assert {name: one.outcome for name, one in told(sim).items()} == {"s99": "finished"}


@pytest.mark.parametrize("queue", ["closed", "ready", "sessions", "tasks.train", "dead", "replies.reward.x"])
def test_an_outcome_goes_to_no_other_queue_of_the_run(tmp_path: Path, queue: str) -> None:
    sim = Simulation(tmp_path, ("buffer.batch_size=1",), batches=1, taskset=None)
    play(sim, ("evil", TaskBody(workflow="none"), "submit", sim.topology.prefix + queue))
    (letter,) = sim.dead_letters()
    assert "tmq.<run>.replies.submit." in str(letter["dead-reason"])
    assert trained(sim) == ["none"], "only the other one"
    assert set(told(sim)) == {"s99"}
    assert not sim.broker.queues[sim.topology.sessions.name].messages


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("tmq.r.replies.submit.1", True),
        ("tmq.r.replies.go.1", True),
        ("amq.gen-x", True),
        ("amq_0a", True),
        ("amq.rabbitmq.reply-to.g1.x", True),
        ("app.replies.7", True),
        ("tmq.r.replies.reward.1", False),
        ("tmq.r.replies", False),
        ("tmq.other.replies.submit.1", False),
        ("tmq.other.closed", False),
        ("my.queue", False),
        ("", False),
    ],
)
def test_reply_queues(name: str, is_one: bool) -> None:
    assert Topology("r", reply_queues=("app.replies.", "tmq.")).is_reply_queue(name) is is_one


def test_tasks_of_gateways_in_a_state_of_an_older_release_are_answered_on_the_stream() -> None:
    refs = [SubmissionRef(submission_id=str(n), reply_to="tmq.sim.sessions" if n % 2 else "q") for n in range(4)]
    outcome = SubmissionOutcome(submission_id="1", batch=1, ticket="t", outcome="finished")
    promises = [SubmittedTask(submission=one, outcome=outcome) for one in refs[:2]]
    state = ExplorerState(pending=[PendingTask(task=TaskBody(), submission=one) for one in refs[2:]])
    state.following.tickets["t"] = InFlightBatch(manifest=BatchClosed(batch=1, ticket="t"), promises=promises)
    state.mark_gateways("tmq.sim.sessions")
    assert [one.by_gateway for one in refs] == [False, True, False, True]
