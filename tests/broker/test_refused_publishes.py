"""What a real broker refuses, and confirms that it loses: both are tried again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiormq
import pytest
from aiormq.channel import Channel
from aiormq.exceptions import DeliveryError

from tests.waiting import until
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.rabbit import publisher as _rabbit_publisher
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig

NARROW = {"x-max-length": 3, "x-overflow": "reject-publish"}
COUNT = 12

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


def note(number: int) -> Envelope:
    return Envelope(body=b"%d" % number, kind="note", message_id=f"note-{number}")


@pytest.fixture
async def bus(broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    made = RabbitBus(broker_url, topology, config=BrokerConfig(), name="test")
    await made.connect()
    await made.declare(topology.dead)
    yield made
    await made.close()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_nacked_publishes_are_repeated_until_there_is_room(
    bus: RabbitBus, broker_url: str, topology: Topology, kind: str
) -> None:
    """A message for two queues of which one is full is nacked, and yet in the other: its repeats have the same id."""
    changes: list[bool] = []
    bus.on_change(lambda: changes.append(bus.usable))
    narrow = topology.prefix + "narrow"
    async with aiormq.connect(broker_url) as connection:
        channel = await connection.channel()
        await channel.queue_declare(narrow, durable=True, arguments={**NARROW, "x-queue-type": kind})
        for _ in range(3):
            await channel.basic_publish(b"filling", routing_key=narrow)
        with contextlib.suppress(DeliveryError):  # a quorum queue takes one more than it may
            await channel.basic_publish(b"filling", routing_key=narrow)
        await channel.queue_bind(narrow, topology.exchange("dead"), "#")
        try:
            async with asyncio.TaskGroup() as group:
                made = [group.create_task(bus.publish(topology.exchange("dead"), "x", note(n))) for n in range(COUNT)]
                await until(lambda: _more_than(bus, topology.dead.name, COUNT), 30)
                assert not any(task.done() for task in made)
                while not all(task.done() for task in made):
                    await channel.basic_get(narrow, no_ack=True)
                    await asyncio.wait(made, timeout=0.02)
            assert all(task.result() is True for task in made)
        finally:
            await channel.queue_delete(narrow)
    assert not changes, "a refusal is not the connection's end"
    depth = await bus.depth(topology.dead.name) or 0
    assert depth > COUNT, "the wide queue has got the repeats too"
    async with await bus.consume(topology.dead) as feed:
        seen = [await anext(feed) for _ in range(depth)]
    assert {one.message_id for one in seen} == {f"note-{n}" for n in range(COUNT)}
    assert {one.message_id: one.body for one in seen} == {f"note-{n}": b"%d" % n for n in range(COUNT)}


async def _more_than(bus: RabbitBus, queue: str, count: int) -> bool:
    return (await bus.depth(queue) or 0) > count


async def test_a_confirm_that_never_comes_is_not_waited_for(
    bus: RabbitBus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may lose one with a queue's leader, while the connection and all others go on."""
    real, lost = Channel.basic_publish, asyncio.Event()

    async def loses_one(channel: Channel, body: bytes, **how: Any) -> Any:
        confirmed = await real(channel, body, **how)
        if body == b"7" and not lost.is_set():
            lost.set()
            await asyncio.Event().wait()
        return confirmed

    monkeypatch.setattr(_rabbit_publisher, "PATIENCE", 0.5)
    monkeypatch.setattr(Channel, "basic_publish", loses_one)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        made = [group.create_task(bus.publish("", topology.dead.name, note(n))) for n in range(COUNT)]
    assert lost.is_set()
    assert all(task.result() is True for task in made)
    depth = await bus.depth(topology.dead.name) or 0
    async with await bus.consume(topology.dead) as feed:
        seen = [(await anext(feed)).message_id for _ in range(depth)]
    assert seen.count("note-7") >= 2, "it was there, but nobody knew"
    assert set(seen) == {f"note-{n}" for n in range(COUNT)}
