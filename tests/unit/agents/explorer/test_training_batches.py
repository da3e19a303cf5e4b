"""What the explorer takes from the trainer's counters, and what a batch waits for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.virtual import virtually
from trinity_agents.explorer.state import ExplorerState, PendingTask
from trinity_agents.explorer.task_source import TaskSource
from trinity_agents.explorer.training_batches import NO_TASKS, TrainingBatches
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.messages import Heartbeat, PausedLane, Progress, RunnerStatus, TaskBody
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import Peers


class Desk:
    """Batches of a run whose tasks are submitted, and no agents."""

    def __init__(self, *overrides: str) -> None:
        self.config = load_config({"name": "desk", "model": {"tiny": {}}}, overrides)
        self.state, self.peers = ExplorerState(), Peers()
        self.bus = MemoryBus(MemoryBroker(), Topology("desk"), config=self.config.broker)
        self.dispatcher = Dispatcher(
            self.config, bus=self.bus, topology=Topology("desk"), owner="explorer-0", tickets=self.state.tickets
        )
        source, nobody = TaskSource(self.config, self.state, None), Any
        self.batches = TrainingBatches(
            self.config,
            self.state,
            self.dispatcher,
            source,
            nobody,  # type: ignore[arg-type]
            self.peers,
            save=self.dispatcher.caught_up,
            report=lambda step, metrics: None,
            woken=Notifier(),
        )

    def follow(self, *batches: int) -> list[str]:
        """Have batches closed and not yet consumed."""
        tickets = [
            self.dispatcher.make_ticket([TaskBody()], batch, deliver="pipeline").make_manifest() for batch in batches
        ]
        for manifest in tickets:
            self.state.following.add(manifest)
        return [manifest.ticket for manifest in tickets]


def progress(ticket: str, outcome: Any, number: int = 1, generation: int = 1) -> Progress:
    return Progress(progress=number, generation=generation, step=0, batch=number, ticket=ticket, outcome=outcome)


def test_counters_only_rise_within_a_generation_and_an_older_one_is_not_heard() -> None:
    batches = Desk().batches
    batches.update_counters(2, progress=5, committed=4)
    batches.update_counters(2, progress=3, committed=5)
    assert (batches.counters.progress, batches.counters.committed_progress) == (5, 5)
    batches.update_counters(1, progress=9, committed=9)
    assert batches.counters.progress == 5
    batches.update_counters(3, progress=2, committed=0)
    assert (batches.counters.progress, batches.counters.committed_progress) == (2, 0), "a restart may have gone back"


def test_a_progress_said_again_by_a_restarted_trainer_is_no_further_empty_batch() -> None:
    desk = Desk("explorer.max_consecutive_empty=2")
    first, second, third = desk.follow(1, 2, 3)
    desk.batches.on_progress(progress(first, "empty"))
    for generation in (1, 2, 3):
        desk.batches.on_progress(progress(first, "empty", generation=generation))
    desk.batches.check()
    desk.batches.on_progress(progress(second, "trained", 2))
    assert desk.state.consecutive_empty == 0
    desk.batches.on_progress(progress(third, "failed", 3))
    desk.batches.on_progress(progress(desk.follow(4)[0], "gone", 4))
    assert desk.batches.needs_attention()
    with pytest.raises(FatalError, match="max_consecutive_empty"):
        desk.batches.check()


def test_batches_that_the_trainer_skips_are_not_empty() -> None:
    """The trainer stops by itself after so many of them, and keeps the last one."""
    desk = Desk("explorer.max_consecutive_empty=2")
    for number, closed in enumerate(desk.follow(1, 2, 3), 1):
        desk.batches.on_progress(progress(closed, "skipped", number))
    desk.batches.check()
    assert desk.state.consecutive_empty == 0
    for number, closed in enumerate(desk.follow(4, 5, 6), 4):
        desk.batches.on_progress(progress(closed, "skipped" if number == 5 else "empty", number))
    with pytest.raises(FatalError, match="max_consecutive_empty"):
        desk.batches.check()


@virtually
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


@virtually
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
