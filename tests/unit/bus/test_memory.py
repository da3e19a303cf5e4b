"""The faults that MemoryBroker can be asked for, and that it follows a clock that is not real."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator

import pytest

from trinity_mq.bus.base import BusRefused, BusUnavailable, Envelope, StreamCut
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

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


class _Skipping(selectors.DefaultSelector):
    """Does not wait: tells the loop how long it would have."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("the loop would wait for ever: something is stuck")
        self._loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only where somebody waits for it, and then at once."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now


def test_follows_the_loops_clock() -> None:
    """Ten minutes of outage, alarm and timeouts in no time at all."""

    async def scenario() -> float:
        broker = MemoryBroker()
        bus = MemoryBus(broker, TOPOLOGY, config=BrokerConfig(connect_timeout=60))
        await bus.connect()
        await bus.declare(TOPOLOGY.dead)
        broker.drop(bus, delay=200)
        assert await bus.publish("", TOPOLOGY.dead.name, note("a"))
        broker.block()
        with pytest.raises(BusUnavailable, match=r"not confirmed in 300 s: the broker blocks publishers"):
            await bus.publish("", TOPOLOGY.dead.name, note("b"))
        broker.unblock()
        broker.drop(bus, delay=None)
        with pytest.raises(BusUnavailable, match="not connected in 60 s: connection lost"):
            await bus.depth(TOPOLOGY.dead.name)
        await bus.close()
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        passed = runner.run(scenario())
    assert 560 <= passed < 562


class TestAlarm:
    async def test_publishers_wait_and_are_told(self, broker: MemoryBroker, bus: MemoryBus) -> None:
        await bus.declare(TOPOLOGY.dead)
        consumer = await bus.consume(TOPOLOGY.dead)
        await bus.publish("", TOPOLOGY.dead.name, note("before"))
        broker.block()
        assert "alarm" in (bus.trouble or "")
        publishing = asyncio.create_task(bus.publish("", TOPOLOGY.dead.name, note("during")))
        await (await anext(consumer)).ack()
        assert not publishing.done()
        broker.unblock()
        assert bus.usable
        assert await publishing
        assert (await anext(consumer)).body == b"during"

    async def test_a_bus_that_connects_during_an_alarm_is_not_usable(self, broker: MemoryBroker) -> None:
        broker.block()
        late = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
        await late.connect()
        assert not late.usable
        await late.close()


class TestDrop:
    async def test_returns_after_its_delay(self, broker: MemoryBroker, bus: MemoryBus) -> None:
        broker.drop(bus, delay=0.02)
        assert bus.trouble == "connection lost"
        async with asyncio.timeout(1):
            await bus.wait_usable()

    async def test_one_bus_only(self, broker: MemoryBroker, bus: MemoryBus) -> None:
        other = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
        await other.connect()
        broker.drop(bus, delay=None)
        assert other.usable
        broker.restore(bus)
        assert bus.usable
        await other.close()

    async def test_close_cancels_the_return(self, broker: MemoryBroker) -> None:
        gone = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
        await gone.connect()
        broker.drop(gone, delay=0.01)
        await gone.close()
        await asyncio.sleep(0.03)
        assert not gone.usable
        assert gone.trouble == "the bus is closed"


class TestStreams:
    STREAM = Queue(name="s", kind="stream", max_length_bytes=3)

    async def test_what_retention_cut_is_told(self, bus: MemoryBus) -> None:
        await bus.declare(self.STREAM)
        for text in "abcde":
            await bus.publish("", "s", note(text))
        with pytest.raises(StreamCut, match="stream s: offset 1 was requested, the first stored offset is 2") as cut:
            await anext(await bus.consume(self.STREAM, offset=1))
        assert (cut.value.asked, cut.value.got) == (1, 2)
        consumer = await bus.consume(self.STREAM, offset=2)
        assert [(await anext(consumer)).offset for _ in range(3)] == [2, 3, 4]

    async def test_a_reader_overtaken_by_retention_while_away_is_told(
        self, broker: MemoryBroker, bus: MemoryBus
    ) -> None:
        writer = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
        await writer.connect()
        consumer = await bus.consume(self.STREAM, offset=0)
        await writer.publish("", "s", note("a"))
        assert (await anext(consumer)).offset == 0
        broker.drop(bus, delay=None)
        for text in "bcdef":
            await writer.publish("", "s", note(text))
        broker.restore(bus)
        with pytest.raises(StreamCut):
            await anext(consumer)
        await writer.close()


async def test_an_exclusive_queue_is_its_owners_alone(broker: MemoryBroker, bus: MemoryBus) -> None:
    other = MemoryBus(broker, TOPOLOGY, config=BrokerConfig())
    await other.connect()
    mine = TOPOLOGY.listener("a", "1", "control")
    await bus.declare(mine)
    with pytest.raises(BusRefused, match="exclusive to another"):
        await other.consume(mine)
    await bus.close()
    assert await other.depth(mine.name) is None
    await other.close()


async def test_each_lost_confirm_costs_one_repeat(broker: MemoryBroker, bus: MemoryBus) -> None:
    await bus.declare(TOPOLOGY.dead)
    broker.lose_confirm_once()
    broker.lose_confirm_once()
    assert await bus.publish("", TOPOLOGY.dead.name, note("x"))
    assert await bus.depth(TOPOLOGY.dead.name) == 3
