"""Silence on a stream means something only while the bus was usable."""

from __future__ import annotations

import asyncio

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.messages import Mark
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.testing.virtual_time import run_virtually


async def reader() -> tuple[MemoryBroker, MemoryBus, Topology]:
    broker, topology = MemoryBroker(), Topology("s")
    bus = MemoryBus(broker, topology, config=BrokerConfig())
    await bus.connect()
    await bus.declare(*topology.durable)
    return broker, bus, topology


def test_what_comes_in_time_is_returned_and_silence_is_none() -> None:
    async def scene() -> None:
        _, bus, topology = await reader()
        feed = await bus.consume(topology.ready, offset=0)
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await next_or_quiet(bus, feed, 60.0) is None
        assert loop.time() - started == 60.0
        await bus.publish(topology.exchange("ready"), "x", envelope(Mark(nonce="n")))
        assert await next_or_quiet(bus, feed, 60.0) is not None

    run_virtually(scene(), limit=500)


def test_an_outage_starts_the_count_anew() -> None:
    async def scene() -> None:
        broker, bus, topology = await reader()
        feed = await bus.consume(topology.ready, offset=0)
        other = MemoryBus(broker, topology, config=BrokerConfig())
        await other.connect()
        waiting = asyncio.ensure_future(next_or_quiet(bus, feed, 60.0))
        await asyncio.sleep(50.0)
        broker.drop(bus, delay=120.0)
        await asyncio.sleep(170.0)  # 50 s on a usable bus
        await other.publish(topology.exchange("ready"), "x", envelope(Mark(nonce="n")))
        assert await waiting is not None

    run_virtually(scene(), limit=500)
