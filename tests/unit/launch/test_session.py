"""What a run says on the screen about its broker: before its agents start, and when nothing has moved."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from tests.virtual import virtually
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import load_config
from trinity_mq.launch.session import RunSession
from trinity_mq.observability.display import PlainDisplay
from trinity_mq.targets.run_folder import RunFolder

SENTENCE = "all agents wait for the broker: "


@virtually
async def test_an_alarm_is_told_before_the_start_and_after_half_a_minute(tmp_path: Path) -> None:
    config = load_config({"name": "r", "run_dir": str(tmp_path), "model": {"tiny": {}}})
    shown, broker, topology = io.StringIO(), MemoryBroker(), Topology("r")
    session = RunSession(config, RunFolder(config), PlainDisplay(shown), "amqp://h/", None)
    bus = MemoryBus(broker, topology, config=config.broker)
    await bus.connect()
    await session._tell_broker_trouble(bus, topology)
    assert shown.getvalue() == ""
    broker.block()
    await session._tell_broker_trouble(bus, topology)
    assert shown.getvalue().count(SENTENCE) == 1
    assert "alarm" in shown.getvalue()
    assert "what to do: free memory or disk on the broker" in shown.getvalue()
    watching = asyncio.create_task(session._depths(bus, topology))
    await asyncio.sleep(45)
    session._draw()
    assert shown.getvalue().count("no progress for 3") == 1
    assert shown.getvalue().count(SENTENCE) == 2
    broker.unblock()
    await asyncio.sleep(10)
    assert session.state.finding is None
    watching.cancel()
    await asyncio.wait([watching])
    await bus.close()
