"""A runner whose sandbox is away: what it takes, gives back and says, on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.agents.runner.harness import Does, at_once, lived, make, results, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, send_slice
from tests.virtual import virtually
from trinity_agents.runner.circuit import MAX_TRIES
from trinity_mq.messages import TaskSlice, TaskSlices
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import DeliveryHistory, envelope

AWAY = SliceOutcome(message="sandbox: connection refused (my.py:17)", failure_kind="sandbox")


def away_until(end: float, ran: list[tuple[float, TaskSlice]], seconds: float = 1.0) -> Does:
    """Return work that fails for want of a sandbox until ``end``, and notes when it began."""

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        clock = asyncio.get_running_loop().time
        ran.append((clock(), task_slice))
        await asyncio.sleep(seconds)
        return AWAY if clock() < end else an_outcome(task_slice)

    return work


@virtually
async def test_slices_wait_in_the_queue_while_their_sandbox_is_away_and_none_fails() -> None:
    world, ran = World("runner.concurrency=4"), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(60.0, ran))
    for task in range(12):
        await send_slice(world, a_slice(task=task))
    async with world.living(runner):
        await asyncio.sleep(6.0)
        assert world.count("tasks.train") == 12, "given back: another runner may take them"
        assert results(world) == []
        detail = runner.detail()
        assert (detail.running, detail.pauses, [one.lane for one in detail.paused]) == (0, 1, ["train"])
        assert runner.state == "holding"
        assert runner.waits_for.startswith("the sandbox of the train lane: the last ")
        await asyncio.sleep(192.0)
        assert (runner.state, runner.waits_for) == ("idle", "a slice")
    assert sorted(each.task_id for each in results(world)) == list(range(12))
    assert {each.outcome for each in results(world)} == {"finished"}
    assert unanswered(world) == 0
    probes = [time for time, _ in ran if 5.0 < time < 60.0]
    assert len(probes) <= 5
    assert runner.apart.ran == [], "the broker took none back"
    assert world.stored("dead") == []


@virtually
async def test_the_other_lane_goes_on() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    fails = away_until(1000.0, ran)

    async def only_train(task_slice: TaskSlice) -> SliceOutcome:
        return await (fails if task_slice.lane == "train" else at_once)(task_slice)

    async with world.living(make(world, only_train)):
        for task in range(8):
            await send_slice(world, a_slice(task=task))
        await asyncio.sleep(10.0)
        await send_slice(world, a_slice(ticket="e1", task=99, lane="eval", deliver="none"))
        await asyncio.sleep(1.0)
    assert [(each.task_id, each.outcome) for each in results(world)] == [(99, "finished")]
    assert unanswered(world) == 8


@virtually
async def test_a_runner_whose_own_sandbox_is_away_leaves_its_slices_to_another() -> None:
    world = World("runner.concurrency=4")
    ill, well = make(world, away_until(1e6, [])), make(world, away_until(0.0, []), name="runner-1")
    for task in range(40):
        await send_slice(world, a_slice(task=task))
    async with world.living(ill, well):
        await asyncio.sleep(60.0)
    assert sorted(each.task_id for each in results(world)) == list(range(40))
    assert {(each.outcome, each.runner) for each in results(world)} == {("finished", "runner-1")}


@virtually
async def test_a_task_that_alone_fails_costs_the_others_nothing_and_fails_for_good() -> None:
    """Its sandbox cannot be made, whatever the others do."""
    world = World("runner.concurrency=2")

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1.0)
        return AWAY if task_slice.task_id == 3 else an_outcome(task_slice)

    await lived(world, make(world, work), *(a_slice(task=task) for task in range(20)), seconds=30.0)
    (bad,) = (each for each in results(world) if each.task_id == 3)
    assert (bad.outcome, bad.failure_kind, bad.message) == ("failed", "sandbox", AWAY.message)
    assert len(results(world)) == 20
    assert unanswered(world) == 0


@virtually
async def test_a_final_failure_is_reported_at_once() -> None:
    world = World()

    async def work(task_slice: TaskSlice) -> SliceOutcome:
        return SliceOutcome(message="sandbox: no such image", failure_kind="sandbox", retryable=False)

    await lived(world, make(world, work), *(a_slice(task=task) for task in range(20)))
    assert [(each.outcome, each.failure_kind) for each in results(world)] == [("failed", "sandbox")] * 20


@virtually
async def test_tries_are_counted_over_all_runners_and_are_no_evidence_of_poison() -> None:
    world, ran = World("runner.concurrency=1", "broker.delivery_limit=2"), list[tuple[float, TaskSlice]]()
    for task in range(2):
        await send_slice(world, a_slice(task=task))
    for number in range(6):
        async with world.living(make(world, away_until(1e6, ran), name=f"runner-{number}")):
            await asyncio.sleep(4.0)
    pasts = [DeliveryHistory.of(each) for each in world.stored("tasks.train")]
    assert [past.suspect for past in pasts] == [0, 0]
    assert sum(past.put_back for past in pasts) == len(ran)
    assert results(world) == []


@virtually
async def test_at_the_limit_of_tries_it_fails() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(1e6, ran))
    await lived(world, runner, *(a_slice(task=task) for task in range(2)), seconds=10_000)
    assert [(each.outcome, each.failure_kind) for each in results(world)] == [("failed", "sandbox")] * 2
    assert len(ran) == 2 * MAX_TRIES
    assert runner.apart.ran == [], "the broker took none back"


@virtually
async def test_slices_that_came_in_one_message_are_tried_one_at_a_time() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    await send_slice(world, a_slice(task=100))
    for first in (0, 8, 16):
        slices = TaskSlices(slices=[a_slice(task=first + n) for n in range(8)])
        exchange = world.topology.exchange("tasks")
        await world.outside.publish(exchange, "train.1", envelope(slices, message_id=f"g{first}"))
    await lived(world, make(world, away_until(30.0, ran)), seconds=120.0)
    assert sorted(each.task_id for each in results(world)) == [*range(24), 100]
    assert {each.outcome for each in results(world)} == {"finished"}
    probes = [time for time, _ in ran if 5.0 < time < 30.0]
    assert len(probes) <= 3
    assert unanswered(world) == 0


@pytest.mark.parametrize("after", [0.5, 4.0, 6.3, 12.0])
@virtually
async def test_drained_while_a_lane_is_paused_it_ends_in_good_order(after: float) -> None:
    world, ran = World("runner.concurrency=4"), list[tuple[float, TaskSlice]]()
    for task in range(12):
        await send_slice(world, a_slice(task=task))
    async with world.living(make(world, away_until(1e6, ran))):
        await asyncio.sleep(after)
    assert asyncio.get_running_loop().time() < after + 3.0
    assert unanswered(world) == 12
    assert all(each.deliveries_before == 0 for each in world.stored("tasks.train"))


@virtually
async def test_away_from_the_broker_during_a_pause_it_goes_on_afterwards() -> None:
    world, ran = World(), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(30.0, ran))
    for task in range(12):
        await send_slice(world, a_slice(task=task))
    async with world.living(runner):
        await asyncio.sleep(4.0)
        world.broker.drop(runner.bus, delay=50.0)
        await asyncio.sleep(200.0)
    assert sorted({each.task_id for each in results(world)}) == list(range(12))
    assert {each.outcome for each in results(world)} == {"finished"}
    assert unanswered(world) == 0


@virtually
async def test_a_slice_that_nobody_waits_for_is_no_evidence() -> None:
    world, ran = World("runner.concurrency=4"), list[tuple[float, TaskSlice]]()
    runner = make(world, away_until(1e6, ran))
    async with world.living(runner):
        for task in range(8):
            await send_slice(world, a_slice(task=task, opened_beat=10))
        await world.beat("explorer", "explorer-0", 11, open=["t1"])
        await asyncio.sleep(4.0)
        assert runner.detail().pauses == 1
        await world.beat("explorer", "explorer-0", 12, open=[])
        await send_slice(world, a_slice(ticket="t2", task=50, opened_beat=12))
        await world.beat("explorer", "explorer-0", 13, open=["t2"])
        await asyncio.sleep(3.0)
    assert {task_slice.ticket for time, task_slice in ran if time > 5.0} == {"t2"}, "the others are dropped at once"
