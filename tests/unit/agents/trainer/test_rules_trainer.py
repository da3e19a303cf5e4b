"""The trainer's and operator's sentences of docs/protocol.md that no other test holds (tests/RULES.md)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.unit.agents.explorer.test_explorer import check_history
from tests.unit.agents.watched import WatchedSimulation, late_operators
from tests.virtual import virtually
from trinity_agents.simulation import killed, until
from trinity_agents.trainer.history import lineage
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.messages import BatchReady, Progress, SyncEvent, TrainerStatus
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually


@virtually
async def test_whatever_became_of_a_batch_it_is_one_unit_of_progress_and_recorded(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("synchronizer.sync_interval=50",))
    await sim.record_messages()
    trainer, client = sim.make_trainer(), await sim.client()
    task = asyncio.get_running_loop().create_task(trainer.run())
    sets: list[tuple[int, Any]] = [(1, "failed"), (2, "gone"), (2, "empty"), (3, "empty")]
    for op, (batch, state) in enumerate(sets):
        ready = BatchReady(batch=batch, ticket=f"t{batch}", op=str(op), state=state, reason=f"why {batch}")
        await client.publish(sim.topology.exchange("ready"), str(batch), envelope(ready))
    await until(lambda: trainer.loop.progress == 3)
    await asyncio.sleep(5.0)
    trainer.drain()
    await task
    outcomes = [("t1", "failed"), ("t2", "gone"), ("t3", "empty")]
    assert (sim.trainer.loop.progress, sim.trainer.loop.step, sim.learners[0].steps) == (3, 0, [])
    told = sim.published(Progress)
    assert [one.progress for one in told] == [1, 2, 3], "a second set of a ticket is no further batch"
    assert [(one.ticket, one.outcome) for one in told] == outcomes
    assert told[0].reason == "why 1"
    history = lineage(tmp_path / "history", 1, 3)
    assert [(entry["ticket"], entry["outcome"]) for entry in history] == outcomes
    assert [entry["uids"] for entry in history] == [[]] * 3


def test_resumed_it_gives_the_checkpoints_weights_out_before_it_reads_on(tmp_path: Path) -> None:
    """New generation, sync, then the stream: what is sampled meanwhile is of weights that somebody holds."""
    sim = WatchedSimulation(tmp_path, ("trainer.save_interval=1", "synchronizer.sync_interval=3"), batches=6)

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: any((tmp_path / "checkpoints").glob("*2/state.json")) or sim.trainer.loop.progress == 3)
        await killed(first)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    check_history(sim, 6)
    events = [one for one in _in_order(sim) if getattr(one, "generation", 2) == 2]
    commits = [n for n, one in enumerate(events) if isinstance(one, SyncEvent) and one.version and one.version[0] == 2]
    steps = [n for n, one in enumerate(events) if isinstance(one, Progress)]
    assert commits[0] < steps[0]
    first = events[commits[0]]
    assert isinstance(first, SyncEvent)
    assert first.version is not None
    assert first.version[1] >= 2, "the weights of the checkpoint, not those of the beginning"


def _in_order(sim: WatchedSimulation) -> list[Progress | SyncEvent]:
    """What was published of both kinds, as it came."""
    found = [one for one in sim.messages() if isinstance(one, Progress | SyncEvent)]
    return [one for one in found if isinstance(one, Progress) or one.verb == "commit"]


def test_a_trainer_without_the_lock_reads_and_says_nothing(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=3)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sim.make_trainer("trainer-0").run())
            await asyncio.sleep(0.5)
            group.create_task(sim.make_trainer("trainer-1").run())

    run_virtually(sim.run(trainer=both), limit=300)
    assert [trainer.loop.progress for trainer in sim.trainers] == [3, 0]
    assert [act for act in sim.acts if act.who == "trainer-1" and act.what == "publish"] == []
    assert sim.learners[1].steps == []


def test_an_operator_acknowledges_no_part(tmp_path: Path) -> None:
    """What it holds comes back if it dies; the parts go with their queue."""
    sim = WatchedSimulation(tmp_path, batches=3)
    run_virtually(sim.run(), limit=300)
    check_history(sim, 3)
    acked = [act.subject for act in sim.acts if act.what == "acked" and act.who.startswith("operator")]
    assert acked == ["closed"] * 3


def test_an_operator_takes_one_manifest_at_a_time(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("synchronizer.sync_interval=4",), batches=4)
    sim.holds = late_operators(lambda batch: 20.0)

    async def look() -> None:
        await until(lambda: len(sim.tickets("batch_closed")) == 4)
        await asyncio.sleep(1.0)
        assert len(sim.waiting_in("closed")) == 3, "the others wait where another operator can have them"

    run_virtually(sim.run(beside=look), limit=1000)


@virtually
async def test_a_trainer_decides_nothing_before_it_has_read_its_mark(tmp_path: Path) -> None:
    """Whether a stream is the one that the checkpoint knows is certain only then."""
    sim = WatchedSimulation(tmp_path)
    bus, client = sim.bus(), await sim.client()
    await bus.connect()
    await bus.declare(*sim.topology.durable)
    ready = envelope(BatchReady(batch=1, ticket="a", op="o", state="empty"))
    await client.publish(sim.topology.exchange("ready"), "1", ready)
    reads_mark, consume, read = asyncio.Event(), bus.consume, []

    async def holds_back(queue: Any, **how: Any) -> Any:
        feed = await consume(queue, **how)
        following = feed.__anext__

        class Held:
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *what: Any) -> None:
                await feed.close()

            async def __anext__(self) -> Any:
                if len(read) == 1:  # the mark is next
                    await reads_mark.wait()
                delivery = await following()
                read.append(delivery)
                return delivery

        return Held()

    bus.consume = holds_back  # type: ignore[method-assign]
    source = StreamSource(bus, sim.topology, "trainer-0")
    reading = asyncio.create_task(source.run())
    await asyncio.sleep(5.0)
    assert not source.available()
    reads_mark.set()
    await asyncio.sleep(1.0)
    assert source.available()
    await killed(reading)


def test_a_trainers_beat_carries_generation_committed_version_epoch_and_phase(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2)
    told: list[TrainerStatus] = []

    async def scene() -> None:
        await until(lambda: sim.explorer.peers.trainer.committed == (1, 1))
        told.append(sim.explorer.peers.trainer)

    run_virtually(sim.run(beside=scene), limit=300)
    (level,) = told
    assert (level.generation, level.committed, level.epoch) == (1, (1, 1), sim.trainer.loop.gate.machine.epoch)
    assert level.phase in {"idle", "applying"}
