from __future__ import annotations

import asyncio
from pathlib import Path

from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import BrokerConfig
from trinity_mq.messages import ControlEvent
from trinity_mq.observability.follow import MetricsTail, consume_messages
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.testing.virtual_time import run_virtually


def test_new_lines_come_once(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.read() == []
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    writer.write(1, {"actor/pg_loss": 0.5, "actor/grad_norm": float("nan")})
    (first,) = tail.read()
    assert (first.role, first.id, first.step, first.values) == ("trainer", "trainer-0", 1, {"actor/pg_loss": 0.5})
    assert tail.read() == []
    writer.write(2, {})
    writer.write(3, {})
    writer.close()
    assert [message.step for message in tail.read()] == [2, 3]


def test_torn_and_unfinished_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"role": "trainer", "agent": "trainer-0", "step": 1}\n'
    path.write_bytes(
        b'{"role": "tra\n' + b"[1]\n" + b'{"role": "nobody", "agent": "x", "step": 1}\n' + line + line[:20]
    )
    tail = MetricsTail(tmp_path)
    assert [message.step for message in tail.read()] == [1]
    with path.open("ab") as file:
        file.write(line[20:])
    assert [message.step for message in tail.read()] == [1]


def test_a_run_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"role": "trainer", "agent": "trainer-0", "step": %d}\n'
    path.write_bytes(line % 1 + line % 2)
    tail = MetricsTail(tmp_path)
    assert len(tail.read()) == 2
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
