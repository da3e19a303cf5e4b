"""The explorer counts the dead letters that the broker drops, over restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from trinity_agents.simulation import Simulation, killed, until
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.topology import DROPPED
from trinity_mq.testing.virtual_time import run_virtually


def test_dropped_dead_letters_are_counted_over_the_run(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=4)
    counts: list[int] = []

    async def drop(count: int) -> None:
        client = await sim.client()
        for number in range(count):
            # as the broker moves it: any body, under the routing key that the queue's declaration says
            letter = Envelope(body=b"\xff", kind="unknown", message_id=f"dead-{number}")
            assert await client.publish(sim.topology.exchange("control"), DROPPED, letter)
        await client.close()

    async def explorer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_explorer().run())
        await until(lambda: sim.explorer.detail().opened > 0)
        await drop(3)
        await until(lambda: sim.state().dropped_dead == 3)
        await killed(first)
        second = asyncio.get_running_loop().create_task(sim.make_explorer().run())
        await until(lambda: sim.explorer.exploration is not None and sim.explorer.exploration.dispatcher.is_caught_up)
        await drop(2)
        await until(lambda: sim.explorer.detail().dropped_dead == 5)
        counts.append(sim.explorer.detail().dropped_dead)
        await second

    run_virtually(sim.run(explorer=explorer), limit=3000)
    assert counts == [5]
    assert sim.topology.dead.dead_letter_routing_key == DROPPED
    assert sim.topology.dead.dead_letter_exchange == sim.topology.exchange("control")
