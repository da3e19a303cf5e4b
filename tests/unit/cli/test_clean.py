"""``trinity-mq broker clean``: what a run has left goes; a run at work, and other runs, keep everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_mq.bus import Topology, create_bus
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import BatchClosed
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
        await StateFile(tmp_path / "run" / "state" / "explorer.db").save(state)
        bus = create_bus(BrokerConfig(url=broker_url), topology, "test")
        await bus.connect()
        await bus.declare(*topology.durable, *batches)
        lock = await bus.lock(topology.lock("trainer"))
        assert await asyncio.to_thread(main, words) == 2
        assert "is at work" in capsys.readouterr().err
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
