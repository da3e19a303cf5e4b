"""The runner's sentences of docs/protocol.md, each with a test that fails without it (tests/RULES.md)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.agents.runner.harness import forever, lived, make, parts, results, suspected, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, kill, send_slice
from tests.virtual import virtually
from trinity_mq.bus import Binding, Queue
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import TaskSlice
from trinity_mq.rollout.status import SliceOutcome


@virtually
async def test_nothing_is_delivered_that_is_not_started() -> None:
    """What a runner takes down with it counts for all that was delivered, so that is no more than it works on."""
    world = World("runner.concurrency=2")
    runner = make(world, forever)
    for task in range(5):
        await send_slice(world, a_slice(task=task))
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(1)
    assert len(runner.here.ran) == 2
    assert world.count("tasks.train") == 3
    await kill(task)
    assert sorted(each.deliveries_before for each in world.stored("tasks.train")) == [0, 0, 0, 1, 1]


@virtually
async def test_a_slot_that_becomes_free_takes_the_next() -> None:
    world = World("runner.concurrency=2")

    async def slow(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(10 * (1 + task_slice.task_id))
        return an_outcome(task_slice)

    runner = make(world, slow)
    for task in range(4):
        await send_slice(world, a_slice(task=task))
    async with world.living(runner):
        await asyncio.sleep(5)
        assert len(runner.here.ran) == 2
        await asyncio.sleep(7)
        assert [task for _, task in runner.here.ran] == [0, 1, 2]
        await asyncio.sleep(200)
    assert len(results(world)) == 4


@pytest.mark.parametrize(("returns", "failed", "outcome"), [(3, 1, "finished"), (4, 1, "poisoned"), (9, 0, "finished")])
@virtually
async def test_the_limit_is_five_deliveries_one_of_which_was_seen_to_fail(
    returns: int, failed: int, outcome: str
) -> None:
    """The broker's count alone is a suspicion: it rises with each lost connection and each restart of the broker."""
    assert BrokerConfig().delivery_limit == 5
    world = World()
    runner = make(world)
    await suspected(world, a_slice(), returned=returns, failed=failed)
    await lived(world, runner)
    assert [result.outcome for result in results(world)] == [outcome]
    assert unanswered(world) == 0
    if outcome == "poisoned":
        assert results(world)[0].runs == runner.here.ran == runner.apart.ran == []
        assert world.reasons() == ["5 attempts at this slice failed or were lost (limit 5)"]
        assert world.stored("dead")[0].headers["ticket"] == "t1"


@virtually
async def test_the_count_is_judged_first_and_always_ends_in_an_outcome() -> None:
    """Also where nobody seems to wait for the slice: a beat may be wrong about that, a count is not asked twice."""
    world = World()
    runner = make(world)
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 11, open=[])
        await send_slice_at(world, 5)
        await asyncio.sleep(1)
    assert [result.outcome for result in results(world)] == ["poisoned"]
    assert runner.here.ran == runner.apart.ran == []
    kinds = [entry for entry in world.wire if entry.startswith(("confirmed", "acked"))]
    assert kinds == ["confirmed task_result", "confirmed task_slice", "acked tasks.train"]


async def send_slice_at(world: World, returns: int) -> None:
    """Send a slice that has come back so often, to a runner that is there already."""
    queue: Any = world.broker.queues[world.topology.tasks_train.name]
    dispatch, queue.dispatch = queue.dispatch, lambda: None
    await send_slice(world, a_slice(opened_beat=10))
    world.held_back("tasks.train", returns, failed=1)
    queue.dispatch = dispatch
    dispatch()


@virtually
async def test_each_start_is_an_attempt_of_its_own_and_names_are_derived_from_it() -> None:
    world = World()
    for name in ("runner-0", "runner-1"):
        await lived(world, make(world, name=name), a_slice())
    one, two = results(world)
    assert one.attempt != two.attempt
    assert {each.message_id for each in parts(world)} == {f"{result.attempt}-0" for result in (one, two)}
    assert [each.message_id for each in world.stored("results") if each.headers["kind"] == "task_result"] == [
        f"result-{one.attempt}",
        f"result-{two.attempt}",
    ]


@virtually
async def test_a_tap_makes_every_part_routable_and_ends_nothing() -> None:
    """``mandatory`` is a hint: the result still goes out, and it is the explorer who knows what is late."""
    world = World()
    await send_slice(world, a_slice())
    await world.outside.delete(world.topology.batch_queue(1, "t1").name)
    await world.outside.declare(
        Queue(name="somebodys-tap", bindings=(Binding(world.topology.exchange("experiences"), "#"),))
    )
    await lived(world, make(world))
    assert len(results(world)) == 1
    assert unanswered(world) == 0
    assert world.count("batch.t1") is None
