"""The operator's side of docs/protocol.md, on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from structlog.testing import capture_logs

from tests.unit.agents.world import World, a_slice, experience, kill
from tests.virtual import wrap_future
from trinity_agents.operator.agent import Operator
from trinity_mq.bus import Envelope, Queue
from trinity_mq.experience import Experience
from trinity_mq.messages import BatchClosed, BatchReady, Mark
from trinity_mq.messages.batches import Accepted, Wanted
from trinity_mq.operators import ExperienceOperatorV1, ThreadedOperator
from trinity_mq.operators.base import Processed
from trinity_mq.runtime.deliveries import CrashLog, envelope
from trinity_mq.runtime.errors import RestartRequested, first_leaf
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.testing.virtual_time import VirtualTimeLoop
from trinity_mq.transport.experience_parts import part_message

LOOP = VirtualTimeLoop

THIS = __name__
QUEUE = "batch.t1"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    Scripted.fails, Scripted.seconds, Scripted.tries, Scripted.grows = 0, 0.0, [], 0
    Scripted.words = "not now"
    Choosy.repaired, Choosy.seconds, Choosy.seen = False, 0.0, []
    with capture_logs():  # rendering a traceback for the console takes a second
        yield


class Scripted(ExperienceOperatorV1):
    """Fails so often, takes its time."""

    fails = 0
    seconds = 0.0
    grows = 0
    words = "not now"
    tries: list[float] = []  # noqa: RUF012  reset before each test

    async def process(self, exps: list[Experience]) -> Processed:
        loop = asyncio.get_running_loop()
        self.tries.append(loop.time())
        await asyncio.sleep(self.seconds)
        if len(self.tries) <= self.fails:
            raise ArithmeticError(self.words)
        for each in exps if self.grows else ():
            each.info["blob"] = b"x" * self.grows
        return exps, {"seen": len(exps)}


def make_world(*overrides: str) -> World:
    chain = f'operator.operators=[{{"name": "{THIS}.Scripted"}}]'
    return World(chain, "algorithm.min_group_runs=1", "explorer.operator_deadline=60", *overrides)


def make(world: World, name: str = "operator-0", **how: Any) -> Operator:
    return Operator(world.config, bus=world.bus(), topology=world.topology, agent_id=name, **how)


def manifest(*accepted: tuple[str, int], **fields: Any) -> BatchClosed:
    listed = [
        Accepted(task_id=task, run_base=0, attempt=attempt, runs=[0], parts=parts)
        for task, (attempt, parts) in enumerate(accepted)
    ]
    return BatchClosed(**{"batch": 1, "ticket": "t1", "accepted": listed, "metrics": {"rollout/x": 2.0}, **fields})


async def open_batch(world: World) -> None:
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, "t1"))


async def send(
    world: World, attempt: str, part: int = 0, *, run: int = 0, body: bytes | None = None, length: int = 4
) -> None:
    content = Experience.serialize_many([experience(run=run, length=length)]) if body is None else body
    mail = part_message(a_slice(), attempt, part, 1, content)
    key = world.topology.batch_routing_key(1, "t1")
    assert await world.outside.publish(world.topology.exchange("experiences"), key, mail)


async def announce(world: World, closed: BatchClosed) -> None:
    mail = envelope(closed, message_id=f"closed-{closed.ticket}")
    await world.outside.publish(world.topology.exchange("batches"), "closed", mail)


async def close(world: World, closed: BatchClosed, deliveries: int = 0, failed: int = 0) -> None:
    await world.outside.unbind(world.topology.batch_queue(1, "t1"))
    await announce(world, closed)
    if deliveries:
        world.held_back("closed", deliveries, failed=failed)


async def batch_of(
    world: World, *attempts: str, missing: str = "", deliveries: int = 0, failed: int = 0, **fields: Any
) -> None:
    """One part an attempt, closed; parts of the ``missing`` ones are listed only."""
    await open_batch(world)
    for run, attempt in enumerate(attempts):
        await send(world, attempt, run=run)
    listed = manifest(*((attempt, 1) for attempt in (*attempts, *missing)), **fields)
    await close(world, listed, deliveries, failed)


async def send_late(world: World, attempt: str, part: int = 0, **how: Any) -> None:
    """Send a part after its batch was closed."""
    await world.outside.declare(world.topology.batch_queue(1, "t1"))
    await send(world, attempt, part, **how)


def ready(world: World) -> list[BatchReady]:
    return [each for each in world.stream("ready") if isinstance(each, BatchReady)]


async def serve(world: World, seconds: float = 3.0, *operators: Operator) -> None:
    """Have operators, or one, live for some seconds."""
    async with world.living(*(operators or [make(world)])):
        await asyncio.sleep(seconds)


def decision(world: World) -> BatchReady:
    """Return the only BatchReady."""
    (decided,) = ready(world)
    return decided


def chunks(world: World, op: str) -> list[Any]:
    found = {
        each.headers["n"]: each
        for each in world.stored("ready")
        if each.headers.get("op") == op and "n" in each.headers
    }
    return [found[n] for n in sorted(found)]


def runs_of(world: World, op: str) -> list[int]:
    return [exp.eid.run for chunk in chunks(world, op) for exp in Experience.deserialize_many(chunk.body)]


def complete(world: World, decided: BatchReady) -> bool:
    """All of a set lies on the stream before its BatchReady."""
    stored = world.stored("ready")
    place = next(n for n, each in enumerate(stored) if each.message_id == f"ready-{decided.ticket}-{decided.op}")
    before = {each.headers["n"] for each in stored[:place] if each.headers.get("op") == decided.op}
    return before == set(range(decided.chunks))


# -- the way it should go


async def test_chunks_are_confirmed_before_the_ready_and_that_before_the_ack_and_the_queue_lives_a_second_more() -> (
    None
):
    world = make_world("broker.max_message_bytes=65536")
    Scripted.grows = 40_000
    await batch_of(world, "a", "b", "c")
    await serve(world)
    decided = decision(world)
    assert (decided.state, decided.chunks, decided.experiences) == ("ready", 3, 3)
    assert runs_of(world, decided.op) == [0, 1, 2]
    assert decided.metrics["rollout/x"] == 2.0
    assert decided.metrics["experience_pipeline/0_Scripted/seen"] == 3.0
    sent, confirmed = ["sent experience_chunk"] * 3, ["confirmed experience_chunk"] * 3
    rest = ["sent batch_ready", "confirmed batch_ready", "acked closed", f"deleted {QUEUE}"]
    assert world.wire == [*sent, *confirmed, *rest]
    assert world.times[-1] - world.times[-2] >= 1.0
    assert world.count(QUEUE) is None
    assert world.reasons() == []


async def test_a_lost_confirm_of_a_chunk_delays_the_ready() -> None:
    world = make_world()
    await batch_of(world, "a")
    world.loses_confirm_of = "experience_chunk"
    await serve(world)
    kinds = [each.headers["kind"] for each in world.stored("ready")]
    assert kinds == ["experience_chunk", "experience_chunk", "batch_ready"]


async def test_it_waits_for_every_listed_part_and_drops_what_is_not_listed() -> None:
    world = make_world()
    await open_batch(world)
    key = world.topology.batch_routing_key(1, "t1")  # a mark of the queue's owner
    assert await world.outside.publish(world.topology.exchange("experiences"), key, envelope(Mark(nonce="x")))
    await send(world, "loser", 0, run=9)
    await send(world, "a", 0, run=0)
    await send(world, "a", 0, run=0)  # its confirm was lost
    await send(world, "a", 2, run=8)  # over what is listed
    await close(world, manifest(("a", 2), ("b", 1)))
    async with world.living(make(world)):
        await asyncio.sleep(20)
        await send_late(world, "b", 0, run=2)
        await asyncio.sleep(20)
        assert world.stream("ready") == []
        await send(world, "a", 1, run=1)
        await asyncio.sleep(3)
    decided = decision(world)
    assert decided.experiences == 3
    assert runs_of(world, decided.op) == [0, 1, 2]  # in the manifest's order, not that of arrival
    assert world.reasons() == []


async def test_a_batch_without_experiences_is_empty() -> None:
    world = make_world()
    await open_batch(world)
    await close(world, manifest(metrics={"rollout/x": 1.0}))
    await serve(world)
    decided = decision(world)
    assert (decided.state, decided.chunks, decided.metrics["rollout/x"]) == ("empty", 0, 1.0)
    assert str(decided.reason).startswith("no slice gave an experience")
    assert Scripted.tries == []
    assert (world.count("closed"), world.count(QUEUE)) == (0, None)


MINE = Queue(name="amq.gen-mine", kind="exclusive")


async def test_submitters_get_the_parts_they_wanted_and_no_other_queue_than_a_reply_queue_does() -> None:
    world = make_world()
    await open_batch(world)
    others = [world.topology.dead.name, world.topology.closed.name, world.topology.ready.name, "tmq.other.dead"]
    await world.outside.declare(MINE, Queue(name=others[-1]))
    for part in range(2):
        await send(world, "a", part, run=part)
    await send(world, "b", 0, run=5)
    wanted = [
        Wanted(task_id=0, reply_to=MINE.name, correlation_id="c7"),
        *(Wanted(task_id=1, reply_to=name, correlation_id="c8") for name in ("amq.gen-nobody", *others)),
    ]
    await close(world, manifest(("a", 2), ("b", 1), wanted=wanted))
    await serve(world)
    feed = await world.outside.consume(MINE)
    got = [feed.get_nowait() for _ in range(2)]
    assert feed.get_nowait() is None
    assert [(each.correlation_id, each.headers["part"]) for each in got] == [("c7", 0), ("c7", 1)]
    assert [Experience.deserialize_many(each.body)[0].eid.run for each in got] == [0, 1]
    for name in (others[0], others[-1]):
        assert await world.outside.depth(name) == 0
    assert decision(world).state == "ready"


async def test_a_part_too_large_to_pass_on_costs_its_submitter_only() -> None:
    world = make_world("broker.max_message_bytes=65536")
    await open_batch(world)
    world.outside.max_message_bytes = 1 << 20  # somebody with a higher limit
    body = Experience.serialize_many([experience(run=run, length=4000) for run in range(4)])
    await send(world, "a", 0, body=body)
    await world.outside.declare(MINE)
    await close(world, manifest(("a", 1), wanted=[Wanted(task_id=0, reply_to=MINE.name)]))
    await serve(world)
    assert decision(world).state == "ready"


async def test_a_queue_that_cannot_be_deleted_is_left_to_expire() -> None:
    world = make_world("broker.connect_timeout=5")
    operator = make(world)
    await batch_of(world, "a")
    async with world.living(operator):
        await asyncio.sleep(0.5)
        assert world.wire[-1] == "acked closed"
        world.broker.drop(operator.bus, delay=20)
        await asyncio.sleep(30)
        await world.outside.declare(world.topology.batch_queue(2, "t2"))
        await announce(world, manifest(ticket="t2", batch=2))
        await asyncio.sleep(3)
    assert [decided.ticket for decided in ready(world)] == ["t1", "t2"]
    assert world.count(QUEUE) == 1


async def test_metrics_are_written(tmp_path: Path) -> None:
    world = make_world()
    writer = MetricsWriter(tmp_path, "operator", "operator-0", tensorboard=False)
    await batch_of(world, "a", "b")
    await serve(world, 3.0, make(world, metrics=writer))
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["step"], line["experience_pipeline/experience_count"], line["role"]) == (1, 2.0, "operator")
    assert "time/operators" in line
    assert not [file for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


async def test_advantages_are_computed_where_the_algorithm_wants_them_here() -> None:
    world = World("algorithm.min_group_runs=2")
    await batch_of(world, "a", "b")
    await serve(world)
    sent = [Experience.deserialize_many(chunk.body) for chunk in chunks(world, decision(world).op)]
    assert [exp.advantages is not None for body in sent for exp in body] == [True, True]


# -- batches that end otherwise


@pytest.mark.parametrize("how", ["before it is read", "while it waits", "unannounced"])
async def test_a_queue_that_is_gone_is_told_and_acknowledged(how: str) -> None:
    world = make_world()
    if how == "before it is read":
        await world.ready()
        await close(world, manifest(("a", 1)))
    else:
        await batch_of(world, missing="a")
    async with world.living(make(world)):
        await asyncio.sleep(1 if how == "before it is read" else 9)
        name = world.topology.batch_queue(1, "t1").name
        if how == "while it waits":
            await world.outside.delete(name)
        elif how == "unannounced":
            del world.broker.queues[name]
        await asyncio.sleep(5)
    assert decision(world).state == "gone"
    assert [entry for entry in world.wire if "deleted" not in entry] == [
        "sent batch_ready",
        "confirmed batch_ready",
        "acked closed",
    ]
    assert world.reasons() == []


async def test_over_the_limit_a_batch_fails_and_its_queue_is_kept() -> None:
    world = make_world()
    await batch_of(world, "a", deliveries=4, failed=1)
    await serve(world)
    decided = decision(world)
    assert (decided.state, decided.chunks) == ("failed", 0)
    assert Scripted.tries == []
    assert world.count(QUEUE) == 1
    assert world.reasons() == [decided.reason]
    headers = world.stored("dead")[0].headers
    assert (headers["kind"], "operator" in headers) == ("batch_closed", False), "no operator is at fault"
    assert world.wire[-1] == "acked closed"
    assert "confirmed batch_closed" in world.wire


async def test_a_chain_that_fails_is_tried_again_after_growing_pauses_and_fails_at_the_limit() -> None:
    world = make_world("broker.delivery_limit=4")
    Scripted.fails, Scripted.words = 100, "no file \udcff"
    await batch_of(world, "a")
    await serve(world, 60)
    assert len(Scripted.tries) == 4
    gaps = [after - before for before, after in zip(Scripted.tries, Scripted.tries[1:], strict=False)]
    assert all(low <= gap < low * 2 + 0.1 for gap, low in zip(gaps, (0.5, 1.0, 2.0), strict=True))
    decided = decision(world)
    assert decided.state == "failed"
    assert "ArithmeticError: no file ?" in str(decided.reason), "a reason of any characters travels"
    assert [reason.replace("\\udcff", "?") for reason in world.reasons()] == [decided.reason]
    assert (world.count(QUEUE), world.count("closed")) == (1, 0)


async def test_what_the_chain_made_too_large_to_send_fails_the_batch_not_the_operator() -> None:
    world = make_world("broker.max_message_bytes=65536", "broker.delivery_limit=2")
    Scripted.grows = 100_000
    await batch_of(world, "a")
    await serve(world, 30)
    assert decision(world).state == "failed"
    assert "max_message_bytes" in str(decision(world).reason)


async def test_parts_that_cannot_be_used_are_parked_once_and_the_rest_is_processed() -> None:
    world = make_world()
    Scripted.fails = 1
    await open_batch(world)
    await send(world, "a", 0, run=0)
    await send(world, "b", 0, body=b"no experiences")
    anonymous = Envelope(body=b"?", kind="experience_part", headers={"attempt": "a"})
    key = world.topology.batch_routing_key(1, "t1")
    await world.outside.publish(world.topology.exchange("experiences"), key, anonymous)
    await send(world, "c", 0, run=2)
    await close(world, manifest(("a", 1), ("b", 1), ("c", 1)))
    await serve(world, 30)
    assert runs_of(world, decision(world).op) == [0, 2]
    assert Counter(reason.partition(":")[0] for reason in world.reasons()) == {
        "does not decode": 1,
        "an experience part needs the headers attempt and part, or attempts where several share it": 1,
    }
    bad = next(each for each in world.stored("dead") if each.headers.get("attempt") == "b")
    assert (bad.body, bad.routing_key) == (b"no experiences", key)
    assert bad.headers["dead-queue"] == world.topology.batch_queue(1, "t1").name


@pytest.mark.parametrize("listed", [True, False], ids=["listed parts", "other parts"])
async def test_a_batch_whose_listed_parts_are_too_large_fails_and_is_kept(listed: bool) -> None:
    world = make_world("broker.max_batch_bytes=1048576")
    await open_batch(world)
    for part in range(3):
        await send(world, "large", part, body=b"x" * 400_000)
    await send(world, "a", 0)
    await close(world, manifest(("large", 3)) if listed else manifest(("a", 1)))
    await serve(world)
    assert decision(world).state == ("failed" if listed else "ready")
    if listed:
        assert "max_batch_bytes" in str(decision(world).reason)
        assert (world.count(QUEUE), world.count("closed"), len(world.reasons())) == (4, 0, 1)


async def test_a_manifest_that_does_not_decode_is_parked_and_the_next_is_done() -> None:
    world = make_world()
    await world.ready()
    await world.put("closed", b"{}")
    await batch_of(world, "a")
    await serve(world)
    assert decision(world).state == "ready"
    assert len(world.reasons()) == 1


async def test_nothing_is_acknowledged_or_deleted_when_nobody_keeps_what_is_ready() -> None:
    world = make_world()
    Scripted.seconds = 1.0
    await batch_of(world, "a")
    task = asyncio.create_task(make(world).run())
    await asyncio.sleep(0.5)
    await world.outside.delete(world.topology.ready.name)
    await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, ExceptionGroup)
    assert error.subgroup(RestartRequested) is not None
    assert (world.count("closed"), world.count(QUEUE)) == (1, 1)


# -- parts that do not come


async def test_parts_that_never_come_fail_the_batch_after_the_deadline() -> None:
    world = make_world()
    await batch_of(world, "a", missing="b")
    async with world.living(make(world)):
        await asyncio.sleep(58)
        assert ready(world) == []
        await asyncio.sleep(5)
        assert decision(world).state == "failed"
    assert "1 of 2 parts did not arrive within 60 s" in str(decision(world).reason)
    assert world.count(QUEUE) == 1


async def test_each_part_starts_the_deadline_anew() -> None:
    world = make_world()
    await batch_of(world, missing="abcd")
    async with world.living(make(world)):
        for run, attempt in enumerate("abcd"):
            await asyncio.sleep(40)
            await send_late(world, attempt, run=run)
        await asyncio.sleep(3)
    assert decision(world).state == "ready"


@pytest.mark.parametrize("trouble", ["disconnected", "blocked"])
async def test_the_deadline_stands_still_while_the_bus_is_unusable(trouble: str) -> None:
    world = make_world()
    operator = make(world)
    await batch_of(world, missing="a")
    async with world.living(operator):
        await asyncio.sleep(20)
        if trouble == "blocked":
            world.broker.block()
            await asyncio.sleep(200)
            world.broker.unblock()
        else:
            world.broker.drop(operator.bus, delay=200)
            await asyncio.sleep(201)
        await asyncio.sleep(30)
        assert ready(world) == []
        await send_late(world, "a", 0)
        await asyncio.sleep(10)
    assert [decided.state for decided in ready(world)][:1] == ["ready"]
    assert world.reasons() == []


async def test_the_deadline_stands_still_while_another_operator_receives_the_parts() -> None:
    world = make_world()
    await open_batch(world)
    await send(world, "a", 0)
    queue = world.topology.batch_queue(1, "t1")
    other = await world.outside.consume(queue)  # the single active consumer
    await close(world, manifest(("a", 1)))
    async with world.living(make(world)):
        for _ in range(50):
            await world.beat("operator", "operator-1", ticket="t1")
            await asyncio.sleep(2)
        assert ready(world) == []
        await other.close()
        await asyncio.sleep(2)
    assert [decided.state for decided in ready(world)] == ["ready"]


async def test_two_that_wait_for_the_same_missing_part_do_not_wait_for_each_other() -> None:
    world = make_world()
    await open_batch(world)
    await send(world, "a", 0)
    closed = manifest(("a", 1), ("b", 1))
    await close(world, closed)
    await close(world, closed)
    async with world.living(make(world), make(world, "operator-1")):
        await asyncio.sleep(70)
    assert [decided.state for decided in ready(world)] == ["failed", "failed"]
    assert world.count("closed") == 0


@pytest.mark.parametrize("after", [0.205, 0.3, 0.705, *range(1, 11)])
async def test_killed_anywhere_a_second_one_completes(after: float) -> None:
    """Killed while it gathers or in the chain (seconds), or after so many things went over the wire."""
    world = make_world("broker.max_message_bytes=65536")
    Scripted.grows, Scripted.seconds = 40_000, 0.5
    await batch_of(world, "a", "b", "c")
    first = asyncio.create_task(make(world).run())
    if isinstance(after, int):
        world.kill_after = (after, first)
        await asyncio.wait([first], timeout=10)
    else:
        await asyncio.sleep(after)
    await kill(first)
    assert first.cancelled()
    async with world.living(make(world, "operator-1")):
        await asyncio.sleep(5)
    decided = ready(world)
    assert decided
    assert decided[0].state == "ready"
    assert all(complete(world, each) and each.experiences == 3 for each in decided)
    assert all(runs_of(world, each.op) == [0, 1, 2] for each in decided)
    assert len({each.op for each in decided}) == len(decided)
    assert world.count("closed") == 0
    assert world.reasons() == []
    assert "confirmed batch_ready" in world.wire[: world.wire.index("acked closed")]


async def test_frozen_in_the_middle_and_thawed_it_changes_nothing() -> None:
    world = make_world()
    frozen, other = make(world), make(world, "operator-1")
    await batch_of(world, "a", missing="b")
    async with world.living(frozen, other):
        await asyncio.sleep(5)
        world.broker.drop(frozen.bus, delay=20)
        await asyncio.sleep(5)
        await send_late(world, "b", 0, run=1)
        await asyncio.sleep(60)
    states = [decided.state for decided in ready(world)]
    assert states[0] == "ready"
    assert complete(world, ready(world)[0])
    assert "failed" not in states
    assert (world.count("closed"), world.count(QUEUE)) == (0, None)


async def test_two_at_once_on_the_same_manifest_make_complete_sets_of_their_own() -> None:
    world = make_world()
    Scripted.seconds = 5.0
    await batch_of(world, "a", "b")
    await close(world, manifest(("a", 1), ("b", 1)))  # published again: nobody was seen at work
    async with world.living(make(world), make(world, "operator-1")):
        await asyncio.sleep(30)
    decided = ready(world)
    assert decided[0].state == "ready"
    assert all(complete(world, each) and each.experiences == 2 for each in decided if each.state == "ready")
    assert {each.state for each in decided} <= {"ready", "gone"}
    assert (world.count("closed"), world.count(QUEUE)) == (0, None)


# -- the end


async def test_draining_finishes_the_batch_at_work_and_its_queue_and_takes_no_other() -> None:
    world = make_world()
    Scripted.seconds = 3.0
    operator = make(world)
    await batch_of(world, "a")
    async with world.living(operator):
        await asyncio.sleep(1)
        await announce(world, manifest(ticket="t2"))
        operator.drain()
    assert [(each.ticket, each.state) for each in ready(world)] == [("t1", "ready")]
    assert (world.count("closed"), world.count(QUEUE)) == (1, None)


@pytest.mark.parametrize(
    ("seconds", "fails", "limit"),
    [pytest.param(1000.0, 0, 10, id="takes too long"), pytest.param(0.0, 100, 2, id="waits for the next try")],
)
async def test_draining_gives_back_what_is_not_done_in_time(seconds: float, fails: int, limit: float) -> None:
    world = make_world("runner.drain_timeout=5")
    Scripted.seconds, Scripted.fails = seconds, fails
    await batch_of(world, "a")
    world.held_back("closed", 3)
    await serve(world, 1)
    assert asyncio.get_running_loop().time() < limit
    assert ready(world) == []
    assert (len(Scripted.tries), world.count("closed"), world.count(QUEUE)) == (1, 1, 1)


async def test_a_manifest_given_back_in_good_order_more_often_than_the_limit_is_processed() -> None:
    world = make_world("runner.drain_timeout=1", "broker.delivery_limit=2")
    await batch_of(world, "a")
    Scripted.seconds = 60.0
    for number in range(5):
        async with world.living(make(world)):
            await asyncio.sleep(1)
        (waiting,) = world.stored("closed")
        assert (waiting.message_id, waiting.deliveries_before) == ("closed-t1", 0)
        assert waiting.headers["given-back"] == number + 1
    restarted = make(world)
    task = asyncio.create_task(restarted.run())
    await asyncio.sleep(1)
    restarted.restart(RestartRequested("a rolling restart"))
    await asyncio.wait([task], timeout=10)
    error = task.exception()
    assert error is not None
    assert isinstance(first_leaf(error), RestartRequested)
    Scripted.seconds = 0.0
    async with world.living(make(world)):
        await asyncio.sleep(3)
    assert [decided.state for decided in ready(world)] == ["ready"]
    assert (world.stored("dead"), world.count("closed"), world.count(QUEUE)) == ([], 0, None)


async def test_an_operator_that_dies_between_giving_back_and_acknowledging_makes_no_second_set_count() -> None:
    world = make_world("runner.drain_timeout=1")
    first = make(world)
    await batch_of(world, "a")
    Scripted.seconds = 60.0
    publish = first.bus.publish

    async def publish_and_die(exchange: str, key: str, envelope: Any, **how: Any) -> bool:
        stored = await publish(exchange, key, envelope, **how)
        if envelope.kind == "batch_closed":
            first.bus.disconnect("killed")
        return stored

    first.bus.publish = publish_and_die  # type: ignore[method-assign]
    task = asyncio.create_task(first.run())
    await asyncio.sleep(1)
    first.drain()
    await asyncio.sleep(2)
    assert [each.message_id for each in world.stored("closed")] == ["closed-t1"] * 2
    Scripted.seconds = 0.0
    async with world.living(make(world, "operator-1")):
        await asyncio.sleep(10)
    await kill(task)
    decided, *later = ready(world)
    assert (decided.state, decided.experiences) == ("ready", 1)
    assert complete(world, decided)
    assert all(complete(world, each) or each.state == "gone" for each in later), "the trainer takes the first set"
    assert world.count("closed") == 0


async def test_the_broker_taking_a_manifest_back_is_no_evidence_and_a_dead_process_is(tmp_path: Path) -> None:
    world = make_world("broker.delivery_limit=2")
    notes = tmp_path / "operator-0.at-work.json"
    await batch_of(world, "a", deliveries=9)
    Scripted.seconds = 60.0
    killed = asyncio.create_task(make(world, crash_notes=CrashLog(notes)).run())
    await asyncio.sleep(1)
    assert len(Scripted.tries) == 1, "nine lost connections fail no batch"
    left = notes.read_bytes()
    await kill(killed)
    notes.write_bytes(left)  # a process that dies leaves it as it is
    async with world.living(make(world, crash_notes=CrashLog(notes))):
        await asyncio.sleep(3)
    assert [decided.state for decided in ready(world)] == ["failed"]
    assert len(Scripted.tries) == 1
    assert not notes.exists()


async def test_the_end_of_the_run_ends_it_and_its_beat_names_the_batch_at_work() -> None:
    world = make_world()
    Scripted.seconds = 5.0
    operator = make(world)
    await batch_of(world, "a")
    task = asyncio.create_task(operator.run())
    await asyncio.sleep(1)
    assert operator.detail().ticket == "t1"
    await asyncio.sleep(6)
    assert operator.detail().ticket is None
    await world.beat("explorer", "explorer-0", finished=True)
    await asyncio.sleep(2)
    assert task.done()
    assert operator.state == "finished"


# -- what a failing or slow operator of the chain costs: tries, then its batch, and never the run


THIS = __name__


class Fine(ExperienceOperatorV1):
    async def process(self, exps: list[Experience]) -> Processed:
        return exps, {}


class Choosy(ExperienceOperatorV1):
    """Fails on batch 1 until it is repaired."""

    repaired = False
    seconds = 0.0
    seen: list[str] = []  # noqa: RUF012  reset before each test

    async def prepare(self) -> None:
        self.seen += [f"{name}: {len(clients)}" for name, clients in self.auxiliary_models.items()]

    async def process(self, exps: list[Experience]) -> Processed:
        await asyncio.sleep(self.seconds)
        if exps[0].eid.batch == 1 and not self.repaired:
            raise ArithmeticError("not this one")
        return exps, {}


class Computes(ThreadedOperator):
    go = threading.Event()

    def apply(self, exps: list[Experience]) -> Processed:
        self.go.wait(30)
        return exps, {}


def a_world(*overrides: str, kind: str = "Choosy") -> World:
    chain = f'operator.operators=[{{"name": "{THIS}.Fine"}}, {{"name": "{THIS}.{kind}"}}]'
    return World(chain, "algorithm.min_group_runs=1", "broker.delivery_limit=2", *overrides)


async def test_the_dead_letter_names_the_operator_and_given_back_to_a_repaired_one_it_is_done() -> None:
    world = a_world()
    await batch_of(world, "a", "b")
    async with world.living(make(world), make(world, "operator-1")):
        await asyncio.sleep(10)
        (letter,) = world.stored("dead")
        assert letter.headers["operator"] == "1_Choosy"
        assert "operator 1_Choosy: ArithmeticError: not this one" in str(letter.headers["dead-reason"])
        assert [decided.state for decided in ready(world)] == ["failed"]
        assert world.count(QUEUE) == 2
        Choosy.repaired = True
        await close(world, manifest(("a", 1), ("b", 1)))
        await asyncio.sleep(5)
    assert [(decided.state, decided.experiences) for decided in ready(world)] == [("failed", 0), ("ready", 2)]
    assert world.count(QUEUE) is None


async def test_a_chain_that_takes_too_long_names_who_was_at_work() -> None:
    world = a_world("operator.timeout=100")
    Choosy.seconds = 1e6
    await batch_of(world, "a")
    await serve(world, 250)
    assert [decided.state for decided in ready(world)] == ["failed"]
    assert [str(letter.headers["operator"]) for letter in world.stored("dead")] == ["1_Choosy"]
    assert "1_Choosy: the chain was not done within 100 s (operator.timeout)" in world.reasons()[0]


def test_a_computation_that_does_not_end_costs_the_process_not_the_batch() -> None:
    async def main() -> None:
        world = a_world("operator.timeout=0.05", kind="Computes")
        await batch_of(world, "a")
        try:
            with pytest.raises(ExceptionGroup) as caught:
                await make(world).run()
        finally:
            Computes.go.set()
        error = first_leaf(caught.value)
        assert isinstance(error, RestartRequested)
        assert "Computes exceeded its time limit and still computes" in str(error)
        assert (world.count("closed"), world.reasons()) == (1, [])

    with mock.patch.object(asyncio, "wrap_future", wrap_future):
        asyncio.run(main())


async def test_operators_are_handed_the_auxiliary_models_by_name() -> None:
    models = '[{"name": "judge", "engine": "external", "url": "http://127.0.0.1:9/v1"}]'
    world = a_world(f"explorer.auxiliary_models={models}")
    await serve(world)
    assert Choosy.seen == ["judge: 1"]
