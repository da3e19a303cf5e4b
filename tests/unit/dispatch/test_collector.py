"""Experiences for the caller that came by reference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.unit.agents.world import World, a_slice, experience
from tests.virtual import virtually
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.tickets import Ticket, new_ticket
from trinity_mq.experience import Experience
from trinity_mq.messages import Mark, TaskBody, TaskResult
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable
from trinity_mq.transport.experience_parts import part_message


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with capture_logs():
        yield


class Scene:
    """A ticket with one part in its queue, by reference."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.world = World(f"broker.blob_store={folder}/blobs", *overrides)
        self.store = BlobStore(f"file://{folder}/blobs", "w", 1 << 30)
        self.bus = self.world.bus()
        self.ticket: Ticket = new_ticket(1, [TaskBody(workflow="x")], deliver="caller", lane="train", time_left=1.0)
        self.results = [
            TaskResult(
                batch=1,
                ticket=self.ticket.ticket,
                task_id=0,
                run_base=0,
                repeat_times=1,
                attempt="a",
                outcome="finished",
                runs=[0],
                parts=1,
            )
        ]

    async def collector(self) -> Collector:
        world, ticket = self.world, self.ticket.ticket
        await world.ready()
        await self.bus.connect()
        await world.outside.declare(world.topology.batch_queue(1, ticket))
        body = Experience.serialize_many([experience(length=20_000)])
        reference = self.store.put(f"batch/{ticket}/a-0.tmqx", body)
        mail = part_message(a_slice(ticket), "a", 0, 1, reference)
        key = world.topology.batch_routing_key(1, ticket)
        assert await world.outside.publish(world.topology.exchange("experiences"), key, mail)
        return Collector(self.bus, world.topology, world.config, "caller")

    def down(self) -> None:
        (self.folder / "blobs").rename(self.folder / "aside")
        (self.folder / "blobs").write_bytes(b"")

    def up(self) -> None:
        (self.folder / "blobs").unlink()
        (self.folder / "aside").rename(self.folder / "blobs")

    def lengths(self, taken: list[Any]) -> list[int]:
        return [len(one.tokens) for one in taken]


@virtually
async def test_the_caller_gets_them_and_blobs_go_with_the_queue(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    collector = await scene.collector()
    deleting = asyncio.create_task(collector.run())
    assert scene.lengths(await collector.take(scene.ticket, scene.results)) == [20_000]
    collector.forget(scene.ticket)
    assert scene.store.folders("batch") == [scene.ticket.ticket]
    await asyncio.sleep(2)
    assert scene.world.count(f"batch.{scene.ticket.ticket}") is None
    assert scene.store.folders("batch") == []
    deleting.cancel()


@virtually
async def test_a_mark_of_the_queues_owner_is_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    world, ticket = scene.world, scene.ticket.ticket
    await world.ready()
    await world.outside.declare(world.topology.batch_queue(1, ticket))
    key = world.topology.batch_routing_key(1, ticket)
    assert await world.outside.publish(world.topology.exchange("experiences"), key, envelope(Mark(nonce="x")))
    collector = await scene.collector()
    assert scene.lengths(await collector.take(scene.ticket, scene.results)) == [20_000]
    await collector.close()
    assert scene.world.reasons() == []


@virtually
async def test_a_store_that_is_away_for_a_moment_delays_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    collector = await scene.collector()
    scene.down()
    taking = asyncio.create_task(collector.take(scene.ticket, scene.results))
    await asyncio.sleep(30)
    scene.up()
    assert scene.lengths(await taking) == [20_000]


@pytest.mark.parametrize(("timeout", "error"), [(300, StoreUnavailable), (20, TimeoutError)])
@virtually
async def test_a_call_that_could_not_have_them_leaves_them_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: int, error: type[Exception]
) -> None:
    monkeypatch.setattr("trinity_mq.config.bus.PUBLISH_TIMEOUT", timeout)
    scene = Scene(tmp_path)
    collector = await scene.collector()
    scene.down()
    with pytest.raises(error):
        await collector.take(scene.ticket, scene.results)
    scene.up()
    assert scene.lengths(await collector.take(scene.ticket, scene.results)) == [20_000]


@virtually
async def test_one_that_is_damaged_is_parked_with_the_reason(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    collector = await scene.collector()
    (path,) = (tmp_path / "blobs").rglob("*.tmqx")
    path.write_bytes(b"short")
    assert await collector.take(scene.ticket, scene.results) == []
    (reason,) = scene.world.reasons()
    assert "has 5 bytes" in reason
