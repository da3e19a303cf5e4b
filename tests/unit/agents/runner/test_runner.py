"""The runner's side of docs/protocol.md, on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from tests.unit.agents.runner.harness import forever, make, parts, results, run_slices, taking, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, experience, kill, send_slice
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.process_pool import ChildDied
from trinity_agents.runner.result_publisher import RETURNED_PAUSE
from trinity_mq.experience import Experience
from trinity_mq.messages import RunnerStatus, TaskBody, TaskSlice
from trinity_mq.messages.tasks import MOST_ANSWER, MOST_ANSWERS
from trinity_mq.models.errors import EngineLost
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Workflow

# -- what comes


def test_a_body_that_does_not_decode_is_parked_and_the_others_go_on() -> None:
    world = World()

    async def main() -> None:
        await world.ready()
        await world.put("tasks.train", b"\xc1 no msgpack")
        await world.put("tasks.train", b"{}", content_type="application/json")
        await world.put("tasks.train", b"x" * (world.config.broker.max_message_bytes - 1))
        await send_slice(world, a_slice())
        async with world.living(make(world)):
            await asyncio.sleep(1)

    run_virtually(main())
    assert [result.outcome for result in results(world)] == ["finished"]
    assert len(world.reasons()) == 3
    assert all(reason.startswith("does not decode: ") for reason in world.reasons())
    assert len({each.message_id for each in world.stored("dead")}) == 3
    assert unanswered(world) == 0
    assert world.wire[:3] == ["sent unknown"] * 3  # each copy is out before its original is acknowledged
    first_ack, last_copy = world.wire.index("acked tasks.train"), world.wire.index("confirmed unknown")
    assert last_copy < first_ack


def test_a_body_too_large_for_a_copy_is_moved_by_the_broker() -> None:
    world = World("broker.max_message_bytes=65536")

    async def main() -> None:
        await world.ready()
        world.outside.max_message_bytes = 1 << 20
        await world.put("tasks.train", b"x" * 100_000)
        await send_slice(world, a_slice())
        async with world.living(make(world)):
            await asyncio.sleep(1)

    run_virtually(main())
    assert [len(each.body) for each in world.stored("dead")] == [100_000]
    assert [result.outcome for result in results(world)] == ["finished"]
    assert unanswered(world) == 0


def test_a_copy_is_not_lost_with_the_dead_queue() -> None:
    world = World()

    async def main() -> None:
        async with world.living(make(world)):
            await world.outside.delete(world.topology.dead.name)
            await world.put("tasks.train", b"nothing")
            await asyncio.sleep(1)

    run_virtually(main())
    assert len(world.reasons()) == 1


# -- slices that kill


def test_over_the_limit_a_slice_is_poisoned_and_not_run() -> None:
    world = World()
    runner = make(world)
    run_slices(world, runner, returned=4, failed=1)
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts) == ("poisoned", [], 0)
    assert runner.here.ran == runner.apart.ran == []
    assert world.reasons() == ["5 attempts at this slice failed or were lost (limit 5)"]
    assert world.stored("dead")[0].headers["ticket"] == "t1"
    assert unanswered(world) == 0
    assert world.wire[-1] == "acked tasks.train"
    assert {"confirmed task_result", "confirmed task_slice"} < set(world.wire)


def test_what_has_come_back_before_runs_in_a_process_of_its_own() -> None:
    world = World()
    runner = make(world)

    async def main() -> None:
        await send_slice(world, a_slice(task=0))
        world.held_back("tasks.train", 1)
        await send_slice(world, a_slice(task=1))
        async with world.living(runner):
            await asyncio.sleep(1)

    run_virtually(main())
    assert runner.apart.ran == [("t1", 0)]
    assert runner.here.ran == [("t1", 1)]


def test_what_kills_its_process_comes_back_until_the_limit() -> None:
    world = World("broker.delivery_limit=3")

    async def dies(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(0.1)
        raise ChildDied("its process was killed by SIGSEGV", -11)

    runner = make(world, isolated=dies)

    async def main() -> None:
        await send_slice(world, a_slice(task=0))
        world.held_back("tasks.train", 1)
        await send_slice(world, a_slice(task=1))
        async with world.living(runner):
            await asyncio.sleep(5)

    run_virtually(main())
    assert runner.apart.ran == [("t1", 0)] * 2
    poisoned = next(result for result in results(world) if result.task_id == 0)
    assert poisoned.outcome == "poisoned"
    assert "SIGSEGV" in str(poisoned.message)
    assert [result.outcome for result in results(world) if result.task_id == 1] == ["finished"]
    assert world.reasons() == [
        "it killed its process; 3 attempts failed or were lost, last: its process was killed by SIGSEGV"
    ]
    assert unanswered(world) == 0


def test_a_child_that_dies_under_a_void_delivery_does_not_take_the_runner_with_it() -> None:
    world = World()
    tries: list[int] = []

    async def dies_once(task_slice: TaskSlice) -> SliceOutcome:
        tries.append(1)
        await asyncio.sleep(10)
        if len(tries) == 1:
            raise ChildDied("killed", -9)
        return an_outcome(task_slice)

    runner = make(world, isolated=dies_once)

    async def main() -> None:
        await send_slice(world, a_slice())
        world.held_back("tasks.train", 1)
        async with world.living(runner):
            await asyncio.sleep(1)
            world.broker.drop(runner.bus)
            await asyncio.sleep(30)

    run_virtually(main())
    assert len(tries) == 2
    assert [result.outcome for result in results(world)] == ["finished"]


def test_the_wait_for_a_free_process_ends() -> None:
    world = World()
    run_slices(world, make(world, isolated=forever), a_slice(slice_timeout=50.0), returned=1, seconds=300)
    (result,) = results(world)
    assert result.outcome == "failed"
    assert "the wait for one of 2 isolated processes included" in str(result.message)


# -- tickets nobody waits for


@pytest.mark.parametrize(
    ("seq", "listed", "runs"),
    [(10, False, False), (11, False, False), (9, False, True), (10, True, True), (11, True, True)],
)
def test_only_a_beat_that_must_know_the_ticket_can_forget_it(seq: int, listed: bool, runs: bool) -> None:
    world = World()
    runner = make(world)

    async def main() -> None:
        async with world.living(runner):
            await world.beat("explorer", "explorer-0", seq, open=["t1"] if listed else ["other"])
            await send_slice(world, a_slice(opened_beat=10))
            await asyncio.sleep(1)

    run_virtually(main())
    assert runner.here.ran == ([("t1", 0)] if runs else [])
    assert len(results(world)) == int(runs)
    assert world.wire[-1] == "acked tasks.train"
    assert unanswered(world) == 0


def test_another_explorers_beat_forgets_nothing() -> None:
    world = World()
    runner = make(world)

    async def main() -> None:
        async with world.living(runner):
            await world.beat("explorer", "explorer-1", 500, open=[])
            await send_slice(world, a_slice(opened_beat=10))
            await asyncio.sleep(1)

    run_virtually(main())
    assert len(results(world)) == 1


# -- the order that matters


def test_parts_are_confirmed_before_the_result_and_the_result_before_the_ack() -> None:
    world = World("broker.max_message_bytes=65536")

    async def large(task_slice: TaskSlice) -> SliceOutcome:
        world.broker.lose_confirm_once()
        return an_outcome(task_slice, experiences=[experience(run=run, length=6000) for run in range(4)])

    run_slices(world, make(world, large), a_slice(runs=4))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts, result.version_min) == ("finished", [0, 1, 2, 3], 4, (1, 3))
    part = ["sent experience_part", "confirmed experience_part"]
    assert world.wire == [*part * 4, "sent task_result", "confirmed task_result", "acked tasks.train"]
    held = {each.message_id: each for each in parts(world)}  # one is there twice: its confirm was lost
    assert len(parts(world)) == 5
    assert sorted(held) == [f"{result.attempt}-{n}" for n in range(4)]
    assert all(len(each.body) <= 65536 for each in held.values())
    assert [each.headers["part"] for each in held.values()] == [0, 1, 2, 3]
    assert {(each.headers["parts"], each.headers["policy_version"]) for each in held.values()} == {(4, "1.3")}
    runs = [exp.eid.run for each in held.values() for exp in Experience.deserialize_many(each.body)]
    assert runs == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "fields",
    [
        {"experiences": [experience(), experience(run=1, info={"what": object()})]},
        {"experiences": [experience(), experience(run=1, length=100_000)]},
        {"metrics": [{"reward": "high"}, {}]},
    ],
    ids=["info", "size", "metrics"],
)
def test_what_cannot_travel_fails_its_slice_and_leaves_no_part(fields: dict[str, Any]) -> None:
    world = World("broker.max_message_bytes=65536")

    async def unfit(task_slice: TaskSlice) -> SliceOutcome:
        return an_outcome(task_slice, **fields)

    run_slices(world, make(world, unfit))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts) == ("failed", [], 0)
    assert result.message
    assert parts(world) == []
    assert unanswered(world) == 0


def test_results_that_are_too_large_together_travel_in_several_messages() -> None:
    world = World("broker.max_message_bytes=65536", "runner.concurrency=20")

    async def main() -> None:
        async def with_many_metrics(task_slice: TaskSlice) -> SliceOutcome:
            await asyncio.sleep(1)  # all end at once
            return an_outcome(task_slice, metrics=[{f"{n:0100}": 1.0 for n in range(100)} for _ in range(2)])

        for task in range(10):
            await send_slice(world, a_slice(task=task))
        async with world.living(make(world, with_many_metrics)):
            await asyncio.sleep(3)

    run_virtually(main())
    assert sorted((one.task_id, one.outcome) for one in results(world)) == [(task, "finished") for task in range(10)]
    assert len(world.stored("results")) < 10, "those that fit together share a message"
    assert unanswered(world) == 0


def test_a_result_larger_than_a_message_is_a_failure_with_the_reason() -> None:
    world = World("broker.max_message_bytes=65536")

    async def with_too_many_metrics(task_slice: TaskSlice) -> SliceOutcome:
        return an_outcome(task_slice, metrics=[{f"{n:0100}": 1.0 for n in range(1000)}])

    run_slices(world, make(world, with_too_many_metrics), a_slice(runs=1))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts) == ("failed", [], 0)
    assert "broker.max_message_bytes (65536)" in str(result.message)
    assert unanswered(world) == 0


def test_a_message_of_any_length_and_any_characters_travels() -> None:
    world = World()

    async def strange(task_slice: TaskSlice) -> SliceOutcome:
        return SliceOutcome(message="\udcff" + "x" * 20_000_000)

    run_slices(world, make(world, strange))
    (result,) = results(world)
    assert result.outcome == "failed"
    assert len(str(result.message)) == 2000


def test_some_of_the_runs_are_a_partial_outcome() -> None:
    world = World()

    async def half(task_slice: TaskSlice) -> SliceOutcome:
        return an_outcome(task_slice, experiences=[experience()], runs=[0], metrics=[{}], message="one failed")

    run_slices(world, make(world, half))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts, result.message) == ("partial", [0], 1, "one failed")


def test_evaluation_sends_no_parts() -> None:
    world = World()
    run_slices(world, make(world), a_slice(lane="eval", deliver="none"))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts) == ("finished", [0, 1], 0)
    assert (result.version_min, result.version_max) == ((1, 3), (1, 3))
    assert world.wire == ["sent task_result", "confirmed task_result", "acked tasks.eval"]


async def spoken(task_slice: TaskSlice) -> SliceOutcome:
    outcome = an_outcome(task_slice)
    for one in outcome.experiences:
        one.response_text = f"run {one.eid.run} " + "…" * 10_000
    return outcome


@pytest.mark.parametrize("kept", [2**20, 0])
def test_results_of_an_evaluation_carry_its_answers(kept: int) -> None:
    world = World(f"monitor.eval_answers_max_bytes={kept}")

    async def main() -> None:
        await send_slice(world, a_slice(lane="eval", deliver="none"))
        await send_slice(world, a_slice(ticket="t2"))
        async with world.living(make(world, spoken)):
            await asyncio.sleep(1)

    run_virtually(main())
    found = {result.ticket: [answer[:6] for answer in result.answers] for result in results(world)}
    assert found == {"t1": ["run 0 ", "run 1 "] if kept else [], "t2": []}
    assert all(len(answer) <= MOST_ANSWER for result in results(world) for answer in result.answers)


def test_a_result_that_is_too_large_goes_without_its_answers() -> None:
    world, runs = World("broker.max_message_bytes=65536"), MOST_ANSWERS

    run_slices(world, make(world, spoken), a_slice(lane="eval", deliver="none", runs=runs))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.answers) == ("finished", list(range(runs)), [])


def test_nothing_is_acknowledged_when_nobody_keeps_results() -> None:
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice())
        task = asyncio.create_task(make(world, gone).run())
        await asyncio.wait([task])
        assert isinstance(task.exception(), ExceptionGroup)
        assert task.exception().subgroup(RestartRequested) is not None

    async def gone(task_slice: TaskSlice) -> SliceOutcome:
        await world.outside.delete(world.topology.results.name)
        return an_outcome(task_slice)

    run_virtually(main())
    assert unanswered(world) == 1


# -- returned parts


def test_a_returned_part_is_published_again_while_its_queue_exists() -> None:
    world = World()
    queue = world.topology.batch_queue(1, "t1")

    async def main() -> None:
        await send_slice(world, a_slice())
        await world.outside.unbind(queue)
        async with world.living(make(world)):
            await asyncio.sleep(3)
            assert world.wire.count("returned experience_part") > 5
            assert results(world) == []
            await world.outside.declare(queue)
            await asyncio.sleep(1)

    run_virtually(main())
    (result,) = results(world)
    assert (result.outcome, result.parts) == ("finished", 1)
    assert len(parts(world)) == 1


def test_a_part_whose_queue_is_gone_is_late() -> None:
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice())
        await world.outside.delete(world.topology.batch_queue(1, "t1").name)
        async with world.living(make(world)):
            await asyncio.sleep(2)

    run_virtually(main())
    (result,) = results(world)
    assert (result.outcome, result.parts, result.runs) == ("late", 0, [])
    assert world.wire[-2:] == ["confirmed task_result", "acked tasks.train"]
    assert world.count("batch.t1") is None


def test_a_part_whose_queue_is_replaced_is_taken_by_the_new_one() -> None:
    """Its owner deletes a queue that confirms nothing, and declares it anew."""
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice(opened_beat=10))
        queue = world.topology.batch_queue(1, "t1")
        await world.outside.delete(queue.name)
        async with world.living(make(world)):
            await world.beat("explorer", "explorer-0", 11, open=["t1"])
            await asyncio.sleep(0.5)
            await world.outside.declare(queue)
            await asyncio.sleep(2)

    run_virtually(main())
    (result,) = results(world)
    assert (result.outcome, result.parts) == ("finished", 1)
    assert len(parts(world)) == 1


def test_a_part_of_a_ticket_that_is_no_longer_open_is_late() -> None:
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice(opened_beat=10))
        await world.outside.unbind(world.topology.batch_queue(1, "t1"))
        async with world.living(make(world)):
            await world.beat("explorer", "explorer-0", 11, open=["t1"])
            await asyncio.sleep(2)
            assert results(world) == []
            await world.beat("explorer", "explorer-0", 12, open=[])
            await asyncio.sleep(2 * RETURNED_PAUSE)
            assert [result.outcome for result in results(world)] == ["late"]

    run_virtually(main())
    assert unanswered(world) == 0


def test_a_part_is_not_tried_for_longer_than_its_slice_may_take() -> None:
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice(slice_timeout=20.0))
        await world.outside.unbind(world.topology.batch_queue(1, "t1"))
        async with world.living(make(world)):
            await asyncio.sleep(19)
            assert results(world) == []
            await asyncio.sleep(3)

    run_virtually(main())
    assert [result.outcome for result in results(world)] == ["late"]


# -- connections


def test_a_connection_lost_mid_slice_costs_no_second_run() -> None:
    world = World()
    runner = make(world, taking(10))

    async def main() -> None:
        await send_slice(world, a_slice())
        async with world.living(runner):
            await asyncio.sleep(1)
            world.broker.drop(runner.bus, delay=20)  # done in between
            await asyncio.sleep(15)
            assert results(world) == []
            await asyncio.sleep(30)

    run_virtually(main())
    (result,) = results(world)
    assert {each.headers["attempt"] for each in parts(world)} == {result.attempt}
    assert (runner.here.ran, runner.apart.ran) == ([("t1", 0)], [])
    assert world.wire.index("void tasks.train") < world.wire.index("acked tasks.train")
    assert unanswered(world) == 0


def test_duplicates_that_come_while_it_runs_wait_for_it() -> None:
    world = World()
    runner = make(world, taking(10))

    async def main() -> None:
        await send_slice(world, a_slice())
        async with world.living(runner):
            for _ in range(3):
                await asyncio.sleep(1)
                await send_slice(world, a_slice())
            world.broker.drop(runner.bus)  # four come back
            await asyncio.sleep(60)

    run_virtually(main())
    assert len(results(world)) == 1
    assert (runner.here.ran, runner.apart.ran) == ([("t1", 0)], [])
    assert world.wire.count("acked tasks.train") == 4


def test_duplicates_of_one_that_failed_with_its_process_run_one_after_the_other() -> None:
    world = World()
    at_work, most = 0, 0

    async def dies(task_slice: TaskSlice) -> SliceOutcome:
        nonlocal at_work, most
        at_work, most = at_work + 1, max(most, at_work + 1)
        await asyncio.sleep(5)
        at_work -= 1
        raise ChildDied("killed", -9)

    run_slices(world, make(world, isolated=dies), *(a_slice() for _ in range(3)), returned=2, seconds=200)
    assert most == 1
    assert [result.outcome for result in results(world)] == ["poisoned"]


def test_an_acknowledgement_lost_on_its_way_costs_no_second_run() -> None:
    world = World()
    runner = make(world)

    async def main() -> None:
        async with world.living(runner):
            await send_slice(world, a_slice())
            await asyncio.sleep(1)
            await send_slice(world, a_slice())  # what the broker does when it never saw the ack
            await asyncio.sleep(1)

    run_virtually(main())
    assert runner.here.ran == [("t1", 0)]
    assert len(results(world)) == 1
    assert unanswered(world) == 0


def test_it_does_not_remember_for_ever() -> None:
    world = World()
    runner = make(world, remembered=2)

    async def main() -> None:
        async with world.living(runner):
            for task in (0, 1, 2, 2, 0):
                await send_slice(world, a_slice(task=task))
                await asyncio.sleep(0.1)

    run_virtually(main())
    assert [task for _, task in runner.here.ran] == [0, 1, 2, 0]


def test_while_the_broker_blocks_nothing_is_reported_and_nothing_lost() -> None:
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice())
        world.broker.block()
        runner = make(world)
        async with world.living(runner):
            await asyncio.sleep(100)
            assert results(world) == []
            world.broker.unblock()
            await asyncio.sleep(1)

    run_virtually(main())
    assert [result.outcome for result in results(world)] == ["finished"]


def test_another_runner_does_what_a_killed_one_held() -> None:
    world = World()

    second = make(world, name="runner-1")

    async def main() -> None:
        await send_slice(world, a_slice())
        first = asyncio.create_task(make(world, forever).run())
        await asyncio.sleep(1)
        await kill(first)
        async with world.living(second):
            await asyncio.sleep(1)

    run_virtually(main())
    assert [result.runner for result in results(world)] == ["runner-1"]
    assert second.apart.ran == [("t1", 0)]  # it has come back once


@pytest.mark.parametrize("after", range(1, 6))
def test_killed_after_any_step_what_counts_is_complete(after: int) -> None:
    """Part sent, part confirmed, result sent, result confirmed, acknowledged."""
    world = World()

    async def main() -> None:
        await send_slice(world, a_slice())
        first = asyncio.create_task(make(world).run())
        world.kill_after = (after, first)
        await asyncio.wait([first], timeout=10)
        assert first.cancelled()
        async with world.living(make(world, name="runner-1")):
            await asyncio.sleep(1)

    run_virtually(main())
    decisive = results(world)[0]
    assert (decisive.outcome, decisive.parts) == ("finished", 1)
    assert decisive.attempt in {each.headers["attempt"] for each in parts(world)}
    assert len({result.attempt for result in results(world)}) == len(results(world)) <= 2
    assert unanswered(world) == 0


# -- the end


def test_draining_finishes_what_it_holds_and_takes_nothing_new() -> None:
    world = World()
    runner = make(world, taking(10))

    async def main() -> None:
        await send_slice(world, a_slice(task=0))
        async with world.living(runner):
            await asyncio.sleep(1)
            runner.drain()
            await asyncio.sleep(1)
            await send_slice(world, a_slice(task=1))
        assert 10 < asyncio.get_running_loop().time() < 12

    run_virtually(main())
    assert [result.task_id for result in results(world)] == [0]
    assert unanswered(world) == 1


def test_draining_gives_back_what_takes_too_long() -> None:
    world = World("runner.drain_timeout=5")

    async def main() -> None:
        await send_slice(world, a_slice())
        async with world.living(make(world, forever)):
            await asyncio.sleep(1)
        assert 5 < asyncio.get_running_loop().time() < 8
        assert unanswered(world) == 1
        async with world.living(make(world, name="runner-1")):
            await asyncio.sleep(1)

    run_virtually(main())
    assert [result.runner for result in results(world)] == ["runner-1"]


def test_the_end_of_the_run_ends_it() -> None:
    world = World()
    runner = make(world)

    async def main() -> None:
        await world.ready()
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(1)
        await world.beat("explorer", "explorer-0", open=[], finished=False)
        await asyncio.sleep(60)
        assert not task.done()
        await world.beat("explorer", "explorer-0", open=[], finished=True)
        await asyncio.sleep(1)
        assert task.done()

    run_virtually(main())
    assert runner.state == "finished"


# -- engines


class OneExperience(Workflow):
    """Asks nobody."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        return [experience()]


def test_without_an_engine_it_waits_and_that_is_no_failure() -> None:
    world = World()
    runner = Runner(world.config, bus=world.bus(), topology=world.topology, agent_id="runner-0")
    engine = {"id": "e", "url": "http://127.0.0.1:9", "name": "m", "role": "rollout", "version": [1, 0]}

    async def main() -> None:
        body = TaskBody(workflow=f"{__name__}.OneExperience")
        await send_slice(world, a_slice().model_copy(update={"task": body, "max_retry_times": 0}))
        async with world.living(runner):
            await asyncio.sleep(200)
            assert results(world) == []
            await world.beat("engine", "e", lease=30.0, **engine)
            await asyncio.sleep(10)

    run_virtually(main())
    (result,) = results(world)
    assert (result.outcome, result.runs) == ("finished", [0, 1])


def test_it_asks_the_least_loaded_living_engine() -> None:
    world = World()
    runner = make(world)

    def engine(name: str, **more: Any) -> dict[str, Any]:
        return {"id": name, "url": "u", "name": "m", "role": "rollout", "version": [1, 0], **more}

    async def main() -> None:
        await send_slice(world, a_slice())
        async with world.living(runner):
            engines = runner.here.models
            with pytest.raises(EngineLost):
                engines()
            await world.beat("engine", "empty", **engine("empty", load=0, version=None))
            assert engines().id == "empty"
            await world.beat("engine", "busy", **engine("busy", load=9))
            await world.beat("engine", "judge", **engine("judge", load=0, role="auxiliary"))
            await world.beat("engine", "odd", load=0, role="rollout")
            assert engines().id == "busy"
            await world.beat("engine", "short", lease=5.0, **engine("short", load=1))
            assert {engines().id for _ in range(5)} == {"short"}
            await world.beat("engine", "twin", lease=5.0, **engine("twin", load=6))
            assert sorted(engines().id for _ in range(4)) == ["short", "short", "twin", "twin"]
            await asyncio.sleep(6)
            assert engines().id == "busy"
            await world.beat("engine", "busy", state="gone", **engine("busy", load=9))
            assert engines().id == "empty"

    run_virtually(main())


def test_its_beat_says_what_it_does() -> None:
    world = World()
    runner = make(world, taking(10))

    async def main() -> None:
        await send_slice(world, a_slice())
        async with world.living(runner):
            seconds = pytest.approx(0.2, abs=0.2)
            detail = runner.detail()
            assert (detail.running, detail.slices, detail.done) == (1, [("t1", 0, 0, seconds)], 0)
            assert runner.state == "working"
            await asyncio.sleep(11)
            detail = runner.detail()
            slots = runner.config.runner.concurrency + runner.config.runner.eval_slots
            usual = detail.usual_seconds
            assert usual == pytest.approx(10.0, abs=0.2)
            expected = RunnerStatus(holds={}, done=1, grouped_slices=True, slots=slots, usual_seconds=usual)
            assert (runner.state, detail) == ("idle", expected)
            await world.outside.publish("", world.topology.tasks_train.name, envelope(a_slice(task=1)))
            await asyncio.sleep(1)
            runner.drain()
            await asyncio.sleep(1)
            assert runner.state == "draining"

    run_virtually(main())
    assert runner.state == "gone"


def test_the_beat_names_the_oldest_slices_in_hand() -> None:
    world = World("runner.concurrency=20")
    runner = make(world, taking(10))

    async def main() -> None:
        for task in range(18):
            await send_slice(world, a_slice(task=task, run_base=4))
        async with world.living(runner):
            await asyncio.sleep(5)
            detail = runner.detail()
            assert (detail.running, len(detail.slices)) == (18, 4)
            assert [entry[:3] for entry in detail.slices] == [("t1", task, 4) for task in range(4)]
            assert all(5.0 <= entry[3] < 6.0 for entry in detail.slices)

    run_virtually(main())
    assert runner.detail().slices == []


def test_a_result_that_cannot_travel_is_a_failure_and_its_neighbours_arrive() -> None:
    world = World("runner.concurrency=20")

    async def with_odd_runs(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1)  # all end at once
        outcome = an_outcome(task_slice)
        return dataclasses.replace(outcome, runs=[10**30]) if task_slice.task_id == 3 else outcome

    run_slices(world, make(world, with_odd_runs), *(a_slice(task=task) for task in range(12)), seconds=3)
    outcomes = {one.task_id: one for one in results(world)}
    assert [task for task in range(12) if outcomes[task].outcome == "failed"] == [3]
    assert {outcomes[task].outcome for task in range(12)} == {"finished", "failed"}
    assert "runs.0: an integer of 100 bits" in str(outcomes[3].message)
    assert unanswered(world) == 0
