"""``inspect`` on a real broker, beside a trainer's source that reads the same stream. One experience of each batch is
over the message limit: part, operator, chunk, trainer's source and deletions by way of the blob store.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.world import a_slice, experience
from trinity_agents.operator.agent import Operator
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.cli.main import main
from trinity_mq.config import Config, load_config
from trinity_mq.experience import EID, Experience
from trinity_mq.messages import Accepted, BatchClosed
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.transport.blobs import open_store
from trinity_mq.transport.experience_parts import chunk_message, part_message

pytestmark = pytest.mark.broker


@pytest.fixture
def config(broker_url: str, topology: Topology, tmp_path: Path) -> Config:
    return load_config(
        {"name": topology.run, "model": {"tiny": {}}, "algorithm": {"min_group_runs": 1}, "run_dir": str(tmp_path)},
        [f"broker.url={broker_url}", "broker.max_message_bytes=65536", f"broker.blob_store={tmp_path}/blobs"],
    )


async def processed(config: Config, topology: Topology, batches: list[int]) -> list[Experience]:
    """Have an operator process batches, of a small and a large experience each; returns what a trainer reads."""
    bus = create_bus(config.broker, topology, "test")
    await bus.connect()
    await bus.declare(*topology.durable)
    store = open_store(config.broker, topology.run)
    for batch in batches:
        await _close(bus, topology, config, batch)
    operator = Operator(
        config, bus=create_bus(config.broker, topology, "operator-0"), topology=topology, agent_id="operator-0"
    )
    source, found = StreamSource(bus, topology, "trainer-0", store), []
    async with asyncio.timeout(40), asyncio.TaskGroup() as group:
        working, reading = group.create_task(operator.run()), group.create_task(source.run())
        for _ in range(max(batches)):
            found += list((await source.next()).experiences)
            source.consumed()
        operator.drain()
        await working
        reading.cancel()
    await bus.close()
    return found


async def _close(bus: Bus, topology: Topology, config: Config, batch: int) -> None:
    ticket, store = f"t{batch}", open_store(config.broker, topology.run)
    assert store is not None
    queue = topology.batch_queue(batch, ticket)
    await bus.declare(queue)
    made = [experience(length=length, eid=EID(batch=batch, task=task)) for task, length in enumerate((5, 20_000))]
    for task, one in enumerate(made):
        content: Any = Experience.serialize_many([one])
        if len(content) > bus.max_message_bytes:
            content = store.put(f"batch/{ticket}/a{task}-0.tmqx", content)
        mail = part_message(a_slice(ticket=ticket, task_id=task, batch=batch), f"a{task}", 0, 1, content)
        assert await bus.publish(topology.exchange("experiences"), topology.batch_routing_key(batch, ticket), mail)
    await bus.unbind(queue)
    accepted = [Accepted(task_id=task, run_base=0, attempt=f"a{task}", runs=[0], parts=1) for task in range(2)]
    closed = BatchClosed(batch=batch, ticket=ticket, accepted=accepted)
    assert await bus.publish(topology.exchange("batches"), "closed", envelope(closed))


async def half_a_batch(config: Config, topology: Topology) -> None:
    """Publish a chunk that nobody is about to complete."""
    bus = create_bus(config.broker, topology, "test")
    await bus.connect()
    await bus.declare(*topology.durable)
    mail = chunk_message(BatchClosed(batch=3, ticket="t3"), "o", 0, Experience.serialize_many([experience()]))
    assert await bus.publish(topology.exchange("ready"), "3", mail)
    await bus.close()


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]], str]:
    capsys.readouterr()  # what was logged by those that play the run
    code = main(["inspect", *words, "--json"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_what_an_operator_publishes_is_seen_and_stays_for_the_trainer(
    config: Config, topology: Topology, broker_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [topology.run, "--broker", broker_url]
    code, _, err = inspected(capsys, *words)
    assert (code, "has no stream of experiences on this broker" in err) == (2, True)
    asyncio.run(half_a_batch(config, topology))
    code, shown, err = inspected(capsys, *words)
    assert (code, shown) == (1, [])
    assert "holds no processed batch yet; under way: batch 3" in err
    trained = asyncio.run(processed(config, topology, [1]))
    store = open_store(config.broker, topology.run)
    assert store is not None
    assert (store.folders("batch"), store.folders("ready")) == ([], ["t1"])
    blobs = ["--blob-store", f"{tmp_path}/blobs"]
    for _ in range(2):
        code, shown, err = inspected(capsys, *words, *blobs)
        assert code == 0
        assert [one["tokens"] for one in shown] == [one.tokens.tolist() for one in trained]
        for one, read in zip(shown, trained, strict=True):
            assert read.logprobs is not None
            assert read.action_mask is not None
            assert read.advantages is not None
            assert one["logprobs"] == read.logprobs.tolist()
            assert one["action_mask"] == read.action_mask.tolist()
            assert one["advantages"] == read.advantages.tolist()
            assert (one["reward"], one["eid"]) == (read.reward, read.eid.to_dict())
    code, shown, err = inspected(capsys, *words)
    assert (code, len(shown)) == (0, 1), "without the store"
    assert "blob_store" in err
    asyncio.run(processed(config, topology, [2]))  # the stream is read on by a trainer as if nobody had looked
    code, shown, _ = inspected(capsys, *words, *blobs, "--batch", "2", "--task", "1")
    assert [(one["eid"]["batch"], one["eid"]["task"], len(one["tokens"])) for one in shown] == [(2, 1, 20_000)]
    code, shown, err = inspected(capsys, *words, "--batch", "7")
    assert (code, shown) == (1, [])
    assert f"{topology.run} has no batch 7; it has 2 batches, 1 to 2" in err
