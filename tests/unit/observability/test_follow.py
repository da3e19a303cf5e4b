from __future__ import annotations

import asyncio
from pathlib import Path

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import ControlEvent
from trinity_mq.observability.follow import MetricsTail, consume_messages
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.telemetry import METRICS_FILE, MetricsWriter
from trinity_mq.testing.virtual_time import run_virtually


def test_each_line_of_metrics_comes_once_also_of_a_run_that_was_begun_anew(tmp_path: Path) -> None:
    path, tail = tmp_path / METRICS_FILE, MetricsTail(tmp_path)
    assert tail.read() == []
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "actor/grad_norm": float("nan")})
    writer.close()
    (first,) = tail.read()
    assert (first.role, first.id, first.step, first.values) == ("trainer", "trainer-0", 1, {"actor/pg_loss": 0.5})
    line = b'{"role": "trainer", "agent": "trainer-0", "step": %d}\n'
    with path.open("ab") as file:
        file.write(b'{"role": "tra\n[1]\n{"role": "nobody", "agent": "x", "step": 1}\n' + line % 2 + line[:20])
    assert [message.step for message in tail.read()] == [2], "neither torn lines nor one that is not whole yet"
    with path.open("ab") as file:
        file.write((line % 3)[20:])
    assert [message.step for message in tail.read()] == [3]
    path.unlink()
    path.write_bytes(line % 7)
    assert [message.step for message in tail.read()] == [7]


def test_a_connection_that_breaks_under_an_answer_ends_nothing() -> None:
    """The supervisor of a run listens so: what the broker delivered just before it died cannot be answered any more."""
    received: list[str] = []

    async def play() -> None:
        broker, topology = MemoryBroker(), Topology("follow")
        bus, other = (MemoryBus(broker, topology, config=BrokerConfig()) for _ in range(2))
        await bus.connect()
        await other.connect()

        def receive(message: object) -> None:
            assert isinstance(message, ControlEvent)
            received.append(message.target)
            if len(received) == 1:
                broker.drop(bus)

        queue = topology.listener("supervisor", "a", "control", "#")
        listening = asyncio.create_task(consume_messages(bus, queue, receive))
        while len(received) < 2:
            event = ControlEvent(verb="restart", target=f"runner-{len(received)}")
            await other.publish(topology.exchange("control"), "restart.x", envelope(event))
            await asyncio.sleep(1.0)
            assert not listening.done(), listening.exception()
        listening.cancel()

    run_virtually(play(), limit=60)
    assert received == ["runner-0", "runner-1"]
