"""Blobs that nobody needs any more: removed once their queue was gone for long enough, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import ExperienceReference
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.transport.batch_blobs import (
    GRACE,
    SWEEP_INTERVAL,
    BlobSweep,
    delete_blobs,
    part_name,
    store_large_bodies,
)
from trinity_mq.transport.blobs import BlobStore

Act = Callable[[MemoryBus, BlobStore], Coroutine[Any, Any, None]]
TOPOLOGY = Topology("r")


def play(folder: Path, act: Act) -> list[Any]:
    """Run ``act`` beside a sweep."""
    store = BlobStore(f"file://{folder}/blobs", "r", 1 << 20)

    async def main() -> None:
        bus = MemoryBus(MemoryBroker(), TOPOLOGY, config=BrokerConfig())
        await bus.connect()
        sweep = asyncio.create_task(BlobSweep(bus, TOPOLOGY, store).run())
        await act(bus, store)
        assert not sweep.done()
        sweep.cancel()

    with capture_logs() as lines:
        run_virtually(main())
    return lines


def put(store: BlobStore, ticket: str) -> None:
    store.put(part_name(ticket, "a", 0), b"x")


def test_only_what_has_no_queue_is_removed_and_only_after_the_grace(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        await bus.declare(TOPOLOGY.batch_queue(1, "open"))
        for ticket in ("open", "left"):
            put(store, ticket)
        await asyncio.sleep(GRACE - 1)
        assert store.folders("batch") == ["left", "open"]
        await asyncio.sleep(2 * SWEEP_INTERVAL + 1)
        assert store.folders("batch") == ["open"]
        await bus.delete(TOPOLOGY.batch_queue(1, "open").name)
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        assert store.folders("batch") == ["open"]
        await asyncio.sleep(3 * SWEEP_INTERVAL)
        assert store.folders("batch") == []

    play(tmp_path, act)


def test_a_queue_that_is_there_again_starts_the_grace_anew(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        put(store, "t")
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        await bus.declare(TOPOLOGY.batch_queue(1, "t"))
        await asyncio.sleep(2 * SWEEP_INTERVAL)
        await bus.delete(TOPOLOGY.batch_queue(1, "t").name)
        await asyncio.sleep(GRACE - SWEEP_INTERVAL)
        assert store.folders("batch") == ["t"]

    play(tmp_path, act)


def test_a_store_that_is_down_for_a_while_ends_no_sweep(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        put(store, "t")
        (tmp_path / "blobs").rename(tmp_path / "aside")
        (tmp_path / "blobs").write_bytes(b"")
        await asyncio.sleep(2 * SWEEP_INTERVAL)
        (tmp_path / "blobs").unlink()
        (tmp_path / "aside").rename(tmp_path / "blobs")
        assert store.folders("batch") == ["t"]
        await asyncio.sleep(GRACE + 3 * SWEEP_INTERVAL)
        assert store.folders("batch") == []

    assert "sweep_failed" in {line["event"] for line in play(tmp_path, act)}


def test_what_is_left_in_the_folder_by_others_is_not_touched(tmp_path: Path) -> None:
    async def act(bus: MemoryBus, store: BlobStore) -> None:
        put(store, "t")
        (tmp_path / "blobs/r/batch/.snapshot").mkdir()
        await asyncio.sleep(2 * GRACE)
        assert [path.name for path in (tmp_path / "blobs/r/batch").iterdir()] == [".snapshot"]

    play(tmp_path, act)


def test_only_what_no_message_takes_is_stored(tmp_path: Path) -> None:
    store = BlobStore(f"file://{tmp_path}", "r", 1 << 20)
    bodies = [b"x" * 10, b"y" * 11, b"z" * 10]
    contents = run_virtually(store_large_bodies(store, bodies, 10, lambda n: part_name("t", "a", n)))
    assert [contents[0], contents[2]] == [bodies[0], bodies[2]]
    assert isinstance(contents[1], ExperienceReference)
    assert contents[1].url.endswith("/r/batch/t/a-1.tmqx")
    assert store.get(contents[1]) == bodies[1]
    assert run_virtually(store_large_bodies(None, bodies, 20, lambda n: "x")) == bodies


def test_a_deletion_that_fails_is_left_to_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"")
    store = BlobStore(f"file://{tmp_path}/blobs", "r", 1 << 20)
    with capture_logs() as lines:
        run_virtually(delete_blobs(store, "batch/t"))
        run_virtually(delete_blobs(store, "batch/../t"))
        run_virtually(delete_blobs(None, "batch/t"))
    assert [line["names"] for line in lines if line["event"] == "blobs_not_deleted"] == [("batch/t",), ("batch/../t",)]
