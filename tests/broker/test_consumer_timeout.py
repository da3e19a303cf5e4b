"""A slice is held for as long as it is configured, whatever limit the broker has by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import structlog

from tests.broker_fixtures import connected, own_node
from trinity_mq.bus import Topology
from trinity_mq.local_broker.node import PrivateNode, find_rabbitmq
from trinity_mq.messages import TaskBody, TaskSlice
from trinity_mq.runtime.deliveries import acknowledge, envelope

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_rabbitmq() is None, reason="RabbitMQ is not installed here"),
]

SHORT = "consumer_timeout = 1000"
"""The line of a broker that allows one second."""
LOOKS = "application:set_env(rabbit, channel_tick_interval, 200)."
"""Makes the broker compare every 200 ms; it does so every minute by itself."""
HELD = 4.0
"""Seconds for which the slice is held, several times the shortened limit."""


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[PrivateNode]:
    with own_node(config=request.param) as made:
        yield made


async def deliveries_of_a_held_slice(node: PrivateNode, topology: Topology) -> int:
    """Hold a slice, acknowledge it, and return how often it was delivered."""
    await node.ctl("eval", LOOKS)
    async with connected(node.url, topology) as bus:
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


@pytest.mark.parametrize("node", [SHORT], indirect=True)
async def test_a_slice_is_held_beyond_the_limit_that_the_broker_has_by_itself(node: PrivateNode) -> None:
    """By its queue's own argument where the release knows it; else the slice comes again, which the log explains."""
    with structlog.testing.capture_logs() as logs:
        assert await deliveries_of_a_held_slice(node, Topology("without")) > 1
    assert any("trinity-mq doctor" in str(entry.get("do")) for entry in logs)
    per_queue = tuple(int(part) for part in (await node.ctl("version")).strip().split(".")[:2]) >= (3, 12)
    count = await deliveries_of_a_held_slice(node, Topology("with", consumer_timeout=3600.0))
    assert (count == 1) == per_queue
    # queues that an earlier release made are used as they are
    assert await deliveries_of_a_held_slice(node, Topology("without", consumer_timeout=3600.0)) > 1


@pytest.mark.parametrize("node", [""], indirect=True)
async def test_a_private_node_takes_nothing_back_within_a_week(node: PrivateNode) -> None:
    limit = await node.ctl("eval", "application:get_env(rabbit, consumer_timeout).")
    assert limit.strip() == "{ok,604800000}"
    assert await deliveries_of_a_held_slice(node, Topology("week")) == 1
