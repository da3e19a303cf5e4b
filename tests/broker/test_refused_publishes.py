"""What a real broker refuses, and confirms that it loses: both are tried again. What outsiders and faults can fill has
a bound: `submitted` refuses, `dead` drops the oldest, which is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiormq
import pytest
from aiormq.channel import Channel
from aiormq.exceptions import DeliveryError

from tests.broker_fixtures import connected, note
from tests.waiting import until
from trinity_mq.bus.base import BusUnavailable, Envelope
from trinity_mq.bus.rabbit import publisher
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import DROPPED, Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.errors import CommandError
from trinity_mq.messages import TaskBody, TaskSubmission
from trinity_mq.operations import submit
from trinity_mq.targets.connection import Target

NARROW = {"x-max-length": 3, "x-overflow": "reject-publish"}
COUNT = 12
BOUND, SIZE = 100_000, 10_000
"""Bytes of a queue, and of a message: some ten of them fill it."""

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


def numbered(number: int, size: int = 0) -> Envelope:
    return note(number, size, message_id=f"note-{number}")


@pytest.fixture
async def bus(bus: RabbitBus, topology: Topology) -> RabbitBus:
    await bus.declare(topology.dead)
    return bus


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_nacked_publishes_are_repeated_until_there_is_room(
    bus: RabbitBus, broker_url: str, topology: Topology, kind: str
) -> None:
    """A message for two queues of which one is full is nacked, and yet in the other: its repeats have the same id."""
    changes: list[bool] = []
    bus.on_change(lambda: changes.append(bus.usable))
    narrow = topology.prefix + "narrow"
    async with aiormq.connect(broker_url) as connection:
        channel = await connection.channel()
        await channel.queue_declare(narrow, durable=True, arguments={**NARROW, "x-queue-type": kind})
        for _ in range(3):
            await channel.basic_publish(b"filling", routing_key=narrow)
        with contextlib.suppress(DeliveryError):  # a quorum queue takes one more than it may
            await channel.basic_publish(b"filling", routing_key=narrow)
        await channel.queue_bind(narrow, topology.exchange("dead"), "#")
        try:
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(bus.publish(topology.exchange("dead"), "x", numbered(n))) for n in range(COUNT)
                ]
                await until(lambda: _more_than(bus, topology.dead.name, COUNT), 30)
                assert not any(task.done() for task in made)
                while not all(task.done() for task in made):
                    await channel.basic_get(narrow, no_ack=True)
                    await asyncio.wait(made, timeout=0.02)
            assert all(task.result() is True for task in made)
        finally:
            await channel.queue_delete(narrow)
    assert not changes, "a refusal is not the connection's end"
    depth = await bus.depth(topology.dead.name) or 0
    assert depth > COUNT, "the wide queue has got the repeats too"
    async with await bus.consume(topology.dead) as feed:
        seen = [await anext(feed) for _ in range(depth)]
    assert {one.message_id for one in seen} == {f"note-{n}" for n in range(COUNT)}
    assert {one.message_id: one.body for one in seen} == {f"note-{n}": b"%d" % n for n in range(COUNT)}


async def _more_than(bus: RabbitBus, queue: str, count: int) -> bool:
    return (await bus.depth(queue) or 0) > count


@pytest.fixture
async def bounded(bus: RabbitBus, broker_url: str, topology: Topology) -> AsyncIterator[RabbitBus]:
    """A bus whose queues are small."""
    await bus.delete(topology.dead.name)
    narrow = replace(topology, submitted_max_bytes=BOUND, dead_max_bytes=BOUND)
    async with connected(broker_url, narrow) as made:
        await made.declare(*narrow.durable)
        yield made


async def test_a_confirm_that_never_comes_is_not_waited_for(
    bus: RabbitBus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may lose one with a queue's leader, while the connection and all others go on."""
    real, lost = Channel.basic_publish, asyncio.Event()

    async def loses_one(channel: Channel, body: bytes, **how: Any) -> Any:
        confirmed = await real(channel, body, **how)
        if body == b"7" and not lost.is_set():
            lost.set()
            await asyncio.Event().wait()
        return confirmed

    monkeypatch.setattr(publisher, "PATIENCE", 0.5)
    monkeypatch.setattr(Channel, "basic_publish", loses_one)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        made = [group.create_task(bus.publish("", topology.dead.name, numbered(n))) for n in range(COUNT)]
    assert lost.is_set()
    assert all(task.result() is True for task in made)
    depth = await bus.depth(topology.dead.name) or 0
    async with await bus.consume(topology.dead) as feed:
        seen = [(await anext(feed)).message_id for _ in range(depth)]
    assert seen.count("note-7") >= 2, "it was there, but nobody knew"
    assert set(seen) == {f"note-{n}" for n in range(COUNT)}


async def fill(bounded: RabbitBus, topology: Topology) -> int:
    """Submit until the broker refuses; return how many it took."""
    for number in range(100):
        try:
            await bounded.publish(topology.exchange("tasks"), "submit", numbered(number, SIZE), timeout=1.0)
        except BusUnavailable:
            return number
    return 100


async def test_a_full_queue_of_submissions_refuses_and_takes_more_once_there_is_room(
    bounded: RabbitBus, topology: Topology
) -> None:
    taken = await fill(bounded, topology)
    assert 8 <= taken <= 15
    assert await bounded.depth(topology.submitted.name) == taken
    waiting = asyncio.create_task(bounded.publish(topology.exchange("tasks"), "submit", numbered(200, SIZE)))
    consumed = replace(topology, submitted_max_bytes=BOUND).submitted
    async with await bounded.consume(consumed, prefetch=1) as consumer:
        for _ in range(taken):
            await (await anext(consumer)).ack()
        assert await asyncio.wait_for(waiting, 30)


async def test_the_submit_command_says_that_the_queue_is_full(
    bounded: RabbitBus, broker_url: str, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = await fill(bounded, topology)
    monkeypatch.setattr(submit, "PUBLISH_SECONDS", 1.0)
    target = Target(topology.run, BrokerConfig(url=broker_url))
    task = TaskSubmission(task=TaskBody(workflow="w", raw_task={"q": "x" * SIZE}), submission_id="mine")
    with pytest.raises(CommandError, match=rf"{taken} tasks wait in the queue submitted.*--id mine"):
        await submit.submit_task(target, task, None)


async def test_a_full_queue_of_dead_letters_drops_the_oldest_and_tells(bounded: RabbitBus, topology: Topology) -> None:
    listener = topology.listener("explorer-0", "1.dropped", "control", DROPPED)
    await bounded.declare(listener)
    async with await bounded.consume(listener) as dropped:
        for number in range(40):
            assert await bounded.publish(topology.exchange("dead"), "train.1", numbered(number, SIZE), timeout=10.0)

        async def has_dropped() -> bool:
            return 0 < (await bounded.depth(topology.dead.name) or 0) <= 15

        await until(has_dropped)
        kept = await bounded.depth(topology.dead.name) or 0
        seen: list[str | None] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                while len(seen) < 40 - kept:
                    seen.append((await anext(dropped)).message_id)
    assert seen == [f"note-{number}" for number in range(40 - kept)]
