"""``trinity-mq broker`` and the broker of a run, with a real RabbitMQ where one is installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import aiormq
import pytest

from trinity_agents.explorer.state import ExplorerState, StateFile
from trinity_mq.bus import Topology, create_bus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.cli.main import main
from trinity_mq.config import BrokerConfig, SupervisorConfig
from trinity_mq.local_broker.node import NodeError, find_rabbitmq
from trinity_mq.messages import BatchClosed, TaskBody, TaskResult, TaskResults, TaskSlice
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.targets.private_broker import broker_folder, private_broker
from trinity_mq.transport.blobs import BlobStore

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.broker
private = pytest.mark.skipif(find_rabbitmq() is None, reason="a private node needs an installed RabbitMQ")


def command(*words: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "broker", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **variables},
    )
    return done.returncode, done.stdout, done.stderr


async def can_connect(url: str, run: str = "t") -> None:
    bus = create_bus(BrokerConfig(url=url), Topology(run), "test")
    await bus.connect()
    await bus.close()


@private
def test_start_status_stop(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    assert command("status", str(folder)) == (1, f"no broker runs in {folder}\n", "")
    code, url, err = command("start", str(folder))
    assert (code, err) == (0, "")
    try:
        asyncio.run(can_connect(url.strip()))
        assert command("start", str(folder)) == (0, url, "")
        pid = broker_folder(folder).holder()
        assert command("status", str(folder)) == (0, f"runs as process {pid}: {url}", "")
        assert stat.S_IMODE((folder / "serve.url").stat().st_mode) == 0o600
        code, out, err = command("serve", str(folder))
        assert (code, out) == (2, "")
        assert err == f"trinity-mq broker: process {pid} already serves a broker in {folder}\n"
    finally:
        assert command("stop", str(folder)) == (0, f"stopped the broker in {folder}\n", "")
    assert command("status", str(folder))[0] == 1
    assert command("stop", str(folder)) == (0, f"no broker runs in {folder}\n", "")


@private
def test_what_keeps_it_from_starting_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "node.json").write_text("{")
    code, out, err = command("start", str(tmp_path / "b"))
    assert (code, out) == (2, "")
    assert err.startswith("trinity-mq broker: the broker did not start: ")
    assert "node.json cannot be read" in err
    assert len(err.splitlines()) == 1


@private
async def test_one_that_dies_too_often_ends_the_run(tmp_path: Path) -> None:
    async with asyncio.timeout(50):
        with pytest.RaisesGroup(pytest.RaisesExc(NodeError, match="died 1 times within 600 s")):
            async with private_broker(tmp_path, SupervisorConfig(max_restarts=0), lambda _text: None):
                os.kill(int((tmp_path / "lock").read_text()), signal.SIGKILL)
                await asyncio.Event().wait()


@private
async def test_one_whose_files_cannot_be_written_names_its_folder(tmp_path: Path) -> None:
    wanted = f"the broker died and cannot be started again in {tmp_path}: Is a directory"
    async with asyncio.timeout(50):
        with pytest.RaisesGroup(pytest.RaisesExc(NodeError, match=wanted)):
            async with private_broker(tmp_path, SupervisorConfig(), lambda _text: None):
                (tmp_path / "rabbitmq.conf").unlink()
                (tmp_path / "rabbitmq.conf").mkdir()
                os.kill(int((tmp_path / "lock").read_text()), signal.SIGKILL)
                await asyncio.Event().wait()


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


def test_by_name_it_leaves_nothing_either_also_after_a_deletion_that_was_interrupted(
    broker_url: str,
    unique_run: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    assert main(["broker", "clean", unique_run]) == 2
    assert "give --broker URL" in capsys.readouterr().err
    words = ["broker", "clean", unique_run, "--broker", broker_url]
    store = BlobStore(f"file://{tmp_path}", unique_run, 1 << 20)
    store.put("batch/t/a-0.tmqx", b"x")
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
        connection, found = await aiormq.connect(broker_url), []
        queues = [queue.name for queue in (*topology.durable, *batches.values())]
        for kind, names in (("queue", queues), ("exchange", topology.exchanges)):
            for name in names:
                with contextlib.suppress(aiormq.exceptions.ChannelNotFoundEntity):
                    await getattr(await connection.channel(), f"{kind}_declare")(name, passive=True)
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
    assert "no blob store is known" in capsys.readouterr().out
    assert store.folders("batch") == ["t"]
    assert main([*words, "--blob-store", str(tmp_path)]) == 0
    assert store.folders("batch") == []
