"""The two worlds in which the contract of a Bus is tested, each with the faults that its broker can be made to have."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from tests.waiting import until
from trinity_mq.bus.base import Bus, Envelope
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.testing.tcp_proxy import FaultProxy


class World(ABC):
    """Makes buses on one broker."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.stack = AsyncExitStack()

    @abstractmethod
    async def bus(self, config: BrokerConfig | None = None) -> Bus:
        """Return a connected bus, closed at the test's end."""

    @abstractmethod
    def cut(self, bus: Bus) -> None:
        """Cut the connections of a bus; it may connect again at once."""

    @abstractmethod
    def keep_out(self, bus: Bus) -> None:
        """Cut the connections of a bus; it may not connect again until :meth:`let_in`."""

    @abstractmethod
    def let_in(self, bus: Bus) -> None:
        """Let a bus connect again."""

    @abstractmethod
    async def publish_with_lost_confirm(self, bus: Bus, queue: Queue, envelope: Envelope) -> bool:
        """Publish to ``queue`` where the message is stored but its first confirm is lost."""


class MemoryWorld(World):
    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.broker = MemoryBroker()

    async def bus(self, config: BrokerConfig | None = None) -> Bus:
        bus = MemoryBus(self.broker, self.topology, config=config or BrokerConfig())
        self.stack.push_async_callback(bus.close)
        await bus.connect()
        return bus

    def cut(self, bus: Bus) -> None:
        assert isinstance(bus, MemoryBus)
        self.broker.drop(bus, delay=0.02)

    def keep_out(self, bus: Bus) -> None:
        assert isinstance(bus, MemoryBus)
        self.broker.drop(bus, delay=None)

    def let_in(self, bus: Bus) -> None:
        assert isinstance(bus, MemoryBus)
        self.broker.restore(bus)

    async def publish_with_lost_confirm(self, bus: Bus, queue: Queue, envelope: Envelope) -> bool:
        self.broker.lose_confirm_once()
        return await bus.publish("", queue.name, envelope)


class RabbitWorld(World):
    def __init__(self, topology: Topology, url: str) -> None:
        super().__init__(topology)
        self.url = url
        self.proxies: dict[Bus, FaultProxy] = {}

    async def bus(self, config: BrokerConfig | None = None) -> Bus:
        proxy = await self.stack.enter_async_context(FaultProxy(self.url))
        bus = RabbitBus(proxy.url, self.topology, config=config or BrokerConfig(), name="contract")
        self.proxies[bus] = proxy
        self.stack.push_async_callback(bus.close)
        await bus.connect()
        return bus

    def cut(self, bus: Bus) -> None:
        self.proxies[bus].cut()

    def keep_out(self, bus: Bus) -> None:
        self.proxies[bus].refuse()

    def let_in(self, bus: Bus) -> None:
        self.proxies[bus].accept()

    async def publish_with_lost_confirm(self, bus: Bus, queue: Queue, envelope: Envelope) -> bool:
        witness = await self.bus()

        async def stored() -> bool:
            return bool(await witness.depth(queue.name))

        self.proxies[bus].hold_replies()
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(bus.publish("", queue.name, envelope))
            await until(stored)
            self.proxies[bus].cut()
        return publishing.result()
