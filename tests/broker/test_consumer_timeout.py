"""A slice is held for as long as it is configured, whatever limit the broker has by itself."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from trinity_mq.bus import Topology
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker import node_files
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.messages import TaskBody, TaskSlice
from trinity_mq.runtime.deliveries import acknowledge, envelope

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]

SHORT = 1.0
"""Seconds that the broker allows where its limit is shortened."""
LOOKS = "application:set_env(rabbit, channel_tick_interval, 200)."
"""Makes the broker compare every 200 ms; it does so every minute by itself."""
HELD = 4.0
"""Seconds for which the slice is held, several times the shortened limit."""


@asynccontextmanager
async def a_node(config: str = "") -> AsyncIterator[PrivateNode]:
    base = Path(tempfile.mkdtemp(prefix="tmq-"))
    node = PrivateNode(base / "broker", config=config)
    try:
        await node.start()
        await node.wait_ready()
        await node.ctl("eval", LOOKS)
        yield node
    finally:
        await node.kill()
        shutil.rmtree(base, ignore_errors=True)


async def deliveries_of_a_held_slice(node: PrivateNode, topology: Topology) -> int:
    """Hold a slice, acknowledge it, and return how often it was delivered."""
    bus = RabbitBus(node.url, topology, config=BrokerConfig(), name="runner-0")
    await bus.connect()
    try:
        await bus.declare(*topology.durable)
        task_slice = TaskSlice(batch=1, ticket="t", task_id=0, task=TaskBody(workflow="none"))
        await bus.publish(topology.exchange("tasks"), "train.1", envelope(task_slice))
        async with await bus.consume(topology.tasks_train, prefetch=1) as consumer:
            first = await anext(consumer)
            try:
                async with asyncio.timeout(HELD):
                    again = await anext(consumer)
            except TimeoutError:
                assert await acknowledge(first), "it is still ours"
                return 1
            assert not await acknowledge(first), "the broker took it back"
            await acknowledge(again)
            return 1 + again.deliveries_before
    finally:
        await bus.close()


async def test_a_slice_is_held_beyond_the_limit_that_the_broker_has_by_itself() -> None:
    """By its queue's own argument where the release knows it; else the slice comes again, which the log explains."""
    async with a_node(f"consumer_timeout = {SHORT * 1000:.0f}") as node:
        with structlog.testing.capture_logs() as logs:
            assert await deliveries_of_a_held_slice(node, Topology("without")) > 1
        assert any("trinity-mq doctor" in str(entry.get("do")) for entry in logs)
        per_queue = tuple(int(part) for part in (await node.ctl("version")).strip().split(".")[:2]) >= (3, 12)
        count = await deliveries_of_a_held_slice(node, Topology("with", consumer_timeout=3600.0))
        assert (count == 1) == per_queue
        # queues that an earlier release made are used as they are
        assert await deliveries_of_a_held_slice(node, Topology("without", consumer_timeout=3600.0)) > 1


async def test_a_private_node_takes_nothing_back_within_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_node() as node:
        limit = await node.ctl("eval", "application:get_env(rabbit, consumer_timeout).")
        assert limit.strip() == "{ok,604800000}"
        assert await deliveries_of_a_held_slice(node, Topology("week")) == 1
    # the same line with a second in it is what takes the slice away
    monkeypatch.setattr(node_files, "CONSUMER_TIMEOUT", f"consumer_timeout = {SHORT * 1000:.0f}")
    async with a_node() as node:
        assert await deliveries_of_a_held_slice(node, Topology("second")) > 1
