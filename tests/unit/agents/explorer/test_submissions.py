"""Submitted tasks: taken in as needed, saved in groups, each answered; what a submitter may not hand in is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.unit.agents.explorer.test_explorer import REPLIES
from tests.unit.agents.explorer.test_state import commits
from tests.unit.agents.world import beside
from trinity_agents.explorer import loop, training_batches
from trinity_agents.explorer.state import ExplorerState, InFlightBatch, PendingTask, SubmittedTask
from trinity_agents.explorer.task_source import LEAST_PENDING
from trinity_agents.simulation import NumberedTasks, Simulation, until
from trinity_mq.bus import Envelope
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.bus.topology import BY_GATEWAY, Topology
from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import JSON_CONTENT_TYPE as JSON
from trinity_mq.messages import BatchClosed, Progress, SubmissionOutcome, TaskBody, TaskSlice, TaskSubmission
from trinity_mq.messages.msgpack_scan import MAX_CONTAINERS
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop

MANY = 400


async def submit_many(sim: Simulation, count: int, **task: Any) -> None:
    client = await sim.client()
    await client.declare(*sim.topology.durable, REPLIES)
    for number in range(count):
        await sim.submit(number, reply_to=REPLIES.name, **task)


async def idle(sim: Simulation) -> MemoryBus:
    """Wait for an explorer that waits for submissions; return a client with a queue for replies."""
    await until(lambda: bool(sim.explorers) and sim.explorer.state == "idle")
    client = await sim.client()
    await client.declare(REPLIES)
    return client


async def told(sim: Simulation) -> dict[str, SubmissionOutcome]:
    """The outcome sent for each submission, each once."""
    outcomes = [message for message in await sim.replies() if isinstance(message, SubmissionOutcome)]
    assert len({outcome.submission_id for outcome in outcomes}) == len(outcomes)
    return {outcome.submission_id: outcome for outcome in outcomes}


async def answers(sim: Simulation) -> dict[str, str]:
    return {name: outcome.outcome for name, outcome in (await told(sim)).items()}


def trained(sim: Simulation) -> list[TaskBody]:
    return [task_slice.task for task_slice in sim.published(TaskSlice) if task_slice.lane == "train"]


async def test_the_explorer_takes_in_what_it_needs_and_leaves_the_rest_in_the_broker(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=3, taskset=None, runner_seconds=lambda task_slice: 5.0)
    pending: list[int] = []
    async with beside(sim.run()):
        await submit_many(sim, MANY)
        await until(lambda: bool(sim.published(TaskSlice)))
        depth = await (await sim.client()).depth(sim.topology.submitted.name)
        while not sim.state().finished:
            pending.append(len(sim.state().pending))
            await asyncio.sleep(0.5)
    assert max(pending) <= LEAST_PENDING
    assert depth is not None
    assert depth > MANY - 2 * LEAST_PENDING
    assert commits(tmp_path / "state" / "explorer.db") < MANY / 4, "submissions are saved in groups"
    outcomes = await answers(sim)
    assert [outcomes.pop(f"s{n}") for n in range(6)] == ["finished"] * 6, "in the order in which they came"
    assert outcomes == {f"s{n}": "cancelled" for n in range(6, MANY)}, "the rest is answered, once each"


async def test_submitted_evaluations_are_taken_in_as_earlier_ones_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "OPEN_EVALUATIONS", 20)
    sim = Simulation(tmp_path, batches=1)
    most = 0
    async with beside(sim.run()):
        await submit_many(sim, 60, is_eval=True)
        await until(lambda: sim.explorer.exploration is not None)
        open_now = sim.explorer.exploration.batches  # type: ignore[union-attr]
        while not sim.explorer.exploration.state.finished:  # type: ignore[union-attr]
            most = max(most, open_now.open_submitted)
            await asyncio.sleep(0.05)
    assert most == 20
    assert await answers(sim) == {f"s{n}": "finished" for n in range(60)}


async def test_a_group_with_repeats_and_unusable_bodies_loses_nothing_else(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2, taskset=None)
    async with beside(sim.run()):
        client = await idle(sim)
        for number in (1, 1, 2, 2):
            await sim.submit(number, reply_to=REPLIES.name)
        exchange = sim.topology.exchange("tasks")
        await client.publish(exchange, "submit", Envelope(body=b"\xc1", kind="task_submission"))
        for _ in range(2):
            await client.publish(exchange, "submit", envelope(TaskSubmission(task=TaskBody()), message_id=""))
        await until(lambda: sim.explorer.exploration.state.opened == 1)  # type: ignore[union-attr]
        await sim.submit(1, reply_to=REPLIES.name)
        await sim.submit(3, reply_to=REPLIES.name)
    assert await answers(sim) == {"s1": "finished", "s2": "finished", "s3": "finished"}
    reasons = sorted(str(headers["dead-reason"])[:24] for headers in sim.dead_letters())
    assert reasons == ["a submission needs a sub", "a submission needs a sub", "does not decode: body of"]


async def test_a_submitter_cannot_take_the_id_of_a_gateways_submission(tmp_path: Path) -> None:
    """An agent knows its session's id, from which that of the submission follows: the gateway's would be a repeat."""
    sim = Simulation(tmp_path, batches=1, taskset=None)
    async with beside(sim.run()):
        client = await idle(sim)
        body = TaskSubmission(task=TaskBody(), submission_id="sessions-0123")
        taken = envelope(body, message_id="m", reply_to=REPLIES.name)
        await client.publish(sim.topology.exchange("tasks"), "submit", taken)
        await until(lambda: bool(sim.dead_letters()))
        await sim.submit(1, reply_to=REPLIES.name)
    assert await answers(sim) == {"m": "failed", "s1": "finished"}
    assert ["sessions-" in str(headers["dead-reason"]) for headers in sim.dead_letters()] == [True]


# -- what a submitter may not hand in: refused before anything is published for it


RECORDED = TaskBody(workflow="recorded_sessions", raw_task={"sessions": []})


def alone(folder: Path, batches: int = 1) -> Simulation:
    """A run whose batches are a submitted task each."""
    return Simulation(folder, ("buffer.batch_size=1",), batches=batches, taskset=None)


async def play(sim: Simulation, *submissions: tuple[str, TaskBody, str, str] | Envelope) -> None:
    """Hand in submissions, then one that is allowed, which ends the run."""

    async with beside(sim.run()):
        client = await idle(sim)
        await client.declare(sim.topology.sessions)
        for submission in submissions:
            key, mail = "submit", submission
            if not isinstance(mail, Envelope):
                name, task, key, reply_to = mail
                body = TaskSubmission(task=task, submission_id=name)
                mail = envelope(body, message_id=name, reply_to=reply_to)
            await client.publish(sim.topology.exchange("tasks"), key, mail)
        await sim.submit(99, reply_to=REPLIES.name)


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ({"workflow": "program_workflow", "workflow_args": {"command": ["true"]}}, "outsiders.workflows"),
        ({"workflow": "none", "reward_fn": "subprocess.Popen"}, "outsiders.rewards"),
        ({"workflow": "none", "workflow_args": {"command": ["true"]}}, "outsiders.workflows"),
    ],
)
async def test_code_that_is_not_open_is_answered_with_the_reason(
    tmp_path: Path, task: dict[str, Any], setting: str
) -> None:
    sim = alone(tmp_path)
    await play(sim, ("evil", TaskBody.model_validate(task), "submit", REPLIES.name))
    outcomes = await told(sim)
    assert (outcomes["evil"].outcome, outcomes["s99"].outcome) == ("failed", "finished")
    assert setting in str(outcomes["evil"].message)
    assert [str(headers["dead-reason"]) for headers in sim.dead_letters()] == [outcomes["evil"].message]
    assert [task.workflow for task in trained(sim)] == ["none"]
    assert sim.values("rollout/submissions/refused") == [(1, 1.0)]


async def test_recorded_sessions_are_taken_from_the_gateway_alone(tmp_path: Path) -> None:
    """A submitter can publish any body, and any header, and with the routing key ``submit`` alone."""
    sim = alone(tmp_path, batches=2)
    sessions = sim.topology.sessions.name
    await play(
        sim,
        ("forged", RECORDED, "submit", REPLIES.name),
        ("posing", RECORDED, "submit", sessions),
        ("own", RECORDED, BY_GATEWAY, sessions),
    )
    assert await answers(sim) == {"forged": "failed", "s99": "finished"}
    assert sorted(task.workflow for task in trained(sim)) == ["none", "recorded_sessions"]
    stream = sim.broker.queues[sessions].messages
    assert [one.message_id for one in stream] == ["outcome-own"]


CONTAINERS = MAX_CONTAINERS - 6
"""Lists in a task that a submission can hold; the complete task has maps that the submission left out."""


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b'{"task": {"raw_task": {"x": [%d]}}}' % 10**30, JSON, "task.raw_task.x.0: an integer of 100 bits"),
        (b'{"task": {"raw_task": {"x": "\\ud800"}}}', JSON, "task.raw_task.x: half a surrogate pair"),
        (b'{"task": {"raw_task": {"x": 1e999}}}', JSON, "1e999 is beyond the range of 64-bit floats"),
        (b'{"task": {"repeat_times": "%d"}}' % 10**30, JSON, "task.repeat_times: "),
        (b'{"task": {"raw_task": ' + b"[" * 100_000, JSON, "is not JSON"),
        (b'{"task": {}, "task": {}}', "application/msgpack", "is not msgpack"),
        (msgpack.packb({"task": {"raw_task": {"x": [[]] * CONTAINERS}}}), None, "more than 262144 lists and maps"),
    ],
    ids=["integer", "surrogate", "infinity", "digits", "deep", "type", "containers"],
)
async def test_content_that_cannot_travel_becomes_a_dead_letter(
    tmp_path: Path, body: bytes, content_type: str | None, reason: str
) -> None:
    sim = alone(tmp_path)
    message = Envelope(body=body, kind="task_submission", content_type=content_type or "", message_id="evil")
    await play(sim, message)
    (letter,) = sim.dead_letters()
    assert reason in str(letter["dead-reason"])
    assert await answers(sim) == {"s99": "finished"}


@pytest.mark.parametrize("queue", ["closed", "ready", "sessions", "tasks.train", "dead", "replies.reward.x"])
async def test_an_outcome_goes_to_no_other_queue_of_the_run(tmp_path: Path, queue: str) -> None:
    sim = alone(tmp_path)
    await play(sim, ("evil", TaskBody(workflow="none"), "submit", sim.topology.prefix + queue))
    (letter,) = sim.dead_letters()
    assert "tmq.<run>.replies.submit." in str(letter["dead-reason"])
    assert len(trained(sim)) == 1, "only the other one"
    assert await answers(sim) == {"s99": "finished"}
    assert not sim.broker.queues[sim.topology.sessions.name].messages


REPLY_QUEUES = ["tmq.r.replies.submit.1", "tmq.r.replies.go.1", "amq.gen-x", "amq_0a"]
REPLY_QUEUES += ["amq.rabbitmq.reply-to.g1.x", "app.replies.7"]
OTHER_QUEUES = ["tmq.r.replies.reward.1", "tmq.r.replies", "tmq.other.replies.submit.1", "tmq.other.closed", "my.queue"]


@pytest.mark.parametrize("name", [*REPLY_QUEUES, *OTHER_QUEUES, ""])
def test_reply_queues(name: str) -> None:
    topology = Topology("r", reply_queues=("app.replies.", "tmq."))
    assert topology.is_reply_queue(name) is (name in REPLY_QUEUES)


def test_tasks_of_gateways_in_a_state_of_an_older_release_are_answered_on_the_stream() -> None:
    refs = [SubmissionRef(submission_id=str(n), reply_to="tmq.sim.sessions" if n % 2 else "q") for n in range(4)]
    outcome = SubmissionOutcome(submission_id="1", batch=1, ticket="t", outcome="finished")
    promises = [SubmittedTask(submission=one, outcome=outcome) for one in refs[:2]]
    state = ExplorerState(pending=[PendingTask(task=TaskBody(), submission=one) for one in refs[2:]])
    state.following.tickets["t"] = InFlightBatch(manifest=BatchClosed(batch=1, ticket="t"), promises=promises)
    state.mark_gateways("tmq.sim.sessions")
    assert [one.by_gateway for one in refs] == [False, True, False, True]


# -- what does not fit into a message is an outcome with its reason, and the run goes on


LIMIT = 65536
SMALL_MESSAGES = (f"broker.max_message_bytes={LIMIT}", "explorer.max_consecutive_empty=100")


class OneWithAnImage(NumberedTasks):
    """Tasks of which the second is larger than a message."""

    def next_batch(self, size: int) -> list[TaskBody]:
        return [
            task.model_copy(update={"raw_task": {"n": 1, "image": b"x" * LIMIT}}) if task.raw_task["n"] == 1 else task
            for task in super().next_batch(size)
        ]


async def test_a_task_larger_than_a_message_fails_with_the_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = (*SMALL_MESSAGES, "explorer.max_repeat_times_per_runner=1")
    sim = Simulation(tmp_path, settings, batches=3, taskset=OneWithAnImage)
    reasons: list[str | None] = []
    async with beside(sim.run()):
        await until(lambda: bool(sim.explorers) and sim.explorer.exploration is not None)
        dispatcher = sim.explorer.exploration.dispatcher  # type: ignore[union-attr]
        await until(lambda: any(ticket.batch == 1 for ticket in dispatcher.tickets.values()))
        (ticket,) = [ticket for ticket in dispatcher.tickets.values() if ticket.batch == 1]
        await until(lambda: bool(ticket.results_of(1)))
        reasons.extend(one.message for one in ticket.results_of(1))
    assert sim.learners[0].steps == [1, 2, 3]
    first = sim.published(BatchClosed)[0]
    assert first.outcomes == {"finished": 2, "failed": 2}
    assert len(reasons) == 2
    assert all("over broker.max_message_bytes (65536)" in str(reason) for reason in reasons)
    (shown,) = sim.explorer.exploration.dispatcher.failures.listed()  # type: ignore[union-attr]
    assert shown.failed >= 2
    assert "over broker.max_message_bytes" in shown.text


async def test_a_submission_larger_than_a_slice_is_refused_with_the_reason(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, (*SMALL_MESSAGES, "outsiders.format_args=[text]"), batches=2, taskset=None)
    make_bus = sim.bus

    def with_a_higher_limit() -> Any:
        bus = make_bus()
        bus.max_message_bytes = 1 << 20
        return bus

    async with beside(sim.run()):
        await idle(sim)
        sim.bus = with_a_higher_limit  # type: ignore[method-assign]  # a client with other settings
        await sim.submit(1, reply_to=REPLIES.name, format_args={"text": "x" * LIMIT})
        await sim.submit(2, reply_to=REPLIES.name, format_args={"text": "x" * (LIMIT - 4096)})
        await sim.submit(3)
        await until(lambda: sim.explorer.exploration.state.opened == 1)  # type: ignore[union-attr]
        await sim.submit(4)
    outcomes = await told(sim)
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {"s1": "failed", "s2": "failed"}
    assert all("broker.max_message_bytes leaves 57344" in str(outcome.message) for outcome in outcomes.values())
    reasons = [headers.get("dead-reason") for headers in sim.dead_letters()]
    assert any("broker.max_message_bytes leaves 57344" in str(reason) for reason in reasons)
    assert [task.raw_task for task in trained(sim)] == [{"s": 3}, {"s": 4}]
    assert sim.learners[0].steps == [1, 2]


async def test_tasks_whose_slices_no_manifest_has_room_for_fail_before_they_run(tmp_path: Path) -> None:
    overrides = (*SMALL_MESSAGES, "explorer.max_repeat_times_per_runner=1", "buffer.batch_size=3")
    sim = Simulation(tmp_path, overrides, batches=1, taskset=None)
    async with beside(sim.run()):
        await (await sim.client()).declare(REPLIES)
        for number, runs in enumerate((2, 2000, 3)):
            await sim.submit(number, reply_to=REPLIES.name, repeat_times=runs)
    outcomes = await told(sim)
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {
        "s0": "finished",
        "s1": "failed",
        "s2": "finished",
    }
    assert "max_repeat_times_per_runner" in str(outcomes["s1"].message)
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
