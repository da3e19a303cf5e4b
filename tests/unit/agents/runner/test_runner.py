"""The runner's side of docs/protocol.md, on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from tests.unit.agents.runner.harness import forever, lived, make, parts, results, suspected, taking, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, experience, kill, send_slice
from trinity_agents.runner.agent import Runner
from trinity_agents.runner.process_pool import ChildDied
from trinity_mq.bus import Binding, Queue
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import Experience
from trinity_mq.messages import RunnerStatus, TaskBody, TaskSlice
from trinity_mq.messages.tasks import MOST_ANSWER, MOST_ANSWERS
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.testing.virtual_time import VirtualTimeLoop
from trinity_mq.workflows import Workflow

LOOP = VirtualTimeLoop

# -- what comes


async def test_a_body_that_does_not_decode_is_parked_and_the_others_go_on() -> None:
    world = World()
    await world.ready()
    await world.put("tasks.train", b"\xc1 no msgpack")
    await world.put("tasks.train", b"{}", content_type="application/json")
    await world.put("tasks.train", b"x" * (world.config.broker.max_message_bytes - 1))
    await lived(world, make(world), a_slice())
    assert [result.outcome for result in results(world)] == ["finished"]
    assert len(world.reasons()) == 3
    assert all(reason.startswith("does not decode: ") for reason in world.reasons())
    assert len({each.message_id for each in world.stored("dead")}) == 3
    assert unanswered(world) == 0
    assert world.wire[:3] == ["sent unknown"] * 3  # each copy is out before its original is acknowledged
    first_ack, last_copy = world.wire.index("acked tasks.train"), world.wire.index("confirmed unknown")
    assert last_copy < first_ack


async def test_a_body_too_large_for_a_copy_is_moved_by_the_broker() -> None:
    world = World("broker.max_message_bytes=65536")
    await world.ready()
    world.outside.max_message_bytes = 1 << 20
    await world.put("tasks.train", b"x" * 100_000)
    await lived(world, make(world), a_slice())
    assert [len(each.body) for each in world.stored("dead")] == [100_000]
    assert [result.outcome for result in results(world)] == ["finished"]
    assert unanswered(world) == 0


async def test_a_copy_is_not_lost_with_the_dead_queue() -> None:
    world = World()
    async with world.living(make(world)):
        await world.outside.delete(world.topology.dead.name)
        await world.put("tasks.train", b"nothing")
        await asyncio.sleep(1)
    assert len(world.reasons()) == 1


# -- slices that kill


async def test_what_kills_its_process_comes_back_until_the_limit() -> None:
    world = World("broker.delivery_limit=3")

    async def dies(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(0.1)
        raise ChildDied("its process was killed by SIGSEGV", -11)

    runner = make(world, isolated=dies)
    await suspected(world, a_slice(task=0))
    await lived(world, runner, a_slice(task=1), seconds=5)
    assert runner.apart.ran == [("t1", 0)] * 2, "what has come back runs in a process of its own"
    assert runner.here.ran == [("t1", 1)]
    outcomes = {result.task_id: result for result in results(world)}
    assert (outcomes[0].outcome, outcomes[1].outcome) == ("poisoned", "finished")
    assert "SIGSEGV" in str(outcomes[0].message)
    assert world.reasons() == [
        "it killed its process; 3 attempts failed or were lost, last: its process was killed by SIGSEGV"
    ]
    assert unanswered(world) == 0


async def test_a_child_that_dies_under_a_void_delivery_does_not_take_the_runner_with_it() -> None:
    world = World()
    tries: list[int] = []

    async def dies_once(task_slice: TaskSlice) -> SliceOutcome:
        tries.append(1)
        await asyncio.sleep(10)
        if len(tries) == 1:
            raise ChildDied("killed", -9)
        return an_outcome(task_slice)

    runner = make(world, isolated=dies_once)
    await suspected(world, a_slice())
    async with world.living(runner):
        await asyncio.sleep(1)
        world.broker.drop(runner.bus)
        await asyncio.sleep(30)
    assert len(tries) == 2
    assert [result.outcome for result in results(world)] == ["finished"]


async def test_the_wait_for_a_free_process_ends() -> None:
    world = World()
    await suspected(world, a_slice(slice_timeout=50.0))
    await lived(world, make(world, isolated=forever), seconds=300)
    (result,) = results(world)
    assert result.outcome == "failed"
    assert "the wait for a free process included" in str(result.message)


# -- tickets nobody waits for


@pytest.mark.parametrize(
    ("explorer", "seq", "listed", "runs"),
    [
        ("explorer-0", 10, False, False),
        ("explorer-0", 11, False, False),
        ("explorer-0", 9, False, True),
        ("explorer-0", 10, True, True),
        ("explorer-0", 11, True, True),
        ("explorer-1", 500, False, True),
    ],
)
async def test_only_a_beat_that_must_know_the_ticket_can_forget_it(
    explorer: str, seq: int, listed: bool, runs: bool
) -> None:
    world = World()
    runner = make(world)
    async with world.living(runner):
        await world.beat("explorer", explorer, seq, open=["t1"] if listed else ["other"])
        await send_slice(world, a_slice(opened_beat=10))
        await asyncio.sleep(1)
    assert runner.here.ran == ([("t1", 0)] if runs else [])
    assert len(results(world)) == int(runs)
    assert world.wire[-1] == "acked tasks.train"
    assert unanswered(world) == 0


# -- the order that matters


async def test_parts_are_confirmed_before_the_result_and_the_result_before_the_ack() -> None:
    world = World("broker.max_message_bytes=65536")

    async def large(task_slice: TaskSlice) -> SliceOutcome:
        world.broker.lose_confirm_once()
        return an_outcome(task_slice, experiences=[experience(run=run, length=6000) for run in range(4)])

    await lived(world, make(world, large), a_slice(runs=4))
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


NOTHING = {"experiences": [], "runs": [], "metrics": []}


@pytest.mark.parametrize(
    ("fields", "wanted", "said"),
    [
        pytest.param(
            {"experiences": [experience()], "runs": [0], "metrics": [{}], "message": "one failed"},
            ("partial", [0], 1, 1),
            "one failed",
            id="some of the runs",
        ),
        pytest.param(
            {"experiences": [experience(), experience(run=1, info={"what": object()})]},
            ("failed", [], 0, 0),
            "info",
            id="info",
        ),
        pytest.param(
            {"experiences": [experience(), experience(run=1, length=100_000)]}, ("failed", [], 0, 0), "65536", id="size"
        ),
        pytest.param({"metrics": [{"reward": "high"}, {}]}, ("failed", [], 0, 0), "metrics", id="metrics"),
        pytest.param(
            {"metrics": [{f"{n:0100}": 1.0 for n in range(1000)}, {}]},
            ("failed", [], 0, 1),
            "broker.max_message_bytes (65536)",
            id="a result larger than a message",
        ),
        pytest.param(
            {**NOTHING, "message": "\udcff" + "x" * 20_000_000}, ("failed", [], 0, 0), "x" * 1900, id="a long message"
        ),
    ],
)
async def test_what_a_result_says_and_what_cannot_travel_fails_its_slice(
    fields: dict[str, Any], wanted: tuple[str, list[int], int, int], said: str
) -> None:
    world = World("broker.max_message_bytes=65536")

    async def unfit(task_slice: TaskSlice) -> SliceOutcome:
        return an_outcome(task_slice, **fields)

    await lived(world, make(world, unfit), a_slice())
    (result,) = results(world)
    assert (result.outcome, result.runs, result.parts, len(parts(world))) == wanted
    assert said in str(result.message)
    assert len(str(result.message)) <= 2000
    assert unanswered(world) == 0


async def test_results_that_are_too_large_together_travel_in_several_messages() -> None:
    world = World("broker.max_message_bytes=65536", "runner.concurrency=20")

    async def with_many_metrics(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1)  # all end at once
        return an_outcome(task_slice, metrics=[{f"{n:0100}": 1.0 for n in range(100)} for _ in range(2)])

    await lived(world, make(world, with_many_metrics), *(a_slice(task=task) for task in range(10)), seconds=3)
    assert sorted((one.task_id, one.outcome) for one in results(world)) == [(task, "finished") for task in range(10)]
    assert len(world.stored("results")) < 10, "those that fit together share a message"
    assert unanswered(world) == 0


async def test_evaluation_sends_no_parts() -> None:
    world = World()
    await lived(world, make(world), a_slice(lane="eval", deliver="none"))
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
async def test_results_of_an_evaluation_carry_its_answers(kept: int) -> None:
    world = World(f"monitor.eval_answers_max_bytes={kept}")
    await lived(world, make(world, spoken), a_slice(lane="eval", deliver="none"), a_slice(ticket="t2"))
    found = {result.ticket: [answer[:6] for answer in result.answers] for result in results(world)}
    assert found == {"t1": ["run 0 ", "run 1 "] if kept else [], "t2": []}
    assert all(len(answer) <= MOST_ANSWER for result in results(world) for answer in result.answers)


async def test_a_result_that_is_too_large_goes_without_its_answers() -> None:
    world, runs = World("broker.max_message_bytes=65536"), MOST_ANSWERS
    await lived(world, make(world, spoken), a_slice(lane="eval", deliver="none", runs=runs))
    (result,) = results(world)
    assert (result.outcome, result.runs, result.answers) == ("finished", list(range(runs)), [])


async def test_nothing_is_acknowledged_when_nobody_keeps_results() -> None:
    world = World()

    async def gone(task_slice: TaskSlice) -> SliceOutcome:
        await world.outside.delete(world.topology.results.name)
        return an_outcome(task_slice)

    await send_slice(world, a_slice())
    task = asyncio.create_task(make(world, gone).run())
    await asyncio.wait([task])
    assert isinstance(task.exception(), ExceptionGroup)
    assert task.exception().subgroup(RestartRequested) is not None
    assert unanswered(world) == 1


# -- returned parts


@pytest.mark.parametrize("then", ["declared again", "replaced", "no longer open", "out of time"])
async def test_a_returned_part_is_published_again_while_its_ticket_is_open(then: str) -> None:
    """The owner of a queue that confirms nothing deletes it, and declares it anew."""
    world = World()
    queue = world.topology.batch_queue(1, "t1")
    await send_slice(world, a_slice(opened_beat=10, slice_timeout=20.0))
    await (world.outside.delete(queue.name) if then == "replaced" else world.outside.unbind(queue))
    async with world.living(make(world)):
        await world.beat("explorer", "explorer-0", 11, lease=100.0, open=["t1"])
        await asyncio.sleep({"replaced": 0.5, "out of time": 19}.get(then, 3))
        assert world.wire.count("returned experience_part") > (0 if then == "replaced" else 5)
        assert results(world) == []
        if then in {"declared again", "replaced"}:
            await world.outside.declare(queue)
        elif then == "no longer open":
            await world.beat("explorer", "explorer-0", 12, open=[])
        await asyncio.sleep(3)
    (result,) = results(world)
    is_stored = then in {"declared again", "replaced"}
    assert (result.outcome, result.parts) == (("finished", 1) if is_stored else ("late", 0))
    assert len(parts(world)) == int(is_stored)
    assert unanswered(world) == 0


@pytest.mark.parametrize("slices", [1, 4])
async def test_a_part_whose_queue_is_gone_is_late(slices: int) -> None:
    world = World()
    for task in range(slices):
        await send_slice(world, a_slice(task=task))
    await world.outside.delete(world.topology.batch_queue(1, "t1").name)
    await lived(world, make(world, taking(0.5)), seconds=3)
    assert [(each.outcome, each.parts, each.runs) for each in results(world)] == [("late", 0, [])] * slices
    assert world.wire[-1] == "acked tasks.train"
    assert world.wire.index("acked tasks.train") > world.wire.index("sent task_result" + "s" * (slices > 1))
    assert world.count("batch.t1") is None
    assert unanswered(world) == 0


# -- connections


@pytest.mark.parametrize("seconds", [20, 100])
async def test_a_connection_lost_mid_slice_costs_no_second_run(seconds: float) -> None:
    """What is done while the broker is away goes out afterwards, once, under the attempt it was done in."""
    world = World()
    runner = make(world, taking(10))
    await send_slice(world, a_slice(opened_beat=10))
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 11, open=["t1"])
        await asyncio.sleep(1)
        world.broker.drop(runner.bus, delay=seconds)  # done in between
        await asyncio.sleep(seconds - 1)
        assert results(world) == []
        await asyncio.sleep(60)
    (result,) = results(world)
    assert {each.headers["attempt"] for each in parts(world)} == {result.attempt}
    assert (runner.here.ran, runner.apart.ran) == ([("t1", 0)], [])
    assert world.wire.index("void tasks.train") < world.wire.index("acked tasks.train")
    assert unanswered(world) == 0


async def test_duplicates_that_come_while_it_runs_wait_for_it() -> None:
    world = World()
    runner = make(world, taking(10))
    await send_slice(world, a_slice())
    async with world.living(runner):
        for _ in range(3):
            await asyncio.sleep(1)
            await send_slice(world, a_slice())
        world.broker.drop(runner.bus)  # four come back
        await asyncio.sleep(60)
    assert len(results(world)) == 1
    assert (runner.here.ran, runner.apart.ran) == ([("t1", 0)], [])
    assert world.wire.count("acked tasks.train") == 4


async def test_duplicates_of_one_that_failed_with_its_process_run_one_after_the_other() -> None:
    world = World()
    at_work, most = 0, 0

    async def dies(task_slice: TaskSlice) -> SliceOutcome:
        nonlocal at_work, most
        at_work, most = at_work + 1, max(most, at_work + 1)
        await asyncio.sleep(5)
        at_work -= 1
        raise ChildDied("killed", -9)

    await suspected(world, *(a_slice() for _ in range(3)), returned=2)
    await lived(world, make(world, isolated=dies), seconds=200)
    assert most == 1
    assert [result.outcome for result in results(world)] == ["poisoned"]


async def test_an_acknowledgement_lost_on_its_way_costs_no_second_run() -> None:
    world = World()
    runner = make(world)
    async with world.living(runner):
        await send_slice(world, a_slice())
        await asyncio.sleep(1)
        await send_slice(world, a_slice())  # what the broker does when it never saw the ack
        await asyncio.sleep(1)
    assert runner.here.ran == [("t1", 0)]
    assert len(results(world)) == 1
    assert unanswered(world) == 0


async def test_it_does_not_remember_for_ever() -> None:
    world = World()
    runner = make(world, remembered=2)
    async with world.living(runner):
        for task in (0, 1, 2, 2, 0):
            await send_slice(world, a_slice(task=task))
            await asyncio.sleep(0.1)
    assert [task for _, task in runner.here.ran] == [0, 1, 2, 0]


@pytest.mark.parametrize("after", range(1, 6))
async def test_killed_after_any_step_what_counts_is_complete(after: int) -> None:
    """Part sent, part confirmed, result sent, result confirmed, acknowledged."""
    world = World()
    await send_slice(world, a_slice())
    first = asyncio.create_task(make(world).run())
    world.kill_after = (after, first)
    await asyncio.wait([first], timeout=10)
    assert first.cancelled()
    await lived(world, make(world, name="runner-1"))
    decisive = results(world)[0]
    assert (decisive.outcome, decisive.parts) == ("finished", 1)
    assert decisive.attempt in {each.headers["attempt"] for each in parts(world)}
    assert len({result.attempt for result in results(world)}) == len(results(world)) <= 2
    assert unanswered(world) == 0


# -- the end


async def test_the_end_of_the_run_ends_it() -> None:
    world = World()
    runner = make(world)
    await world.ready()
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(1)
    await world.beat("explorer", "explorer-0", open=[], finished=False)
    await asyncio.sleep(60)
    assert not task.done()
    await world.beat("explorer", "explorer-0", open=[], finished=True)
    await asyncio.sleep(1)
    assert task.done()
    assert runner.state == "finished"


# -- engines


class OneExperience(Workflow):
    """Asks nobody."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        return [experience()]


async def test_without_an_engine_it_waits_and_that_is_no_failure() -> None:
    world = World()
    runner = Runner(world.config, bus=world.bus(), topology=world.topology, agent_id="runner-0")
    engine = {"id": "e", "url": "http://127.0.0.1:9", "name": "m", "role": "rollout", "version": [1, 0]}
    body = TaskBody(workflow=f"{__name__}.OneExperience")
    await send_slice(world, a_slice().model_copy(update={"task": body, "max_retry_times": 0}))
    async with world.living(runner):
        await asyncio.sleep(200)
        assert results(world) == []
        await world.beat("engine", "e", lease=30.0, **engine)
        await asyncio.sleep(10)
    (result,) = results(world)
    assert (result.outcome, result.runs) == ("finished", [0, 1])


async def test_its_beat_says_what_it_does() -> None:
    world = World()
    runner = make(world, taking(10))
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
    assert runner.state == "gone"


async def test_the_beat_names_the_oldest_slices_in_hand() -> None:
    world = World("runner.concurrency=20")
    runner = make(world, taking(10))
    for task in range(18):
        await send_slice(world, a_slice(task=task, run_base=4))
    async with world.living(runner):
        await asyncio.sleep(5)
        detail = runner.detail()
        assert (detail.running, len(detail.slices)) == (18, 4)
        assert [entry[:3] for entry in detail.slices] == [("t1", task, 4) for task in range(4)]
        assert all(5.0 <= entry[3] < 6.0 for entry in detail.slices)
    assert runner.detail().slices == []


async def test_a_result_that_cannot_travel_is_a_failure_and_its_neighbours_arrive() -> None:
    world = World("runner.concurrency=20")

    async def with_odd_runs(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(1)  # all end at once
        outcome = an_outcome(task_slice)
        return dataclasses.replace(outcome, runs=[10**30]) if task_slice.task_id == 3 else outcome

    await lived(world, make(world, with_odd_runs), *(a_slice(task=task) for task in range(12)), seconds=3)
    outcomes = {one.task_id: one for one in results(world)}
    assert {task: outcomes[task].outcome for task in range(12)} == {
        task: "failed" if task == 3 else "finished" for task in range(12)
    }
    assert "runs.0: an integer of 100 bits" in str(outcomes[3].message)
    assert unanswered(world) == 0


# -- attempts and limits


async def test_nothing_is_delivered_that_is_not_started_and_a_free_slot_takes_the_next() -> None:
    """What a runner takes down with it counts for all that was delivered, so that is no more than it works on."""
    world = World("runner.concurrency=2")

    async def slow(task_slice: TaskSlice) -> SliceOutcome:
        await asyncio.sleep(10 * (1 + task_slice.task_id))
        return an_outcome(task_slice)

    runner = make(world, slow)
    for task in range(5):
        await send_slice(world, a_slice(task=task))
    running = asyncio.create_task(runner.run())
    await asyncio.sleep(5)
    assert len(runner.here.ran) == 2
    assert world.count("tasks.train") == 3
    await asyncio.sleep(7)
    assert [task for _, task in runner.here.ran] == [0, 1, 2]
    await kill(running)
    assert sorted(each.deliveries_before for each in world.stored("tasks.train")) == [0, 0, 1, 1]


@pytest.mark.parametrize(("returns", "failed", "outcome"), [(3, 1, "finished"), (4, 1, "poisoned"), (9, 0, "finished")])
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
