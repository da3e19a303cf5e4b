"""Batches that are closed without all their tasks, what becomes of the rest, limits that follow what slices take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.virtual import virtually
from trinity_agents.explorer.state import ExplorerState
from trinity_agents.explorer.task_source import TaskSource
from trinity_agents.explorer.training_batches import TrainingBatches
from trinity_mq.bus import Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.dispatch.timeouts import UsableClock
from trinity_mq.messages import (
    Heartbeat,
    Progress,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskSlice,
    decode,
    decode_any,
)
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import Peers
from trinity_mq.scheduling import Scheduler
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Task


class Desk:
    """Batches, and the tickets in their hands."""

    def __init__(self, *overrides: str) -> None:
        self.config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides)
        self.state, self.topology, self.broker = ExplorerState(), Topology("cut"), MemoryBroker()
        self.bus = MemoryBus(self.broker, self.topology, config=self.config.broker)
        self.beats = 0
        self.dispatcher = Dispatcher(
            self.config,
            bus=self.bus,
            topology=self.topology,
            owner="explorer-0",
            heartbeat_now=self.beat,
            tickets=self.state.tickets,
        )
        evaluations: Any = _NoEvaluations()
        self.batches = TrainingBatches(
            self.config,
            self.state,
            self.dispatcher,
            TaskSource(self.config, self.state, None),
            evaluations,
            Peers(),
            save=self.saved,
            report=lambda step, metrics: None,
            woken=Notifier(),
        )

    def beat(self) -> None:
        self.beats += 1

    async def saved(self) -> None:
        """Nothing to write."""

    def ticket(self, tasks: int, repeat: int = 2, **more: Any) -> Ticket:
        bodies = [TaskBody(repeat_times=repeat, raw_task={"n": n}) for n in range(tasks)]
        ticket = self.dispatcher.make_ticket(bodies, 1, deliver="pipeline", **more)
        ticket.published = True
        self.state.tickets[ticket.ticket] = ticket
        return ticket

    def tick(self, seconds: float, moving: bool = True) -> None:
        async def ticks() -> None:
            await self.batches.tick(seconds, moving=moving)

        run_virtually(ticks())

    def closed(self, ticket: Ticket) -> list[TaskBody]:
        """Close a ticket; return what was given back."""

        async def closes() -> None:
            await self.bus.connect()
            await self.bus.declare(*self.topology.durable)
            await self.batches.close_complete()

        run_virtually(closes())
        assert ticket.ticket not in self.state.tickets
        return [one.task for one in self.state.pending]


class _NoEvaluations:
    def request(self, label: int) -> None:
        """Nothing to evaluate."""


def done(
    ticket: Ticket, task: int, base: int = 0, outcome: Any = "finished", runs: tuple[int, ...] = (0, 1), **more: Any
) -> None:
    result = TaskResult(
        batch=1,
        ticket=ticket.ticket,
        task_id=task,
        run_base=base,
        repeat_times=2,
        attempt=f"{task}-{base}",
        outcome=outcome,
        runs=list(runs),
        parts=1 if runs else 0,
        **more,
    )
    assert ticket.record(result)


OVER = ("explorer.over_rollout.ratio=0.5", "explorer.over_rollout.wait_after_min=5")
KEEP = ("explorer.over_rollout.return_partial_tasks=true",)


def test_over_rollout_cuts_the_rest_off_a_while_after_enough_is_done() -> None:
    desk = Desk(*OVER)
    ticket = desk.ticket(4)
    done(ticket, 0)
    desk.tick(100)
    assert ticket.is_open, "one of four is too few"
    done(ticket, 2)
    desk.tick(4)
    desk.tick(100, moving=False)
    assert ticket.is_open, "time without a runner does not count"
    desk.tick(1)
    assert ticket.is_complete
    assert desk.beats == 1, "runners hear of it at once"
    assert desk.dispatcher.open_tickets == []
    manifest = ticket.make_manifest()
    assert manifest.outcomes == {"finished": 2, "cancelled": 2}
    assert [one["n"] for one in (body.raw_task for body in desk.closed(ticket))] == [1, 3]


@pytest.mark.parametrize("keep", [False, True])
def test_finished_slices_of_a_task_that_was_cut_off_count_only_if_they_are_to(keep: bool) -> None:
    desk = Desk(*OVER, *(KEEP if keep else ()), "explorer.max_repeat_times_per_runner=2")
    ticket = desk.ticket(2, repeat=4)
    done(ticket, 0)
    done(ticket, 0, 2, runs=(2, 3))
    done(ticket, 1)
    desk.tick(5)
    desk.tick(2)
    accepted = {(one.task_id, one.run_base) for one in ticket.make_manifest().accepted}
    assert accepted == ({(0, 0), (0, 2), (1, 0)} if keep else {(0, 0), (0, 2)})
    assert len(desk.closed(ticket)) == (0 if keep else 1), "without a run that counts it is given back"


def test_runs_that_come_in_the_grace_count_and_later_ones_do_not() -> None:
    desk = Desk(*OVER, *KEEP)
    ticket = desk.ticket(4)
    done(ticket, 0)
    done(ticket, 1)
    desk.tick(5)
    assert not ticket.is_complete
    assert not ticket.is_open
    assert (desk.beats, desk.dispatcher.open_tickets) == (1, [])
    done(ticket, 2, outcome="partial", runs=(1,))
    desk.tick(1, moving=False)
    assert not ticket.is_complete
    desk.tick(1, moving=False)
    assert ticket.is_complete, "the grace passes without a runner too"
    late = TaskResult(batch=1, ticket=ticket.ticket, task_id=3, attempt="late", outcome="partial", runs=[0], parts=1)
    assert not ticket.record(late)
    accepted = {one.task_id: one.runs for one in ticket.make_manifest().accepted}
    assert accepted == {0: [0, 1], 1: [0, 1], 2: [1]}
    assert [body.raw_task["n"] for body in desk.closed(ticket)] == [3]


def test_a_ticket_in_its_grace_goes_on_after_a_restart() -> None:
    desk = Desk(*OVER, *KEEP)
    ticket = desk.ticket(2)
    done(ticket, 0)
    desk.tick(5)
    again = Ticket.model_validate(ticket.model_dump())
    assert not again.is_open
    assert not again.is_complete
    assert again.finished_count == 1
    desk.state.tickets[ticket.ticket] = again
    desk.tick(2)
    assert again.is_complete


def test_what_is_given_back_when_a_batch_is_closed() -> None:
    desk = Desk()
    ticket = desk.ticket(6, submissions=[SubmissionRef(submission_id="s", task_id=5)])
    desk.state.given_back[ticket.ticket] = [4]
    done(ticket, 0)
    done(ticket, 1, outcome="failed", runs=())
    done(ticket, 2, outcome="partial", runs=(1,))
    done(ticket, 3, outcome="poisoned", runs=())
    done(ticket, 4, outcome="failed", runs=())
    done(ticket, 5, outcome="failed", runs=())
    assert [body.raw_task["n"] for body in desk.closed(ticket)] == [1], "not twice, no poison, nobody who was answered"
    assert desk.state.pending[0].given_back


@pytest.mark.parametrize(("outcome", "told"), [("gone", True), ("failed", True), ("trained", False), ("empty", False)])
@virtually
async def test_a_submitter_hears_when_the_experiences_it_was_promised_will_not_come(outcome: Any, told: bool) -> None:
    desk = Desk()
    wants = {"reply_to": "tmq.cut.replies.submit.test", "correlation_id": "c", "want_experiences": True}
    ticket = desk.ticket(2, submissions=[SubmissionRef(submission_id=str(n), task_id=n, **wants) for n in range(2)])
    done(ticket, 0)
    done(ticket, 1)
    answers: list[SubmissionOutcome] = []
    await desk.bus.connect()
    await desk.bus.declare(*desk.topology.durable, Queue(name="tmq.cut.replies.submit.test"))
    await desk.batches.close_complete()
    assert not desk.batches.needs_attention()
    again = ExplorerState.model_validate(desk.state.model_dump())
    desk.state.following = again.following  # over a restart
    for _ in range(2):
        desk.batches.on_progress(
            Progress(progress=1, generation=1, step=0, batch=1, ticket=ticket.ticket, outcome=outcome)
        )
        assert desk.batches.needs_attention() is (told and not answers)
        await desk.batches.close_complete()
        async with await desk.bus.consume(Queue(name="tmq.cut.replies.submit.test")) as feed:
            await asyncio.sleep(0.1)
            while (delivery := feed.get_nowait()) is not None:
                assert delivery.correlation_id == "c"
                answers.append(decode(delivery.body, SubmissionOutcome))
                await delivery.ack()
    assert [(one.submission_id, one.outcome, one.experiences) for one in answers[:2]] == [
        ("0", "finished", 1),
        ("1", "finished", 1),
    ]
    assert [(one.submission_id, one.outcome, one.experiences) for one in answers[2:]] == [
        ("0", "finished", 0),
        ("1", "finished", 0),
    ] * told
    assert all("will not arrive" in str(one.message) for one in answers[2:])


# -- limits


@pytest.mark.parametrize(("seconds", "expected"), [(2.0, 6.0), (100.0, 50.0)])
def test_the_dynamic_timeout_follows_the_mean_and_never_exceeds_the_limit(seconds: float, expected: float) -> None:
    desk = Desk("explorer.dynamic_timeout.enable=true", "explorer.max_timeout=50", "explorer.max_retry_times=1")
    times = desk.dispatcher.slice_times
    first = desk.ticket(2)
    assert times.limit(50.0) == 50.0
    for outcome, runs, spent in (("finished", [0], seconds), ("failed", [], 0.001), ("partial", [1], seconds)):
        times.slice_done(
            TaskResult(batch=1, ticket=first.ticket, task_id=0, attempt="a", outcome=outcome, runs=runs, seconds=spent)
        )
    assert times.limit(50.0) == 50.0, "not warm before a batch is complete"
    times.batch_done()
    assert times.limit(50.0) == expected
    slices: list[TaskSlice] = []

    async def opens() -> None:
        await desk.bus.connect()
        await desk.bus.declare(*desk.topology.durable)
        await desk.dispatcher.open(desk.dispatcher.make_ticket([TaskBody()], 2, deliver="none"))
        await desk.dispatcher.open(desk.dispatcher.make_ticket([TaskBody()], "2/e", deliver="none", lane="eval"))
        for lane in (desk.topology.tasks_train, desk.topology.tasks_eval):
            async with await desk.bus.consume(lane) as feed:
                slices.append(decode((await anext(feed)).body, TaskSlice))

    run_virtually(opens())
    train, evaluation = slices
    assert (train.max_timeout, train.slice_timeout) == (expected, min(100.0, 2 * expected))
    assert (evaluation.max_timeout, evaluation.slice_timeout) == (50.0, 100.0)


# -- what runners hear


@virtually
async def test_a_scheduler_without_an_agent_beats_and_lists_what_is_open() -> None:
    desk = Desk()
    beats: list[tuple[float, Heartbeat]] = []
    loop = asyncio.get_running_loop()
    other = MemoryBus(desk.broker, desk.topology, config=desk.config.broker)
    for bus in (desk.bus, other):
        await bus.connect()
    ears = desk.topology.listener("ears", "x", "telemetry", "beat.scheduler.#")
    await other.declare(ears)
    scheduler = Scheduler(desk.config, bus=desk.bus)

    async def hears() -> None:
        async with await other.consume(ears) as feed:
            async for delivery in feed:
                beat = decode_any(delivery.body)
                assert isinstance(beat, Heartbeat)
                beats.append((loop.time(), beat))

    hearing = asyncio.ensure_future(hears())
    await scheduler.start()
    ticket = scheduler.schedule([Task(), Task()], 1)
    await asyncio.sleep(5.0)
    aborted = loop.time()
    await scheduler.abort_batch(1)
    await asyncio.sleep(0.5)
    async with await other.consume(desk.topology.tasks_train) as feed:
        task_slice = decode((await anext(feed)).body, TaskSlice)
    listing = [
        (when, beat) for when, beat in beats if beat.id == task_slice.explorer and beat.seq >= task_slice.opened_beat
    ]
    before = [beat.detail.open for when, beat in listing if when < aborted]
    assert len(before) >= 2, "every two seconds"
    assert all(listed == [ticket] for listed in before)
    when, beat = next(one for one in listing if one[0] >= aborted)
    assert when - aborted < 0.2
    assert (beat.role, beat.detail.open) == ("scheduler", [])
    assert task_slice.explorer.startswith("scheduler-")
    assert task_slice.keep_partial
    await scheduler.stop()
    hearing.cancel()


@virtually
async def test_deadlines_stand_still_while_the_broker_is_away() -> None:
    desk = Desk()
    loop = asyncio.get_running_loop()
    await desk.bus.connect()
    clock = UsableClock(desk.bus)
    started = loop.time()
    loop.call_later(1.0, lambda: desk.broker.drop(desk.bus, delay=20.0))
    with pytest.raises(TimeoutError):
        async with clock.timeout(5.0):
            await asyncio.sleep(1000)
    assert 25.0 <= loop.time() - started < 25.5
    desk.broker.drop(desk.bus, delay=7.0)
    started = loop.time()
    with pytest.raises(TimeoutError):
        async with clock.timeout(1.0):
            await asyncio.sleep(1000)
    assert 8.0 <= loop.time() - started < 8.5, "also one that begins meanwhile"
    async with clock.timeout(1.0):
        await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)
