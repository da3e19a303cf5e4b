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
