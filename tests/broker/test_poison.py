"""Messages whose properties the AMQP client cannot decode, on a real broker: the next message arrives."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from tests.raw_amqp import RawPublisher, long, nested, properties, short
from trinity_mq.bus.base import Delivery, Envelope, QueueGone
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Queue, Topology

pytestmark = pytest.mark.broker

TIMESTAMP = properties(timestamp=struct.pack(">Q", 2**62), message_id=short(b"old"))
NO_UTF8 = properties(message_id=short(b"\xff\xfe"))
NESTED = properties(headers=long(nested(3000)), message_id=short(b"deep"))
OFFSET = properties(headers=long(short(b"x-stream-offset") + b"l" + struct.pack(">q", 2**40)), message_id=short(b"far"))
GOOD = properties(message_id=short(b"good"))


@pytest.fixture
async def bus(bus: RabbitBus, topology: Topology) -> RabbitBus:
    await bus.declare(*topology.durable, topology.sessions)
    return bus


async def until_good(bus: RabbitBus, queue: Queue) -> list[Delivery]:
    offset = 0 if queue.kind == "stream" else None
    seen = []
    async with asyncio.timeout(20), await bus.consume(queue, offset=offset) as feed:
        async for delivery in feed:
            seen.append(delivery)
            if delivery.message_id == "good":
                return seen
    raise AssertionError("the good message never came")


@pytest.mark.parametrize(("exchange", "key"), [("tasks", b"submit"), ("sessions", b"session"), ("ready", b"mark")])
async def test_unreadable_properties_do_not_end_the_connection(
    broker_url: str, topology: Topology, bus: RabbitBus, exchange: str, key: bytes
) -> None:
    queue = {"tasks": topology.submitted, "sessions": topology.sessions, "ready": topology.ready}[exchange]
    with contextlib.closing(await asyncio.to_thread(RawPublisher, broker_url)) as raw:
        for fields in (TIMESTAMP, NO_UTF8, NESTED, OFFSET, GOOD):
            assert await asyncio.to_thread(raw.publish, topology.exchange(exchange), key, b"{}", fields)
    seen = await until_good(bus, queue)
    assert [delivery.message_id for delivery in seen] == ["old", "\\xff\\xfe", "deep", "far", "good"]
    assert [delivery.unreadable is not None for delivery in seen] == [False, True, False, False, False]
    assert [delivery.offset for delivery in seen] == ([None] * 5 if queue.kind != "stream" else list(range(5)))
    assert bus.usable


async def test_a_routing_key_of_any_bytes_reaches_the_receivers_of_a_broadcast(
    broker_url: str, topology: Topology, bus: RabbitBus
) -> None:
    control = topology.listener("a", "1", "control", "*.all")
    await bus.declare(control)
    async with asyncio.timeout(20), await bus.consume(control) as feed:
        with contextlib.closing(await asyncio.to_thread(RawPublisher, broker_url)) as raw:
            assert await asyncio.to_thread(raw.publish, topology.exchange("control"), b"\xff.all", b"{}", NO_UTF8)
            assert await asyncio.to_thread(raw.publish, topology.exchange("control"), b"drain.all", b"{}", GOOD)
        first, second = await anext(feed), await anext(feed)
    assert (first.routing_key, first.unreadable is not None) == ("\\xff.all", True)
    assert (second.routing_key, second.message_id, second.unreadable) == ("drain.all", "good", None)


async def test_float_headers_arrive_exact_and_long_ids_shortened(topology: Topology, bus: RabbitBus) -> None:
    headers = {"at": 1795872672.25, "big": 1e308, "n": -(2**63) + 1}
    sent = Envelope(body=b"{}", kind="note", message_id="a" * 300, headers=headers)
    assert await bus.publish(topology.exchange("tasks"), "submit", sent)
    assert not await bus.publish("", "q" * 300, sent)
    delivery = await anext(await bus.consume(topology.submitted))
    assert {name: delivery.headers[name] for name in headers} == headers
    assert len(delivery.message_id or "") == 225


@pytest.mark.parametrize("ticket", ["t" * 300, "é", "a\0b", "t" * (256 - len("tmq.t0123456789.batch."))])
async def test_a_ticket_that_no_queue_can_have_as_its_name_is_that_of_no_queue(
    topology: Topology, bus: RabbitBus, ticket: str
) -> None:
    queue = topology.batch_queue(1, ticket)
    assert await bus.depth(queue.name) is None
    await bus.delete(queue.name)
    with pytest.raises(QueueGone):
        await bus.consume(queue)
    assert bus.usable
