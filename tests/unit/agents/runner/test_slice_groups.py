"""Several slices in one message: each is answered by itself, the message once, and one that fails is found alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.unit.agents.runner.harness import forever, lived, make, results, taking, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, kill
from tests.virtual import virtually
from trinity_agents.runner.process_pool import ChildDied
from trinity_mq.messages import TaskSlice, TaskSlices
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope


async def send(world: World, slices: Sequence[TaskSlice]) -> None:
    """Publish slices of one ticket in one message, their batch queue declared."""
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, "t1"))
    mail = envelope(TaskSlices(slices=list(slices)), message_id="t1-0-0+", headers={"batch": 1, "ticket": "t1"})
    await world.outside.publish(world.topology.exchange("tasks"), "train.1", mail)


@virtually
async def test_each_slice_is_answered_and_the_message_once_after_all_of_them() -> None:
    world = World()

    async def later_by_task(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(task_slice.task_id)
        return an_outcome(task_slice)

    await send(world, [a_slice(task=task) for task in range(3)])
    async with world.living(make(world, later_by_task)):
        await asyncio.sleep(1.5)
        assert [result.task_id for result in results(world)] == [0, 1]
        assert "acked tasks.train" not in world.wire
        await asyncio.sleep(1.5)
    assert [(result.task_id, result.outcome) for result in results(world)] == [(task, "finished") for task in range(3)]
    assert world.wire.count("acked tasks.train") == 1
    assert world.wire[-1] == "acked tasks.train"
    assert unanswered(world) == 0


@virtually
async def test_slices_of_a_message_run_only_as_many_at_a_time_as_there_are_slots() -> None:
    world = World("runner.concurrency=2")
    running: list[int] = []
    most = 0

    async def counts(task_slice: TaskSlice) -> SliceOutcome:
        nonlocal most
        running.append(task_slice.task_id)
        most = max(most, len(running))
        await asyncio.sleep(1)
        running.remove(task_slice.task_id)
        return an_outcome(task_slice)

    await send(world, [a_slice(task=task) for task in range(7)])
    runner = make(world, counts)
    async with world.living(runner):
        await asyncio.sleep(1)
        assert runner.detail().running == 2, "what waits for a slot is not named as running"
        await asyncio.sleep(4)
    assert sorted(result.task_id for result in results(world)) == list(range(7))
    assert most == 2


@virtually
async def test_a_message_of_a_killed_runner_is_taken_apart_and_each_slice_has_one_attempt_that_counts() -> None:
    world = World()
    second = make(world, name="runner-1")

    async def first_alone(task_slice: TaskSlice) -> SliceOutcome:
        return an_outcome(task_slice) if task_slice.task_id == 0 else await forever(task_slice)

    await send(world, [a_slice(task=task) for task in range(3)])
    first = asyncio.create_task(make(world, first_alone).run())
    await asyncio.sleep(1)
    assert [result.task_id for result in results(world)] == [0]
    await kill(first)
    await lived(world, second)
    by_second = [result for result in results(world) if result.runner == "runner-1"]
    assert sorted(result.task_id for result in by_second) == [0, 1, 2], "readers drop the second result of task 0"
    assert {(result.outcome, result.returned) for result in by_second} == {("finished", 1)}
    assert sorted(second.apart.ran) == [("t1", task) for task in range(3)]
    assert world.wire.count("confirmed task_slice") == 3
    assert (unanswered(world), world.stored("dead")) == (0, [])


@virtually
async def test_a_slice_that_kills_its_process_is_poisoned_alone() -> None:
    world = World("broker.delivery_limit=3")

    async def dies(task_slice: TaskSlice) -> SliceOutcome:
        if task_slice.task_id == 1:
            raise ChildDied("its process was killed by SIGSEGV", -11)
        return an_outcome(task_slice)

    await send(world, [a_slice(task=task) for task in range(3)])
    world.held_back("tasks.train", 1)
    await lived(world, make(world, isolated=dies), seconds=5)
    outcomes = {result.task_id: result.outcome for result in results(world)}
    assert outcomes == {0: "finished", 1: "poisoned", 2: "finished"}
    assert [each.headers["kind"] for each in world.stored("dead")] == ["task_slice"]
    assert unanswered(world) == 0


@pytest.mark.parametrize("after", range(1, 9))
@virtually
async def test_killed_at_any_step_of_taking_apart_no_slice_is_lost(after: int) -> None:
    world = World()
    await send(world, [a_slice(task=0), a_slice(task=1)])
    world.held_back("tasks.train", 1)
    first = asyncio.create_task(make(world, forever, forever).run())
    world.kill_after = (after, first)
    await asyncio.wait([first], timeout=10)
    await kill(first)
    await lived(world, make(world, name="runner-1"))
    assert {result.task_id for result in results(world) if result.outcome == "finished"} == {0, 1}
    assert unanswered(world) == 0


@virtually
async def test_a_drain_gives_back_what_waits_at_once_and_finishes_what_runs() -> None:
    world = World("runner.concurrency=1")
    await send(world, [a_slice(task=task) for task in range(3)])
    runner = make(world, taking(10))
    async with world.living(runner):
        await asyncio.sleep(1)
        runner.drain()
        await asyncio.sleep(1)
        waiting = world.stored("tasks.train")
        assert [(each.message_id, each.headers["given-back"]) for each in waiting] == [("t1-1-0", 1), ("t1-2-0", 1)]
        assert runner.detail().given_back == 2
    assert 10 < asyncio.get_running_loop().time() < 12
    second = make(world, name="runner-1")
    await lived(world, second)
    assert second.apart.ran == [], "what was given back in good order is no suspect"
    assert [(result.task_id, result.runner) for result in results(world)] == [
        (0, "runner-0"),
        (1, "runner-1"),
        (2, "runner-1"),
    ]
    assert unanswered(world) == 0


@virtually
async def test_a_message_without_slices_and_one_that_does_not_decode_hold_nobody_up() -> None:
    world = World()
    await send(world, [])
    await world.put("tasks.train", b"\x81\xa6slices\x07", kind="task_slices", headers={"kind": "task_slices"})
    await send(world, [a_slice()])
    await lived(world, make(world))
    assert [result.outcome for result in results(world)] == ["finished"]
    assert [reason.startswith("does not decode") for reason in world.reasons()] == [True]
    assert unanswered(world) == 0


@virtually
async def test_slices_of_a_message_whose_ticket_is_not_open_are_dropped() -> None:
    world = World()
    runner = make(world)
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 10, open=["t2"])
        await send(world, [a_slice(task=task, opened_beat=10) for task in range(2)])
        await asyncio.sleep(1)
    assert (results(world), unanswered(world)) == ([], 0)
    assert runner.here.ran == []
