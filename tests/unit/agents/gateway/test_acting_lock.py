"""One gateway acts for a run, and what it carries over retention says where its first copy was."""

from __future__ import annotations

import asyncio
import random

from tests.unit.agents.gateway.test_sessions import state
from tests.unit.agents.gateway.world import RUN, World, config, until
from tests.virtual import virtually
from trinity_agents.gateway.agent import Gateway
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.messages import SessionEnd, SessionReward


async def holds(agent: Gateway, acts: bool) -> None:
    async with asyncio.timeout(30):
        while not (agent.detail().url and agent.detail().acting == acts):  # noqa: ASYNC110  # as heartbeats do
            await asyncio.sleep(0.01)


async def test_a_gateway_acts_only_while_no_other_one_holds_the_lock() -> None:
    broker, topology, settings = MemoryBroker(), Topology(RUN), config(port=0)
    other, bus = (MemoryBus(broker, topology, config=settings.broker) for _ in range(2))
    await other.connect()
    await other.declare(*topology.durable, topology.sessions)
    lock = await other.lock(topology.lock("gateway"))
    bus.run_id = "run-of-the-world"
    agent = Gateway(settings, bus=bus, topology=topology)
    running = asyncio.create_task(agent.run())
    try:
        await holds(agent, acts=False)
        for _ in range(100):  # nobody says when it does not act
            await asyncio.sleep(0)
        assert not agent.detail().acting
        await lock.release()
        await holds(agent, acts=True)
        agent.drain()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await other.close()


@virtually
async def test_what_is_carried_over_retention_says_where_its_first_copy_was() -> None:
    """Readers order events by it: of two rewards the later one counts, whichever was carried."""
    first: dict[str, int] = {}
    copies: list[tuple[str, object]] = []

    async def read(world: World) -> None:
        bus = world.bus()
        await bus.connect()
        async with await bus.consume(world.topology.sessions, offset=0) as feed:
            async for delivery in feed:
                name = str(delivery.message_id)
                if first.setdefault(name, delivery.offset or 0) != delivery.offset:
                    copies.append((name, delivery.headers.get("origin")))

    world, draw = World(sessions_max_bytes=40_000), random.Random(0)
    async with world.running(), world.gateway() as store:
        reading = asyncio.create_task(read(world))
        await world.session(store, "old", calls=3)
        await store.report(SessionReward(session="old", reward=draw.random()), "r-old")
        for number in range(60):  # several times what the stream keeps
            await world.session(store, f"s{number}", size=100)
            await store.report(SessionEnd(session=f"s{number}", reward=1.0), f"end-s{number}")
            await until(store, lambda name=f"s{number}": state(store, name) == "trained")  # type: ignore[misc]
        reading.cancel()
    carried = [(name, origin) for name, origin in copies if "old" in name or name.startswith("call-")]
    assert {"r-old"} <= {name for name, _ in carried}
    assert all(origin == first[name] for name, origin in carried), carried
