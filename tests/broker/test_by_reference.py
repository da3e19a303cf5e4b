"""A body over the message limit through a real broker: part, operator, chunk, trainer's source, and the deletions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.unit.agents.world import a_slice, experience
from trinity_agents.operator.agent import Operator
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Topology, create_bus
from trinity_mq.config import load_config
from trinity_mq.experience import Experience
from trinity_mq.messages import Accepted, BatchClosed
from trinity_mq.runtime.deliveries import REFERENCE, envelope
from trinity_mq.transport.blobs import open_store
from trinity_mq.transport.experience_parts import part_message

pytestmark = pytest.mark.broker


async def test_an_experience_over_the_limit_reaches_the_trainer(
    broker_url: str, topology: Topology, tmp_path: Path
) -> None:
    config = load_config(
        {"name": topology.run, "model": {"tiny": {}}, "algorithm": {"min_group_runs": 1}, "run_dir": str(tmp_path)},
        [f"broker.url={broker_url}", "broker.max_message_bytes=65536", f"broker.blob_store={tmp_path}/blobs"],
    )
    store = open_store(config.broker, topology.run)
    assert store is not None
    bus = create_bus(config.broker, topology, "test")
    await bus.connect()
    queue = topology.batch_queue(1, "t1")
    await bus.declare(*topology.durable, queue)
    sent = experience(length=20_000, routed_experts=None)
    reference = store.put("batch/t1/a-0.tmqx", Experience.serialize_many([sent]))
    assert reference.bytes > bus.max_message_bytes
    mail = part_message(a_slice(), "a", 0, 1, reference)
    assert mail.content_type == REFERENCE
    assert await bus.publish(topology.exchange("experiences"), topology.batch_routing_key(1, "t1"), mail)
    await bus.unbind(queue)
    closed = BatchClosed(
        batch=1, ticket="t1", accepted=[Accepted(task_id=0, run_base=0, attempt="a", runs=[0], parts=1)]
    )
    assert await bus.publish(topology.exchange("batches"), "closed", envelope(closed))

    made = create_bus(config.broker, topology, "operator-0")
    operator = Operator(config, bus=made, topology=topology, agent_id="operator-0")
    source = StreamSource(bus, topology, "trainer-0", store)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        working, reading = group.create_task(operator.run()), group.create_task(source.run())
        batch = await source.next()
        operator.drain()
        await working
        reading.cancel()
    assert (batch.state, len(batch.experiences)) == ("ready", 1)
    assert torch.equal(batch.experiences[0].tokens, sent.tokens)
    assert await bus.depth(queue.name) is None
    assert store.folders("batch") == []
    assert store.folders("ready") == ["t1"]
    await bus.close()
