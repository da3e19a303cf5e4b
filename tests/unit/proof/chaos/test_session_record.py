"""What gateways leave on the stream of sessions is read anew: the ledger, each answer, and each decision once."""

from __future__ import annotations

import asyncio

from tests.unit.agents.gateway.world import World, until
from trinity_mq.bus import Envelope
from trinity_mq.messages import SessionEnd
from trinity_mq.proof.chaos.sessions.stream import read_sessions
from trinity_mq.testing.virtual_time import run_virtually


def test_ledger_answers_and_decisions_are_those_of_the_gateways() -> None:
    async def story() -> None:
        world = World()
        async with world.running() as bus, world.gateway() as store:
            for name in ("a", "b"):
                await world.session(store, name)
                await store.report(SessionEnd(session=name, reward=0.5), f"end-{name}")
            await until(store, lambda: store.ledger.counts["trained"] == 2)
            await bus.publish(world.topology.exchange("sessions"), "event", Envelope(body=b"rubbish", kind="x"))
            record = await read_sessions(bus, world.topology)
            await until(store, lambda: bool(world.dead))
            await asyncio.sleep(60)
        assert {one.id: one.state for one in record.ledger} == {"a": "trained", "b": "trained"}
        assert {name: len(calls) for name, calls in record.calls.items()} == {"a": 1, "b": 1}
        assert sorted(one.sessions for one in record.decisions) == [["a"], ["b"]]
        assert record.begin == 0
        assert len(record.undecodable) == 1
        assert len(world.dead) == 1, "the rubbish alone: reading leaves nothing there that a gateway cannot read"

    run_virtually(story())
