"""The faults that MemoryBroker can be asked for, its clock, and what silence on a stream means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from trinity_mq.bus.base import BusUnavailable, Envelope, StreamCut
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import Mark
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually

TOPOLOGY = Topology("unit")


def note(text: str) -> Envelope:
    return Envelope(body=text.encode(), kind="note")


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    made = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
    await made.connect()
    yield made
    await made.close()


def test_follows_the_loops_clock() -> None:
    """Ten minutes of outage, alarm and timeouts in no time at all."""

    async def scenario() -> None:
        broker = MemoryBroker()
        bus = MemoryBus(broker, TOPOLOGY, config=BrokerConfig(connect_timeout=60))
        await bus.connect()
        await bus.declare(TOPOLOGY.dead)
        broker.drop(bus, delay=200)
        assert bus.trouble == "connection lost"
        assert await bus.publish("", TOPOLOGY.dead.name, note("a"))
        broker.block()
        with pytest.raises(BusUnavailable, match=r"not confirmed in 300 s: the broker blocks publishers"):
            await bus.publish("", TOPOLOGY.dead.name, note("b"))
        broker.unblock()
        broker.drop(bus, delay=None)
        with pytest.raises(BusUnavailable, match="not connected in 60 s: connection lost"):
            await bus.depth(TOPOLOGY.dead.name)
        broker.drop(bus, delay=10)
        await bus.close()
        assert 560 <= asyncio.get_running_loop().time() < 562
        await asyncio.sleep(20)
        assert (bus.usable, bus.trouble) == (False, "the bus is closed"), "it does not return"

    run_virtually(scenario(), limit=1000)


STREAM = Queue(name="s", kind="stream", max_length_bytes=3)


async def test_a_reader_that_retention_cut_or_overtook_while_away_is_told(broker: MemoryBroker, bus: MemoryBus) -> None:
    await bus.declare(STREAM)
    writer = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
    await writer.connect()
    for text in "abcde":
        await writer.publish("", "s", note(text))
    with pytest.raises(StreamCut, match="stream s: offset 1 was requested, the first stored offset is 2") as cut:
        await anext(await bus.consume(STREAM, offset=1))
    assert (cut.value.asked, cut.value.got) == (1, 2)
    consumer = await bus.consume(STREAM, offset=2)
    assert [(await anext(consumer)).offset for _ in range(3)] == [2, 3, 4]
    broker.drop(bus, delay=None)
    for text in "fghij":
        await writer.publish("", "s", note(text))
    broker.restore(bus)
    with pytest.raises(StreamCut):
        await anext(consumer)
    await writer.close()


def test_silence_is_none_and_an_outage_starts_the_count_anew() -> None:
    async def scene() -> None:
        broker, topology = MemoryBroker(), Topology("s")
        bus, other = (MemoryBus(broker, topology, config=BrokerConfig()) for _ in range(2))
        await bus.connect()
        await other.connect()
        await bus.declare(*topology.durable)
        feed = await bus.consume(topology.ready, offset=0)
        assert await next_or_quiet(bus, feed, 60.0) is None
        assert asyncio.get_running_loop().time() == 60.0
        waiting = asyncio.ensure_future(next_or_quiet(bus, feed, 60.0))
        await asyncio.sleep(50.0)
        broker.drop(bus, delay=120.0)
        await asyncio.sleep(170.0)  # 50 s on a usable bus
        await other.publish(topology.exchange("ready"), "x", envelope(Mark(nonce="n")))
        assert await waiting is not None

    run_virtually(scene(), limit=500)
