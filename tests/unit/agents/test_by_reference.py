"""Experiences too large for a message: from runner over operator to trainer by reference, whatever dies between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.agents.operator.test_operator import QUEUE, announce, decision, open_batch, ready, serve
from tests.unit.agents.operator.test_operator import make as operator
from tests.unit.agents.world import NotingBus, World, a_slice, an_outcome, beside, experience, kill, send_slice
from trinity_agents.runner.agent import Runner
from trinity_agents.simulation import Simulation, until
from trinity_agents.trainer.sources.base import TrainBatch
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Envelope
from trinity_mq.bus.topology import Queue
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.tickets import Ticket, new_ticket
from trinity_mq.experience import Experience
from trinity_mq.messages import (
    BatchClosed,
    BatchReady,
    ExperienceReference,
    Mark,
    TaskBody,
    TaskResult,
    TaskSlice,
    decode,
)
from trinity_mq.messages.batches import Accepted, Wanted
from trinity_mq.operators import ExperienceOperatorV1
from trinity_mq.operators.base import Processed
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, envelope
from trinity_mq.runtime.errors import RestartRequested
from trinity_mq.testing.virtual_time import VirtualTimeLoop
from trinity_mq.transport.batch_blobs import GRACE, SWEEP_INTERVAL
from trinity_mq.transport.blobs import STORE_PATIENCE, BlobStore, StoreUnavailable
from trinity_mq.transport.experience_parts import part_message

LOOP = VirtualTimeLoop

THIS = __name__
LARGE = 20_000
"""Tokens: 160 kB, over the smallest limit there is."""


pytestmark = pytest.mark.usefixtures("logs")


class Slow(ExperienceOperatorV1):
    """Takes its time, and notes what it was given."""

    seconds = 0.0
    seen: list[int] = []  # noqa: RUF012  reset by make_world

    async def process(self, exps: list[Experience]) -> Processed:
        self.seen.append(len(exps))
        await asyncio.sleep(self.seconds)
        return exps, {}


class Disk:
    """A blob store on a disk that may go away."""

    def __init__(self, folder: Path) -> None:
        self.root, self._aside = folder / "blobs", folder / "aside"
        self.store = BlobStore(f"file://{self.root}", "w", 1 << 30)

    def down(self) -> None:
        self.root.mkdir(exist_ok=True)
        self.root.rename(self._aside)
        self.root.write_bytes(b"")

    def up(self) -> None:
        self.root.unlink()
        self._aside.rename(self.root)

    def unmounted(self) -> None:
        self.root.rename(self._aside)
        self.root.mkdir()

    def mounted(self) -> None:
        self.root.rmdir()
        self._aside.rename(self.root)

    def blobs(self, kind: str) -> list[Path]:
        folder = self.root / "w" / kind
        return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def make_world(disk: Disk, *overrides: str, kind: type[World] = World) -> World:
    Slow.seconds, Slow.seen = 0.0, []
    chain = f'operator.operators=[{{"name": "{THIS}.Slow"}}]'
    few = ("broker.max_message_bytes=65536", f"broker.blob_store={disk.root}", "algorithm.min_group_runs=1")
    return kind(chain, *few, *overrides)


class Workflows:
    """Gives a small experience and a large one."""

    async def run_slice(self, task_slice: TaskSlice, models: Any, results: Any = None) -> SliceOutcome:
        return an_outcome(task_slice, experiences=[experience(run=0), experience(run=1, length=LARGE)])

    async def run(self, task_slice: TaskSlice, config: object, models: Any, results: Any = None) -> SliceOutcome:
        return await self.run_slice(task_slice, models)

    async def close(self) -> None:
        """Nothing to close."""


def runner(world: World, name: str = "runner-0", work: Any = None) -> Runner:
    work = work or Workflows()
    return Runner(world.config, bus=world.bus(), topology=world.topology, agent_id=name, workflows=work, isolated=work)


def results(world: World) -> list[TaskResult]:
    return [each for each in world.stream("results") if isinstance(each, TaskResult)]


async def close(world: World, *attempts: tuple[str, int], wanted: list[Wanted] | None = None) -> None:
    accepted = [
        Accepted(task_id=0, run_base=n, attempt=attempt, runs=[n], parts=parts)
        for n, (attempt, parts) in enumerate(attempts)
    ]
    closed = BatchClosed(batch=1, ticket="t1", accepted=accepted, wanted=wanted or [])
    await world.outside.unbind(world.topology.batch_queue(1, "t1"))
    await announce(world, closed)


async def send(
    world: World, disk: Disk, attempt: str, run: int = 0, ticket: str = "t1", **changes: Any
) -> ExperienceReference:
    """Publish a large part, as a runner does."""
    body = Experience.serialize_many([experience(run=run, length=LARGE)])
    reference = disk.store.put(f"batch/{ticket}/{attempt}-0.tmqx", body)
    mail = part_message(a_slice(ticket), attempt, 0, 1, reference.model_copy(update=changes))
    key = world.topology.batch_routing_key(1, ticket)
    assert await world.outside.publish(world.topology.exchange("experiences"), key, mail)
    return reference


async def batch_of(world: World, disk: Disk, *attempts: str, **changes: Any) -> list[ExperienceReference]:
    """A large part an attempt, closed; ``changes`` are those of the first reference."""
    await open_batch(world)
    sent = [await send(world, disk, attempt, run, **({} if run else changes)) for run, attempt in enumerate(attempts)]
    await close(world, *((attempt, 1) for attempt in attempts))
    return sent


async def trained(world: World, disk: Disk | None) -> TrainBatch:
    """What a trainer gets of batch 1."""
    bus = world.bus()
    await bus.connect()
    source = StreamSource(bus, world.topology, "trainer-0", disk and disk.store)
    reading = asyncio.create_task(source.run())
    try:
        return await source.next()
    finally:
        await kill(reading)
        await bus.close()


class WithReferences(NotingBus):
    """Notes before a reference is sent whether its blob is there."""

    async def publish(self, exchange: str, routing_key: str, envelope: Envelope, **how: Any) -> bool:
        if envelope.content_type == REFERENCE:
            path = Path(decode(envelope.body, ExperienceReference).url.removeprefix("file://"))
            self.world.note(f"{'stored' if path.exists() else 'missing'} {path.parts[-3]}")
            await asyncio.sleep(0.001)
        return await super().publish(exchange, routing_key, envelope, **how)


class ReferenceWorld(World):
    def bus(self) -> NotingBus:
        return WithReferences(self)


async def test_from_runner_to_trainer_and_every_blob_is_collected_in_its_time(disk: Disk) -> None:
    world = make_world(disk, kind=ReferenceWorld)
    await send_slice(world, a_slice())
    async with world.living(runner(world), operator(world)):
        await asyncio.sleep(1)
        (result,) = results(world)
        assert (result.outcome, result.runs, result.parts) == ("finished", [0, 1], 2)
        small, large = world.stored(QUEUE)
        assert (small.content_type, large.content_type) == (EXPERIENCES, REFERENCE)
        assert large.headers["kind"] == "experience_part"
        assert large.headers["policy_version"] == "1.3"
        assert len(large.body) < 1000
        assert [path.name for path in disk.blobs("batch")] == [f"{result.attempt}-1.tmqx"]
        part = ["sent experience_part", "confirmed experience_part"]
        rest = ["sent task_result", "confirmed task_result", "acked tasks.train"]
        assert world.wire == [*part, "stored batch", *part, *rest], "the blob is there before its reference is sent"
        await close(world, (result.attempt, 2))
        await asyncio.sleep(0.5)
        stored = world.wire.index("stored ready")
        assert world.wire[stored + 1] == "sent experience_chunk"
        assert "missing ready" not in world.wire
        assert len(disk.blobs("batch")) == 1  # its queue still exists
        await asyncio.sleep(2)
    assert disk.blobs("batch") == []
    assert world.count(QUEUE) is None
    batch = await trained(world, disk)
    decided = decision(world)
    assert (decided.state, decided.chunks, decided.experiences) == ("ready", 2, 2)
    assert decided.metrics["experience_pipeline/chunks_by_reference"] == 1.0
    assert [path.name for path in disk.blobs("ready")] == [f"{decided.op}-1.tmqx"]
    assert batch.state == "ready"
    assert [one.eid.run for one in batch.experiences] == [0, 1]
    assert torch.equal(batch.experiences[1].tokens, torch.arange(LARGE, dtype=torch.int32))
    assert world.reasons() == []


# -- the runner


async def test_a_store_that_is_away_delays_a_slice(disk: Disk) -> None:
    world = make_world(disk)
    disk.down()
    await send_slice(world, a_slice())
    async with world.living(runner(world)):
        await asyncio.sleep(STORE_PATIENCE / 2)
        assert world.wire == []
        disk.up()
        await asyncio.sleep(30)
    assert [result.outcome for result in results(world)] == ["finished"]
    assert len(world.stored(QUEUE)) == 2
    assert world.count("tasks.train") == 0


async def test_a_store_that_stays_away_ends_a_slice_at_the_limit(disk: Disk) -> None:
    world = make_world(disk, "broker.delivery_limit=3")
    disk.down()
    await send_slice(world, a_slice())
    async with world.living(runner(world)):
        await asyncio.sleep(2.5 * STORE_PATIENCE)
        assert results(world) == []
        await asyncio.sleep(STORE_PATIENCE)
    (result,) = results(world)
    assert (result.outcome, result.parts) == ("poisoned", 0)
    assert "its experiences could not be stored; 3 attempts failed or were lost" in str(result.message)
    assert world.stored(QUEUE) == []


async def test_killed_between_blob_and_reference_another_does_it_and_both_blobs_go(disk: Disk) -> None:
    world = make_world(disk, kind=ReferenceWorld)
    await send_slice(world, a_slice())
    first = asyncio.create_task(runner(world).run())
    world.kill_after = 3, first  # behind the confirm of the small part: at the note before the reference is sent
    await asyncio.wait([first])
    assert [part.content_type for part in world.stored(QUEUE)] == [EXPERIENCES]
    async with world.living(runner(world, "runner-1"), operator(world)):
        await asyncio.sleep(1)
        (result,) = results(world)
        assert world.wire.count("stored batch") == 2
        assert len(disk.blobs("batch")) == 2
        await close(world, (result.attempt, 2))
        await asyncio.sleep(3)
    assert [decided.experiences for decided in ready(world)] == [2]
    assert disk.blobs("batch") == []


async def test_a_late_attempt_takes_its_own_blobs_away(disk: Disk) -> None:
    world = make_world(disk)
    await send_slice(world, a_slice())
    await send(world, disk, "other")
    await world.outside.delete(world.topology.batch_queue(1, "t1").name)
    async with world.living(runner(world)):
        await asyncio.sleep(1)
    assert [result.outcome for result in results(world)] == ["late"]
    assert [path.name for path in disk.blobs("batch")] == ["other-0.tmqx"]


@pytest.mark.parametrize("ticket", ["../../t", "a/../../b", ".t"])
async def test_a_ticket_that_leads_elsewhere_fails_its_slice_only(disk: Disk, ticket: str) -> None:
    world = make_world(disk)
    await send_slice(world, a_slice(ticket))
    async with world.living(runner(world)):
        await asyncio.sleep(1)
        await send_slice(world, a_slice())
        await asyncio.sleep(1)
    assert [result.outcome for result in results(world)] == ["failed", "finished"]
    assert {path.parent.name for path in disk.root.rglob("*.tmqx")} == {"t1"}


# -- the operator


def remove(disk: Disk, reference: ExperienceReference) -> None:
    disk.store.delete(reference.url.removeprefix(f"{disk.store.url}/"))


def spoil(disk: Disk, reference: ExperienceReference) -> None:
    path = Path(reference.url.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")


@pytest.mark.parametrize(
    ("harm", "changes", "reason"),
    [
        (remove, {}, "does not exist"),
        (spoil, {}, "another SHA-256"),
        (None, {"bytes": 5}, "its reference says 5"),
        (None, {"bytes": 1 << 60}, "over broker.max_batch_bytes"),
        (None, {"url": "file:///etc/passwd"}, "wanted a blob under"),
        (None, {"url": "http://127.0.0.1:9/x"}, "wanted a blob under"),
    ],
    ids=["missing", "damaged", "size", "huge", "path", "scheme"],
)
async def test_a_reference_that_leads_to_nothing_usable_is_parked_and_the_rest_is_processed(
    disk: Disk, harm: Callable[[Disk, ExperienceReference], None] | None, changes: dict[str, Any], reason: str
) -> None:
    world = make_world(disk)
    reference, _ = await batch_of(world, disk, "a", "b", **changes)
    if harm is not None:
        harm(disk, reference)
    await serve(world, 5)
    decided = decision(world)
    assert (decided.state, decided.experiences) == ("ready", 1)
    (told,) = world.reasons()
    assert "does not decode" in told
    assert reason in told
    assert disk.blobs("batch") == []


async def test_without_a_store_a_reference_is_parked_with_the_setting_it_lacks(disk: Disk) -> None:
    world = make_world(disk, "broker.blob_store=null")
    await batch_of(world, disk, "a")
    await serve(world, 5)
    assert [decided.state for decided in ready(world)] == ["empty"]
    assert "broker.blob_store is not set here" in "".join(world.reasons())


@pytest.mark.parametrize(
    ("leave", "come_back", "late"),
    [
        pytest.param(Disk.down, Disk.up, False, id="down"),
        pytest.param(Disk.unmounted, Disk.mounted, False, id="unmounted"),
        pytest.param(Disk.down, Disk.up, True, id="when chunks are written"),
    ],
)
async def test_a_store_that_is_away_for_a_while_costs_a_batch_nothing(
    disk: Disk, leave: Callable[[Disk], None], come_back: Callable[[Disk], None], late: bool
) -> None:
    world = make_world(disk, "broker.delivery_limit=3")
    Slow.seconds = 10.0 if late else 0.0
    await batch_of(world, disk, "a")
    if not late:
        leave(disk)
    async with world.living(operator(world)):
        if late:
            await asyncio.sleep(5)
            leave(disk)
        await asyncio.sleep(60 if late else 1.5 * STORE_PATIENCE)
        assert ready(world) == []
        come_back(disk)
        await asyncio.sleep(30)
    assert (await trained(world, disk)).state == "ready"
    assert decision(world).experiences == 1
    assert Slow.seen == [1]
    assert world.reasons() == []
    assert disk.blobs("batch") == []


async def test_a_store_that_stays_away_fails_the_batch_and_queue_and_blobs_are_kept(disk: Disk) -> None:
    world = make_world(disk, "broker.delivery_limit=2")
    await batch_of(world, disk, "a")
    disk.unmounted()
    async with world.living(operator(world)):
        await asyncio.sleep(3 * STORE_PATIENCE)
        disk.mounted()
        await asyncio.sleep(2 * GRACE)
    decided = decision(world)
    assert decided.state == "failed"
    assert "is it mounted?" in str(decided.reason)
    assert world.count(QUEUE) == 1
    assert len(disk.blobs("batch")) == 1


async def test_one_that_finds_the_blobs_gone_with_their_queue_says_gone_and_parks_nothing(disk: Disk) -> None:
    world = make_world(disk)
    late = operator(world)
    read = late._reader.read

    async def held_up(manifest: BatchClosed) -> Any:
        parts = await read(manifest)
        await asyncio.sleep(20)
        return parts

    late._reader.read = held_up  # type: ignore[method-assign]
    await batch_of(world, disk, "a")
    async with world.living(late):
        await asyncio.sleep(5)
        await close(world, ("a", 1))  # announced again
        async with world.living(operator(world, "operator-1")):
            await asyncio.sleep(30)
    assert [decided.state for decided in ready(world)] == ["ready", "gone"]
    assert world.reasons() == []


async def test_a_batch_counts_what_its_references_carry(disk: Disk) -> None:
    world = make_world(disk, "broker.max_batch_bytes=1048576")
    await batch_of(world, disk, *"abcdefg")
    await serve(world, 5)
    decided = decision(world)
    assert decided.state == "failed"
    assert "over broker.max_batch_bytes" in str(decided.reason)


async def test_submitters_get_the_reference_and_an_hour_to_fetch_what_it_names(disk: Disk) -> None:
    world = make_world(disk)
    mine = Queue(name="amq.gen-mine", kind="exclusive")
    await open_batch(world)
    await world.outside.declare(mine)
    await send(world, disk, "a")
    await close(world, ("a", 1), wanted=[Wanted(task_id=0, reply_to="amq.gen-mine", correlation_id="c")])
    async with world.living(operator(world)):
        await asyncio.sleep(5)
        assert world.count(QUEUE) is None
        got = (await world.outside.consume(mine)).get_nowait()
        assert got is not None
        assert (got.content_type, got.correlation_id) == (REFERENCE, "c")
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        (one,) = Experience.deserialize_many(disk.store.get(decode(got.body, ExperienceReference)))
        assert len(one.tokens) == LARGE
        await asyncio.sleep(4 * SWEEP_INTERVAL)
    assert disk.blobs("batch") == []


async def test_what_an_operator_left_that_died_before_it_could_delete_is_swept(disk: Disk) -> None:
    world = make_world(disk)
    await batch_of(world, disk, "a")
    first = asyncio.create_task(operator(world).run())
    await asyncio.sleep(0.7)
    await kill(first)
    assert [decided.state for decided in ready(world)] == ["ready"]
    await world.outside.delete(world.topology.batch_queue(1, "t1").name)
    async with world.living(operator(world, "operator-1")):
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        assert len(disk.blobs("batch")) == 1
        await asyncio.sleep(4 * SWEEP_INTERVAL)
    assert disk.blobs("batch") == []


async def processed(world: World, disk: Disk) -> None:
    """A batch with a stored chunk on the stream."""
    await batch_of(world, disk, "a")
    await serve(world, 3)
    assert len(disk.blobs("ready")) == 1


async def test_a_store_that_is_away_makes_a_trainer_wait_then_start_anew_and_loses_no_batch(disk: Disk) -> None:
    world = make_world(disk)
    loop = asyncio.get_running_loop()
    await processed(world, disk)
    disk.down()
    started = loop.time()
    with pytest.raises(RestartRequested, match="batch 1 cannot be read now"):
        await trained(world, disk)
    assert loop.time() - started >= STORE_PATIENCE
    later = asyncio.create_task(trained(world, disk))
    await asyncio.sleep(30)
    assert not later.done()
    disk.up()
    batch = await later
    assert (batch.state, len(batch.experiences)) == ("ready", 1)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [("damaged", "another SHA-256"), ("missing", "does not exist"), ("no store", "broker.blob_store is not set here")],
)
async def test_a_chunk_whose_blob_is_no_good_fails_its_batch_with_the_reason(
    disk: Disk, trouble: str, reason: str
) -> None:
    world = make_world(disk)
    await processed(world, disk)
    (path,) = disk.blobs("ready")
    if trouble == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    elif trouble == "missing":
        path.unlink()
    batch = await trained(world, None if trouble == "no store" else disk)
    assert (batch.state, len(batch.experiences)) == ("failed", 0)
    assert reason in str(batch.reason)


class Grows(ExperienceOperatorV1):
    """Makes each experience one that no message takes."""

    async def process(self, exps: list[Experience]) -> Processed:
        for each in exps:
            each.info["blob"] = b"x" * 70_000
        return exps, {}


def make_run(tmp_path: Path, *overrides: str) -> Simulation:
    few = ("broker.max_message_bytes=65536", f"broker.blob_store={tmp_path}/blobs", *overrides)
    return Simulation(tmp_path, (*few, f'operator.operators=[{{"name": "{THIS}.Grows"}}]'))


def chunks(tmp_path: Path) -> set[str]:
    folder = tmp_path / "blobs/sim/ready"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


async def test_a_whole_run_leaves_no_blob_behind(tmp_path: Path) -> None:
    sim = make_run(tmp_path, "trainer.save_interval=2")
    most = 0
    async with beside(sim.run()):
        while not sim.trainers or not sim.trainer.loop.finished:
            most = max(most, len(chunks(tmp_path)))
            await asyncio.sleep(0.5)
    assert sim.learners[0].steps == [1, 2, 3, 4, 5, 6]
    assert most >= 2
    assert chunks(tmp_path) == set()


async def test_chunks_stay_until_the_oldest_kept_checkpoint_is_behind_them(tmp_path: Path) -> None:
    sim = make_run(tmp_path, "trainer.save_interval=1", "trainer.max_checkpoints_to_keep=2")
    left: dict[int, int] = {}
    async with beside(sim.run()):
        for progress in (1, 2, 3):
            await until((tmp_path / "checkpoints" / f"progress-{progress:06}").exists)
            await asyncio.sleep(0.1)
            oldest = min(int(path.name[-6:]) for path in (tmp_path / "checkpoints").glob("progress-*"))
            consumed = [one.ticket for one in sim.published(BatchReady)][:oldest]
            left[progress] = len(chunks(tmp_path) & set(consumed))
            needed = {one.ticket for one in sim.published(BatchReady)} - set(consumed)
            assert needed <= chunks(tmp_path)
    assert left[1] == 1  # the first checkpoint: an older trainer's are not known
    assert left[2] == 0
    assert left[3] == 0


# -- the caller of a Scheduler


class Call:
    """A ticket of a caller with one part in its queue, by reference."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.world = disk, make_world(disk)
        self.ticket: Ticket = new_ticket(1, [TaskBody(workflow="x")], deliver="caller", lane="train", time_left=1.0)
        self.result = a_result(self.ticket)

    async def collector(self) -> Collector:
        world, ticket = self.world, self.ticket.ticket
        await world.ready()
        bus = world.bus()
        await bus.connect()
        await world.outside.declare(world.topology.batch_queue(1, ticket))
        await send(world, self.disk, "a", ticket=ticket)
        collector = Collector(bus, world.topology, world.config, "caller")
        collector.expect(self.ticket)
        return collector

    async def take(self, collector: Collector) -> list[int]:
        """Return the lengths of the experiences."""
        return [len(experience.tokens) for experience in await collector.take(self.ticket, [self.result])]


def a_result(ticket: Ticket) -> TaskResult:
    about = {"batch": 1, "ticket": ticket.ticket, "task_id": 0, "run_base": 0, "repeat_times": 1, "attempt": "a"}
    return TaskResult(**about, outcome="finished", runs=[0], parts=1)


async def test_the_caller_gets_them_and_blobs_go_with_the_queue(disk: Disk) -> None:
    call = Call(disk)
    collector = await call.collector()
    deleting = asyncio.create_task(collector.run())
    assert await call.take(collector) == [LARGE]
    collector.forget(call.ticket)
    assert disk.store.folders("batch") == [call.ticket.ticket]
    await asyncio.sleep(2)
    assert call.world.count(f"batch.{call.ticket.ticket}") is None
    assert disk.store.folders("batch") == []
    deleting.cancel()


async def test_a_caller_passes_over_a_mark_of_the_queues_owner(disk: Disk) -> None:
    call = Call(disk)
    world, ticket = call.world, call.ticket.ticket
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, ticket))
    key = world.topology.batch_routing_key(1, ticket)
    assert await world.outside.publish(world.topology.exchange("experiences"), key, envelope(Mark(nonce="x")))
    collector = await call.collector()
    assert await call.take(collector) == [LARGE]
    await collector.close()
    assert world.reasons() == []


@pytest.mark.parametrize(("seconds", "error"), [(300, StoreUnavailable), (20, TimeoutError)])
async def test_a_call_that_could_not_have_them_leaves_them_for_the_next(
    disk: Disk, seconds: int, error: type[Exception]
) -> None:
    call = Call(disk)
    collector = await call.collector()
    disk.down()
    with pytest.raises(error):
        async with asyncio.timeout(seconds):
            await call.take(collector)
    disk.up()
    assert await call.take(collector) == [LARGE]


async def test_a_call_ends_when_a_part_does_not_arrive(disk: Disk) -> None:
    call, loop = Call(disk), asyncio.get_running_loop()
    collector = await call.collector()
    call.result = call.result.model_copy(update={"parts": 2})
    began = loop.time()
    with pytest.raises(TimeoutError):
        await call.take(collector)
    assert loop.time() - began == pytest.approx(call.world.config.broker.publish_timeout, abs=1.0)


async def test_a_call_that_waits_at_the_end_of_its_collector_fails_and_leaves_what_was_read_for_the_next(
    disk: Disk,
) -> None:
    call = Call(disk)
    collector = await call.collector()
    two_parts = call.result.model_copy(update={"parts": 2})
    taking = asyncio.create_task(collector.take(call.ticket, [two_parts]))
    await asyncio.sleep(1)
    await collector.close()
    with pytest.raises(RuntimeError, match="the scheduler was stopped"):
        await taking
    assert await call.take(collector) == [LARGE]


async def test_a_damaged_blob_of_a_caller_is_parked_with_the_reason(disk: Disk) -> None:
    call = Call(disk)
    collector = await call.collector()
    (path,) = disk.blobs("batch")
    path.write_bytes(b"short")
    assert await call.take(collector) == []
    (reason,) = call.world.reasons()
    assert "has 5 bytes" in reason


async def test_a_call_that_ends_while_it_parks_a_damaged_blob_leaves_it_for_the_next(disk: Disk) -> None:
    call = Call(disk)
    collector = await call.collector()
    (path,) = disk.blobs("batch")
    path.write_bytes(b"short")
    taking = asyncio.create_task(call.take(collector))
    call.world.kill_after = len(call.world.wire) + 1, taking  # when the dead letter is sent
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert await call.take(collector) == []
    assert "has 5 bytes" in call.world.reasons()[0]
