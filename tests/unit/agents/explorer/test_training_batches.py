"""Training batches: what one waits for, how it is closed without all its tasks, what becomes of the rest, limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trinity_agents.explorer.state import ExplorerState, PendingTask
from trinity_agents.explorer.task_source import TaskSource
from trinity_agents.explorer.training_batches import NO_TASKS, TrainingBatches
from trinity_mq.bus import Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.config.agents import OverRolloutConfig
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket, new_ticket
from trinity_mq.dispatch.timeouts import pass_time, required_tasks
from trinity_mq.messages import (
    Heartbeat,
    PausedLane,
    Progress,
    RunnerStatus,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskSlice,
    decode,
)
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import Peers
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop


class Desk:
    """Batches, and the tickets in their hands."""

    def __init__(self, *overrides: str, state: ExplorerState | None = None) -> None:
        self.config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides)
        self.state, self.topology, self.broker = state or ExplorerState(), Topology("cut"), MemoryBroker()
        self.peers = Peers()
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
            self.peers,
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

    def follow(self, *batches: int) -> list[str]:
        """Have batches closed and not yet consumed."""
        manifests = [
            self.dispatcher.make_ticket([TaskBody()], batch, deliver="pipeline").make_manifest() for batch in batches
        ]
        for manifest in manifests:
            self.state.following.add(manifest)
        return [manifest.ticket for manifest in manifests]

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
    ticket = Ticket.model_validate(ticket.model_dump())  # after a restart
    desk.state.tickets[ticket.ticket] = ticket
    assert (ticket.is_open, ticket.is_complete, ticket.finished_count) == (False, False, 2)
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
    counts = [(answer.submission_id, answer.outcome, answer.experiences) for answer in answers]
    assert counts == [(name, "finished", count) for count in (1, 0)[: 1 + told] for name in "01"]
    assert all("will not arrive" in str(answer.message) for answer in answers[2:])


@pytest.mark.parametrize(("seconds", "expected"), [(2.0, 6.0), (100.0, 50.0)])
async def test_the_dynamic_timeout_follows_the_mean_and_never_exceeds_the_limit(
    seconds: float, expected: float
) -> None:
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
    await desk.bus.connect()
    await desk.bus.declare(*desk.topology.durable)
    await desk.dispatcher.open(desk.dispatcher.make_ticket([TaskBody()], 2, deliver="none"))
    await desk.dispatcher.open(desk.dispatcher.make_ticket([TaskBody()], "2/e", deliver="none", lane="eval"))
    slices: list[TaskSlice] = []
    for lane in (desk.topology.tasks_train, desk.topology.tasks_eval):
        async with await desk.bus.consume(lane) as feed:
            slices.append(decode((await anext(feed)).body, TaskSlice))
    train, evaluation = slices
    assert (train.max_timeout, train.slice_timeout) == (expected, min(100.0, 2 * expected))
    assert (evaluation.max_timeout, evaluation.slice_timeout) == (50.0, 100.0)


# -- what the explorer takes from the trainer's counters, and what a batch waits for


def progress(ticket: str, outcome: Any, number: int = 1, generation: int = 1) -> Progress:
    return Progress(progress=number, generation=generation, step=0, batch=number, ticket=ticket, outcome=outcome)


def test_a_progress_said_again_by_a_restarted_trainer_is_no_further_empty_batch() -> None:
    desk = Desk("explorer.max_consecutive_empty=2")
    first, second, third = desk.follow(1, 2, 3)
    desk.batches.on_progress(progress(first, "empty"))
    for generation in (1, 2, 3):
        desk.batches.on_progress(progress(first, "empty", generation=generation))
    desk.batches.check()
    for number, skipped in enumerate(desk.follow(10, 11, 12), 10):
        desk.batches.on_progress(progress(skipped, "skipped", number))
    desk.batches.check()  # the trainer stops by itself after so many of them, and keeps the last one
    assert desk.state.consecutive_empty == 1
    desk.batches.on_progress(progress(second, "trained", 2))
    assert desk.state.consecutive_empty == 0
    desk.batches.on_progress(progress(third, "failed", 3))
    desk.batches.on_progress(progress(desk.follow(4)[0], "gone", 4))
    assert desk.batches.needs_attention()
    with pytest.raises(FatalError, match="max_consecutive_empty"):
        desk.batches.check()


def test_empty_batches_of_an_earlier_start_end_no_run() -> None:
    desk = Desk("explorer.max_consecutive_empty=2")
    desk.state.opened = 3
    desk = Desk("explorer.max_consecutive_empty=2", state=desk.state)
    for number, ticket in enumerate(desk.follow(1, 2, 3, 4), 1):
        desk.batches.on_progress(progress(ticket, "failed", number))
    assert desk.state.consecutive_empty == 1
    desk.batches.check()


async def test_what_the_next_batch_waits_for_in_order() -> None:
    desk = Desk("explorer.max_open_batches=1")
    batches = desk.batches
    assert "connect" in str(batches.blocked_reason(True))
    await desk.bus.connect()
    assert batches.blocked_reason(False) == "an engine to take the weights"
    assert batches.blocked_reason(True) == "a trainer"
    desk.peers.receive(Heartbeat(role="trainer", id="t", seq=1, incarnation="x", lease=10, state="idle"))
    desk.state.opened = 1
    assert batches.blocked_reason(True) == "weights of progress 1 (committed: 0)"
    batches.update_counters(1, progress=1, committed=1)
    assert batches.blocked_reason(True) == NO_TASKS
    desk.state.pending.append(PendingTask(task=TaskBody()))
    assert batches.blocked_reason(True) is None
    desk.follow(1)
    assert batches.blocked_reason(True) == "one of 1 open batches to be consumed"
    await desk.bus.close()


async def test_a_batchs_time_stands_still_while_all_runners_have_paused_its_lane() -> None:
    paused = PausedLane(lane="train", failures=8, kind="sandbox", reason="sandbox: refused", pause=10.0)

    def runner(name: str, seq: int, *lanes: PausedLane) -> Heartbeat:
        detail = RunnerStatus(paused=list(lanes), pauses=1).as_map()
        return Heartbeat(role="runner", id=name, seq=seq, incarnation=name, lease=10, state="idle", detail=detail)

    desk = Desk()
    train, held_out = (
        desk.dispatcher.make_ticket([TaskBody()], batch, deliver="none", lane=lane)
        for batch, lane in ((1, "train"), ("1/held", "eval"))
    )
    for ticket in (train, held_out):
        desk.dispatcher.tickets[ticket.ticket] = ticket
    left = [train.time_left, held_out.time_left]

    async def passed() -> list[float]:
        before = [train.time_left, held_out.time_left]
        await desk.batches.tick(1.0)
        return [before[0] - train.time_left, before[1] - held_out.time_left]

    assert await passed() == [1.0, 1.0], "without runners the caller says that nothing moves"
    desk.peers.receive(runner("a", 1, paused))
    assert await passed() == [0.0, 1.0]
    assert list(desk.batches.paused_lanes()) == ["train"]
    desk.peers.receive(runner("b", 1))
    assert await passed() == [1.0, 1.0], "one of them works on"
    desk.peers.receive(runner("b", 2, paused, paused.model_copy(update={"lane": "eval"})))
    assert await passed() == [0.0, 1.0]
    assert desk.batches.paused_lanes() == {"train": paused.line()}
    desk.peers.receive(runner("a", 2))
    assert await passed() == [1.0, 1.0]
    assert (train.time_left, held_out.time_left) == (left[0] - 3.0, left[1] - 5.0)


@pytest.mark.parametrize(
    ("tasks", "ratio", "required"), [(4, 0.5, 2), (5, 0.5, 3), (10, 0.9, 1), (10, 0.3, 7), (3, 0, 3)]
)
def test_how_many_tasks_are_enough(tasks: int, ratio: float, required: int) -> None:
    assert required_tasks(tasks, OverRolloutConfig(ratio=ratio)) == required


def ticket_of(tasks: int, done: int, deliver: Any = "pipeline") -> Ticket:
    ticket = new_ticket(1, [TaskBody()] * tasks, deliver=deliver, lane="train", time_left=10.0)
    for task in range(done):
        ticket.record(
            TaskResult(batch=1, ticket=ticket.ticket, task_id=task, attempt="a", outcome="finished", runs=[0])
        )
    return ticket


@pytest.mark.parametrize(
    ("ratio", "done", "deliver", "reasons"),
    [
        (0.5, 1, "pipeline", [None, None, None, "timeout"]),
        (0.5, 2, "pipeline", [None, "enough", "enough", "timeout"]),
        (0.0, 3, "pipeline", [None, None, None, "timeout"]),
        (0.5, 2, "none", [None, None, None, "timeout"]),  # evaluations wait for all
    ],
)
def test_a_ticket_is_cut_off_for_a_reason(ratio: float, done: int, deliver: Any, reasons: list[Any]) -> None:
    overrides = (f"explorer.over_rollout.ratio={ratio}", "explorer.over_rollout.wait_after_min=5")
    config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides).explorer
    ticket = ticket_of(4, done, deliver)
    assert [pass_time(ticket, seconds, config) for seconds in (2.5, 2.5, 2.5, 2.5)] == reasons
    assert ticket.time_left == 0.0


def test_the_wait_begins_when_enough_are_done_and_goes_on_after_a_restart() -> None:
    overrides = ("explorer.over_rollout.ratio=0.5", "explorer.over_rollout.wait_after_min=3")
    config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides).explorer
    ticket = ticket_of(2, 0)
    assert pass_time(ticket, 4.0, config) is None
    assert ticket.wait_left is None
    ticket.record(TaskResult(batch=1, ticket=ticket.ticket, task_id=1, attempt="a", outcome="finished", runs=[0]))
    assert pass_time(ticket, 2.0, config) is None
    again = Ticket.model_validate(ticket.model_dump())
    assert pass_time(again, 1.0, config) == "enough"
