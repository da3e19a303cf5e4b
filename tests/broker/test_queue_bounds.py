"""What outsiders and faults can fill has a bound: `submitted` refuses, `dead` drops the oldest, which is counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.waiting import until
from trinity_mq.bus import Bus, BusUnavailable, Envelope, Topology
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import DROPPED
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.errors import CommandError
from trinity_mq.messages import TaskBody, TaskSubmission
from trinity_mq.operations import submit

pytestmark = pytest.mark.broker

BOUND = 100_000
SIZE = 10_000
"""Bytes of a message: some ten of them fill a queue."""


@pytest.fixture
async def bus(broker_url: str, topology: Topology) -> AsyncIterator[Bus]:
    bounded = replace(topology, submitted_max_bytes=BOUND, dead_max_bytes=BOUND)
    bus = RabbitBus(broker_url, bounded, config=BrokerConfig(), name="bounds")
    await bus.connect()
    await bus.declare(*bounded.durable)
    yield bus
    for queue in bounded.durable:
        await bus.delete(queue.name)
    await bus.close()


def message(number: int) -> Envelope:
    return Envelope(body=b"x" * SIZE, kind="note", message_id=f"m{number}")


async def fill(bus: Bus, topology: Topology) -> int:
    """Submit until the broker refuses; return how many it took."""
    for number in range(100):
        try:
            await bus.publish(topology.exchange("tasks"), "submit", message(number), timeout=1.0)
        except BusUnavailable:
            return number
    return 100


async def test_a_full_queue_of_submissions_refuses_and_takes_more_once_there_is_room(
    bus: Bus, topology: Topology
) -> None:
    taken = await fill(bus, topology)
    assert 8 <= taken <= 15
    assert await bus.depth(topology.submitted.name) == taken
    waiting = asyncio.create_task(bus.publish(topology.exchange("tasks"), "submit", message(200)))
    consumed = replace(topology, submitted_max_bytes=BOUND).submitted
    async with await bus.consume(consumed, prefetch=1) as consumer:
        for _ in range(taken):
            await (await anext(consumer)).ack()
        assert await asyncio.wait_for(waiting, 30)


async def test_the_submit_command_says_that_the_queue_is_full(
    bus: Bus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await fill(bus, topology)
    monkeypatch.setattr(submit, "PUBLISH_SECONDS", 1.0)
    task = TaskSubmission(task=TaskBody(workflow="w", raw_task={"q": "x" * SIZE}), submission_id="mine")
    with pytest.raises(CommandError, match=rf"{taken} tasks wait in the queue submitted.*--id mine"):
        await submit._publish(bus, topology, task, None)


async def test_a_full_queue_of_dead_letters_drops_the_oldest_and_tells(bus: Bus, topology: Topology) -> None:
    listener = topology.listener("explorer-0", "1.dropped", "control", DROPPED)
    await bus.declare(listener)
    async with await bus.consume(listener) as dropped:
        for number in range(40):
            assert await bus.publish(topology.exchange("dead"), "train.1", message(number), timeout=10.0)

        async def depth() -> int:
            return await bus.depth(topology.dead.name) or 0

        await until(lambda: _below(depth, 15))
        kept = await depth()
        seen: list[str | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while len(seen) < 40 - kept:
                    seen.append((await anext(dropped)).message_id)
    assert seen == [f"m{number}" for number in range(40 - kept)]


async def _below(depth: object, most: int) -> bool:
    assert callable(depth)
    return bool(0 < await depth() <= most)
