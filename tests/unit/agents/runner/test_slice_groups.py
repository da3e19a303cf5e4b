"""Several slices in one message: each is answered by itself, the message once, and one that fails is found alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.agents.operator.test_operator import close, make_world, manifest, open_batch, ready, runs_of
from tests.unit.agents.operator.test_operator import make as make_operator
from tests.unit.agents.runner.harness import forever, lived, make, parts, results, taking, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, experience, kill
from trinity_agents.runner.result_publisher import SHARED
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.tickets import new_ticket
from trinity_mq.experience import Experience
from trinity_mq.messages import TaskBody, TaskResult, TaskSlice, TaskSlices
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually
from trinity_mq.transport.experience_parts import PartMember, attempt_rows_of, shared_part_message

LOOP = VirtualTimeLoop


async def send(world: World, slices: Sequence[TaskSlice]) -> None:
    """Publish slices of one ticket in one message, their batch queue declared."""
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, "t1"))
    mail = envelope(TaskSlices(slices=list(slices)), message_id="t1-0-0+", headers={"batch": 1, "ticket": "t1"})
    await world.outside.publish(world.topology.exchange("tasks"), "train.1", mail)


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


async def test_slices_of_a_message_run_only_as_many_at_a_time_as_there_are_slots() -> None:
    world = World("runner.concurrency=2")
    runner = make(world, taking(1))
    await send(world, [a_slice(task=task) for task in range(7)])
    async with world.living(runner):
        for second in range(1, 4):
            await asyncio.sleep(0.6)
            assert len(runner.here.ran) == 2 * second
            assert runner.detail().running == 2, "what waits for a slot is not named as running"
            await asyncio.sleep(0.4)
        await asyncio.sleep(2)
    assert sorted(result.task_id for result in results(world)) == list(range(7))


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


@pytest.mark.parametrize("after", range(1, 9))
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


async def test_a_message_without_slices_and_one_that_does_not_decode_hold_nobody_up() -> None:
    world = World()
    await send(world, [])
    await world.put("tasks.train", b"\x81\xa6slices\x07", kind="task_slices", headers={"kind": "task_slices"})
    await send(world, [a_slice()])
    await lived(world, make(world))
    assert [result.outcome for result in results(world)] == ["finished"]
    assert [reason.startswith("does not decode") for reason in world.reasons()] == [True]
    assert unanswered(world) == 0


async def test_slices_of_a_message_whose_ticket_is_not_open_are_dropped() -> None:
    world = World()
    runner = make(world)
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 10, open=["t2"])
        await send(world, [a_slice(task=task, opened_beat=10) for task in range(2)])
        await asyncio.sleep(1)
    assert (results(world), unanswered(world)) == ([], 0)
    assert runner.here.ran == []


# -- slices that end at the same time: their experiences and results travel together, and count one by one


def counted(world: World) -> dict[tuple[str, int], list[int]]:
    """The runs in the batch queue by attempt and part."""
    found: dict[tuple[str, int], list[int]] = {}
    for stored in parts(world):
        runs = [each.eid.run for each in Experience.deserialize_many(stored.body)]
        for share in attempt_rows_of(stored):
            assert share.key not in found
            found[share.key] = runs if share.rows is None else runs[share.rows]
    return found


async def together(task_slice: TaskSlice) -> SliceOutcome:
    await asyncio.sleep(1.0)
    return an_outcome(task_slice)


async def done(world: World, runner: Any, slices: int, **fields: Any) -> None:
    await lived(world, runner, *(a_slice(task=n, runs=2, run_base=10 * n, **fields) for n in range(slices)), seconds=4)


def test_what_ends_together_travels_together_and_counts_one_by_one() -> None:
    world = World()
    run_virtually(done(world, make(world, together), 12))
    assert len(parts(world)) < 6
    by_attempt = {result.attempt: result for result in results(world)}
    assert len(by_attempt) == 12
    assert counted(world) == {
        (attempt, 0): [result.run_base, result.run_base + 1] for attempt, result in by_attempt.items()
    }
    assert all((result.outcome, result.parts) == ("finished", 1) for result in by_attempt.values())
    assert unanswered(world) == 0
    last = {what: max(n for n, entry in enumerate(world.wire) if entry == what) for what in set(world.wire)}
    # all twelve end in the same instant, so that each kind is out before the next begins
    assert last["confirmed experience_part"] < world.wire.index("sent task_results")
    assert world.wire.index("confirmed task_results") < world.wire.index("acked tasks.train")


def test_one_unfit_to_travel_keeps_nobody_else_from_it() -> None:
    world = World()

    async def does(task_slice: TaskSlice) -> SliceOutcome:
        outcome = await together(task_slice)
        if task_slice.task_id == 3:
            outcome.experiences[0].reward = "much"  # type: ignore[assignment]
        return outcome

    run_virtually(done(world, make(world, does), 6))
    ends = {result.task_id: result for result in results(world)}
    assert {task: result.outcome for task, result in ends.items()} == {
        task: "failed" if task == 3 else "finished" for task in range(6)
    }
    assert "reward" in str(ends[3].message)
    assert sorted(run for runs in counted(world).values() for run in runs) == sorted(
        run for task in (0, 1, 2, 4, 5) for run in (10 * task, 10 * task + 1)
    )


@pytest.mark.parametrize(("length", "count", "messages"), [(1024, 8, 4), (200_000, 1, 16)])
def test_experiences_of_a_thousand_tokens_share_messages_and_long_ones_travel_alone(
    length: int, count: int, messages: int
) -> None:
    """A body costs much more than its bytes: encoding 8 experiences takes as long for 1024 tokens as for 64."""
    world = World("runner.concurrency=16")

    async def does(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1.0)
        long = [experience(task_slice.task_id, n, length=length) for n in range(count)]
        return an_outcome(task_slice, experiences=long)

    run_virtually(done(world, make(world, does), 16))
    assert len(results(world)) == 16
    assert (len(parts(world)) <= 4) == (messages == 4)
    assert len(parts(world)) <= messages
    if messages == 4:
        assert max(len(stored.body) for stored in parts(world)) <= SHARED
    else:
        assert all("attempt" in stored.headers for stored in parts(world))


def test_long_texts_that_are_not_ascii_travel_in_several_messages() -> None:
    world = World("broker.max_message_bytes=65536")  # the two texts take 90 000 bytes

    async def does(task_slice: TaskSlice) -> SliceOutcome:
        long = [experience(task_slice.task_id, n, response_text=f"{n}{'字' * 15_000}") for n in range(2)]
        return an_outcome(task_slice, experiences=long)

    run_virtually(done(world, make(world, does), 1))
    (result,) = results(world)
    assert (result.outcome, result.parts) == ("finished", 2)


# -- the readers


def shared(*members: tuple[str, int]) -> Any:
    listed = [PartMember(a_slice(task=task), name, [experience(task, 0)], 10, (1, 3)) for name, task in members]
    body = Experience.serialize_many([each for one in listed for each in one.experiences])
    return shared_part_message(listed, body)


async def publish(world: World, mail: Any, ticket: str = "t1") -> None:
    key = world.topology.batch_routing_key(1, ticket)
    assert await world.outside.publish(world.topology.exchange("experiences"), key, mail)


async def test_the_operator_takes_from_a_shared_part_what_the_manifest_lists_once() -> None:
    world = make_world()
    await open_batch(world)
    await publish(world, shared(("late", 0), ("a", 1), ("b", 2)))
    await publish(world, shared(("b", 2), ("c", 3)))  # b came twice: its confirm was lost
    await close(world, manifest(("c", 1), ("a", 1), ("b", 1)))
    await lived(world, make_operator(world), seconds=3)
    (decided,) = ready(world)
    assert (decided.state, decided.experiences) == ("ready", 3)
    assert len(runs_of(world, decided.op)) == 3
    assert world.reasons() == []


class Call:
    """A ticket of a caller, and the collector that reads its queue."""

    def __init__(self) -> None:
        self.world = World()
        how: dict[str, Any] = {"deliver": "caller", "lane": "train", "time_left": 1.0}
        self.ticket = new_ticket(1, [TaskBody(workflow="x")] * 4, **how)

    async def collector(self) -> Collector:
        world, bus = self.world, self.world.bus()
        await world.ready()
        await bus.connect()
        collector = Collector(bus, world.topology, world.config, "caller")
        collector.expect(self.ticket)
        await world.outside.declare(world.topology.batch_queue(1, self.ticket.ticket))
        collector.opened(self.ticket)
        return collector

    def result(self, attempt: str, task: int) -> TaskResult:
        about: dict[str, Any] = {"batch": 1, "ticket": self.ticket.ticket, "task_id": task, "attempt": attempt}
        return TaskResult(**about, outcome="finished", runs=[0], parts=1)


async def test_the_caller_gets_each_share_when_its_result_is_asked_for() -> None:
    call = Call()
    collector, ticket = await call.collector(), call.ticket
    await publish(call.world, shared(("a", 0), ("b", 1), ("c", 2)), ticket.ticket)
    await publish(call.world, shared(("d", 3)), ticket.ticket)
    # more parts are asked for than messages hold them
    taken = await collector.take(ticket, [call.result("c", 2), call.result("a", 0), call.result("d", 3)])
    assert [each.eid.task for each in taken] == [2, 0, 3]
    assert [each.eid.task for each in await collector.take(ticket, [call.result("b", 1)])] == [1]
    await collector.close()


async def test_a_caller_gets_a_part_that_the_reader_of_another_call_reads() -> None:
    call = Call()
    collector, ticket = await call.collector(), call.ticket
    async with collector.reading([ticket]):
        await asyncio.sleep(0.1)
        asking = asyncio.create_task(collector.take(ticket, [call.result("a", 0)]))
        await asyncio.sleep(0.1)
        await publish(call.world, shared(("a", 0)), ticket.ticket)
        assert [each.eid.task for each in await asyncio.wait_for(asking, 1.0)] == [0]
    await collector.close()


async def test_a_caller_whose_ticket_was_aborted_gets_nothing_and_makes_no_queue() -> None:
    call = Call()
    collector = await call.collector()
    collector.forget(call.ticket)
    await collector.close()
    assert await collector.take(call.ticket, [call.result("a", 0)]) == []
    assert call.world.count(f"batch.{call.ticket.ticket}") is None
