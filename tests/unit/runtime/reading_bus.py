"""A connected bus in memory that reads a work queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trinity_mq.bus import Consumer, Delivery, Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config.bus import BrokerConfig


class ReadingBus(MemoryBus):
    """Reads one work queue."""

    feed: Consumer

    async def received(self) -> Delivery:
        """Return the next delivery of the queue."""
        return await anext(self.feed)

    async def dead(self) -> list[Delivery]:
        """Return what is in the queue of dead letters."""
        feed = await self.consume(self._topology.dead)
        letters = []
        while (delivery := feed.get_nowait()) is not None:
            letters.append(delivery)
        return letters


@asynccontextmanager
async def reading(topology: Topology, queue: Queue) -> AsyncIterator[ReadingBus]:
    bus = ReadingBus(MemoryBroker(), topology, config=BrokerConfig())
    await bus.connect()
    await bus.declare(*topology.durable)
    bus.feed = await bus.consume(queue)
    yield bus
    await bus.close()
