"""How many slices of a ticket share a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import (
    BatchClosed,
    BatchReady,
    Heartbeat,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskSlice,
    TaskSlices,
    decode,
    decode_any,
)
from trinity_mq.messages.msgpack_scan import MAX_NESTING
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop


def runner(number: int, grouped: bool = True) -> Heartbeat:
    return Heartbeat(
        role="runner",
        id=f"runner-{number}",
        seq=1,
        incarnation="x",
        lease=10,
        state="idle",
        detail={"grouped_slices": True} if grouped else {},
    )


class Desk:
    """A dispatcher whose runners have said that slices took so many seconds."""

    def __init__(self, *runners: Heartbeat, seconds: float | None = 0.01, max_bytes: int = 1 << 20) -> None:
        config = load_config(
            {"name": "desk", "model": {"tiny": {}}, "explorer": {"max_repeat_times_per_runner": 2}},
            [f"broker.max_message_bytes={max_bytes}"],
        )
        self.topology, self.broker = Topology("desk"), MemoryBroker()
        self.bus = MemoryBus(self.broker, self.topology, config=config.broker)
        self.dispatcher = Dispatcher(
            config, bus=self.bus, topology=self.topology, owner="explorer-0", runners=lambda: runners
        )
        if seconds is not None:
            done = TaskResult(
                batch=0, ticket="t", task_id=0, attempt="a", outcome="finished", runs=[0], seconds=seconds
            )
            self.dispatcher.slice_times.slice_done(done)

    def sent(self, tasks: list[TaskBody], done: Sequence[int] = (), **how: Any) -> list[Any]:
        """Open a ticket; return the messages in the queue of its lane. Tasks that are ``done`` have failed before."""

        async def main() -> list[Any]:
            await self.bus.connect()
            await self.bus.declare(*self.topology.durable)
            ticket = self.dispatcher.make_ticket(tasks, 1, **{"deliver": "pipeline", **how})
            for task in done:
                result = TaskResult(batch=1, ticket=ticket.ticket, task_id=task, attempt="a", outcome="failed")
                ticket.record(result.model_copy(update={"repeat_times": 2}))
            await self.dispatcher.open(ticket)
            lane: Any = self.topology.tasks_eval if ticket.lane == "eval" else self.topology.tasks_train
            messages = list(self.broker.queues[lane.name].messages)  # type: ignore[attr-defined]
            await self.bus.close()
            return messages

        return run_virtually(main(), limit=60)


def tasks(count: int, runs: int = 2, size: int = 1) -> list[TaskBody]:
    return [TaskBody(workflow="none", repeat_times=runs, raw_task={"x": "y" * size}) for _ in range(count)]


def sizes(messages: list[Any]) -> list[int]:
    """Slices in each message."""
    found = [decode_any(each.body) for each in messages]
    return [len(each.slices) if isinstance(each, TaskSlices) else 1 for each in found]


def keys(messages: list[Any]) -> Counter[tuple[int, int]]:
    """How often each slice is in the messages."""
    found: Counter[tuple[int, int]] = Counter()
    for each in messages:
        body = decode_any(each.body)
        for one in body.slices if isinstance(body, TaskSlices) else [body]:
            assert isinstance(one, TaskSlice)
            found[one.task_id, one.run_base] += 1
    return found


@pytest.mark.parametrize(
    ("runners", "count", "seconds", "expected"),
    [
        (2, 32, 0.01, [8] * 4),
        (2, 31, 0.01, [8, 8, 8, 7]),
        (1, 100, 0.01, [16] * 6 + [4]),  # no more than 16
        (4, 3, 0.01, [1] * 3),  # each runner gets its share
        (2, 32, 0.5, [4] * 8),  # together no more than two seconds one after the other
        (2, 32, 1.5, [1] * 32),
        (2, 32, None, [1] * 32),  # nothing is known of how long they take
    ],
)
def test_short_slices_share_messages_and_every_runner_gets_some(
    runners: int, count: int, seconds: float | None, expected: list[int]
) -> None:
    messages = Desk(*(runner(number) for number in range(runners)), seconds=seconds).sent(tasks(count))
    assert sizes(messages) == expected
    assert keys(messages) == Counter((task, 0) for task in range(count))
    kinds = [each.headers["kind"] for each in messages]
    assert kinds == ["task_slices" if size > 1 else "task_slice" for size in expected]
    assert all(each.headers["batch"] == 1 and each.headers["ticket"] for each in messages)


@pytest.mark.parametrize(
    ("runners", "ticket"),
    [
        pytest.param([], {}, id="no runner"),
        pytest.param([runner(0, grouped=False)], {}, id="one that takes single slices"),
        pytest.param([runner(0), runner(1, grouped=False)], {}, id="two of which one takes single slices"),
        pytest.param([runner(0)], {"lane": "eval", "deliver": "none"}, id="an evaluation"),
    ],
)
def test_where_not_all_runners_take_several_and_in_evaluations_they_travel_alone(
    runners: list[Heartbeat], ticket: dict[str, Any]
) -> None:
    assert sizes(Desk(*runners).sent(tasks(8), **ticket)) == [1] * 8


def test_slices_too_large_together_travel_alone_and_one_too_large_alone_fails_its_task() -> None:
    desk = Desk(runner(0), max_bytes=65536)
    large = [*tasks(3, size=30_000), *tasks(1, size=70_000)]
    messages = desk.sent(large, deliver="caller")
    assert sizes(messages) == [2, 1]
    assert set(keys(messages)) == {(0, 0), (1, 0), (2, 0)}
    (ticket,) = desk.dispatcher.tickets.values()
    assert ticket.is_finished(3)
    assert not any(ticket.is_finished(task) for task in range(3))


def test_all_runs_of_a_task_without_an_outcome_are_sent_once() -> None:
    messages = Desk(runner(0)).sent(tasks(6, runs=6), done=[0])
    bases = {(0, 2), (0, 4)} | {(task, base) for task in range(1, 6) for base in (0, 2, 4)}
    assert keys(messages) == Counter(bases)
    assert sizes(messages) == [8, 9]


def nested(levels: int) -> TaskBody:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return TaskBody(workflow="none", repeat_times=2, raw_task={"x": value})


def test_slices_that_nest_too_deep_together_travel_alone() -> None:
    messages = Desk(runner(0)).sent([nested(MAX_NESTING - 3), *tasks(3)])
    assert set(keys(messages)) == {(task, 0) for task in range(4)}, "each can be read"
    assert sorted(sizes(messages)) == [1, 1, 2]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (10**30, "an integer of 100 bits, wanted one of at most 64"),
        ("\ud800", "half a surrogate pair"),
        ({1: 2}, "a key that is a int"),
        (object(), "a object, wanted"),
    ],
)
def test_a_task_that_cannot_travel_fails_alone(value: object, problem: str) -> None:
    desk = Desk(runner(0))
    bad = TaskBody(workflow="none", repeat_times=2, raw_task={"x": value})
    messages = desk.sent([bad, *tasks(3)], deliver="caller")
    assert set(keys(messages)) == {(1, 0), (2, 0), (3, 0)}
    (ticket,) = desk.dispatcher.tickets.values()
    assert [ticket.is_finished(task) for task in range(4)] == [True, False, False, False]
    (result,) = ticket.results_of(0)
    assert (result.outcome, "task_slice.task.raw_task.x" in str(result.message)) == ("failed", True)
    assert problem in str(result.message)


async def test_an_outcome_or_manifest_that_cannot_travel_does_not_end_the_run() -> None:
    desk = Desk()
    submission = SubmissionRef(submission_id="s", reply_to="amq.gen-x")
    outcome = SubmissionOutcome(submission_id="s", batch=1, ticket="t", outcome="finished", completed_runs=10**30)
    manifest = BatchClosed(batch=1, ticket="t", outcomes={"finished": 10**30})
    await desk.bus.connect()
    await desk.bus.declare(*desk.topology.durable)
    await desk.dispatcher.answer(submission, outcome)
    await desk.dispatcher.announce(manifest)
    published = list(desk.broker.queues[desk.topology.ready.name].messages)
    await desk.bus.close()
    (message,) = published
    tomb = decode(message.body, BatchReady)
    assert (tomb.ticket, tomb.state) == ("t", "failed")
    assert "an integer of 100 bits" in str(tomb.reason)
