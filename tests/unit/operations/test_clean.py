"""``trinity-mq broker clean``: what a run has left goes; a run at work, and other runs, keep everything."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiormq
import pytest

from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_mq.bus import Topology, create_bus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import BatchClosed, TaskBody, TaskResult, TaskResults, TaskSlice
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.transport.blobs import BlobStore


def test_without_a_broker_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker", "clean", "some-run"]) == 2
    assert "give --broker URL" in capsys.readouterr().err


@pytest.mark.broker
def test_what_a_run_left_goes(
    broker_url: str, unique_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topology = Topology(unique_run)
    config = tmp_path / "c.yaml"
    config.write_text(
        f"name: {unique_run}\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}/run\nbroker: {{blob_store: {tmp_path}/blobs}}"
    )
    (mine, other) = (BlobStore(f"file://{tmp_path}/blobs", run, 1 << 20) for run in (unique_run, "other"))
    for store in (mine, other):
        store.put("batch/stored/a-0.tmqx", b"x")
        store.put("ready/t/o-0.tmqx", b"x")
    state = ExplorerState()
    state.following.add(BatchClosed(batch=1, ticket="followed"))
    batches = [topology.batch_queue(1, ticket) for ticket in ("followed", "stored")]
    words = ["broker", "clean", str(config), "--broker", broker_url]

    async def play() -> None:
        await StateFile.of(tmp_path / "run").save(state)
        bus = create_bus(BrokerConfig(url=broker_url), topology, "test")
        await bus.connect()
        await bus.declare(*topology.durable, *batches)
        lock = await bus.lock(topology.lock("trainer"))
        assert await asyncio.to_thread(main, words) == 2
        assert "is running" in capsys.readouterr().err
        assert await bus.depth(topology.ready.name) == 0
        assert mine.folders("batch") == ["stored"]
        await lock.release()
        assert await asyncio.to_thread(main, words) == 0
        assert [await bus.depth(queue.name) for queue in (*topology.durable, *batches)] == [None] * 9
        await bus.close()

    asyncio.run(play())
    out = capsys.readouterr().out
    assert "9 queues deleted" in out
    assert f"blobs deleted: {mine.url}" in out
    assert not (tmp_path / "blobs" / unique_run).exists()
    assert other.folders("batch") == ["stored"]
    assert main(words) == 0  # again: nothing is left, and that is fine
    assert "0 queues deleted" in capsys.readouterr().out


@pytest.mark.broker
def test_by_name_it_leaves_nothing_either_also_after_a_deletion_that_was_interrupted(
    broker_url: str, unique_run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the run folder the batch queues are known by the messages on the broker alone."""
    topology = Topology(unique_run)
    batches = {name: topology.batch_queue(1, name) for name in ("sliced", "alone", "together", "closed", "failed")}
    results = [TaskResult(batch=1, ticket=name, task_id=0, attempt=name, outcome="failed") for name in batches]
    messages = (
        ("tasks", "train.1", envelope(TaskSlice(batch=1, ticket="sliced", task_id=0, task=TaskBody()))),
        ("results", "1", envelope(results[1])),
        ("results", "1", envelope(TaskResults(results=results[2:3]))),
        ("batches", "closed", envelope(BatchClosed(batch=1, ticket="closed"))),
        ("dead", "closed", envelope(BatchClosed(batch=1, ticket="failed"))),
    )
    words = ["broker", "clean", unique_run, "--broker", broker_url]
    delete, deleted = RabbitBus.delete, []

    async def interrupted(self: RabbitBus, name: str) -> None:
        if len(deleted) == 3:
            raise KeyboardInterrupt
        deleted.append(name)
        await delete(self, name)

    async def fill() -> None:
        bus = create_bus(BrokerConfig(url=broker_url), topology, "test")
        await bus.connect()
        await bus.declare(*topology.durable, *batches.values())
        for exchange, key, message in messages:
            assert await bus.publish(topology.exchange(exchange), key, message)
        await bus.close()

    async def left() -> list[str]:
        connection = await aiormq.connect(broker_url)
        found = []
        for name in [queue.name for queue in (*topology.durable, *batches.values())]:
            with contextlib.suppress(aiormq.exceptions.ChannelNotFoundEntity):
                await (await connection.channel()).queue_declare(name, passive=True)
                found.append(name)
        for name in topology.exchanges:
            with contextlib.suppress(aiormq.exceptions.ChannelNotFoundEntity):
                await (await connection.channel()).exchange_declare(name, passive=True)
                found.append(name)
        await connection.close()
        return found

    asyncio.run(fill())
    monkeypatch.setattr(RabbitBus, "delete", interrupted)
    assert main(words) == 130
    monkeypatch.undo()
    assert len(asyncio.run(left())) > 3
    assert main(words) == 0
    assert asyncio.run(left()) == []


@pytest.mark.broker
def test_by_name_it_needs_to_be_told_where_the_blobs_are(
    broker_url: str, unique_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = BlobStore(f"file://{tmp_path}", unique_run, 1 << 20)
    store.put("batch/t/a-0.tmqx", b"x")
    words = ["broker", "clean", unique_run, "--broker", broker_url]
    assert main(words) == 0
    assert "no blob store is known" in capsys.readouterr().out
    assert store.folders("batch") == ["t"]
    assert main([*words, "--blob-store", str(tmp_path)]) == 0
    assert store.folders("batch") == []
