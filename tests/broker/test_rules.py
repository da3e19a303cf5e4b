"""Sentences of docs/protocol.md, Names, that only a real broker can hold (tests/RULES.md)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.broker_fixtures import connected, note
from trinity_mq.bus.base import Consumer, Delivery, LockHeld
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.testing.tcp_proxy import FaultProxy

pytestmark = pytest.mark.broker


async def listed(node: PrivateNode, what: str, *columns: str) -> list[dict[str, Any]]:
    """What ``rabbitmqctl list_<what>`` knows."""
    found: list[dict[str, Any]] = json.loads(await node.ctl(f"list_{what}", *columns, "--formatter", "json"))
    return found


async def connections(node: PrivateNode, topology: Topology) -> dict[str, dict[str, Any]]:
    """Our connections by the last word of their names."""
    found = await listed(node, "connections", "pid", "timeout", "channels", "client_properties")
    named = {next(p[2] for p in one["client_properties"] if p[0] == "connection_name"): one for one in found}
    ours = f"test-{topology.run} "
    return {name.removeprefix(ours): one for name, one in named.items() if name.startswith(ours)}


async def next_of(consumer: Consumer) -> Delivery:
    async with asyncio.timeout(10):
        return await anext(consumer)


async def test_queues_are_as_they_were_declared(bus: RabbitBus, broker_node: PrivateNode, topology: Topology) -> None:
    queues = [*topology.durable, topology.batch_queue(1, "t1")]
    await bus.declare(*queues)
    try:
        known = {one["name"]: one for one in await listed(broker_node, "queues", "name", "durable", "arguments")}
        for queue in queues:
            found = known[queue.name]
            assert found["durable"] is True
            assert {name: value for name, _, value in found["arguments"]} == dict(queue.arguments), queue.name
    finally:
        await bus.delete(queues[-1].name)


async def test_two_connections_a_channel_for_each_consumer_and_a_heartbeat(
    bus: RabbitBus, broker_node: PrivateNode, topology: Topology
) -> None:
    """The lock is on the connection that consumes; what publishes consumes nothing."""
    await bus.declare(*topology.durable)
    await bus.lock("explorer")
    feeds = [
        await bus.consume(topology.results, offset=0),
        await bus.consume(topology.closed, prefetch=1),
        await bus.consume(topology.tasks_train, prefetch=7),
    ]
    await bus.publish("", topology.dead.name, note("x"))
    ours = await connections(broker_node, topology)
    channels = await listed(broker_node, "channels", "connection", "consumer_count", "prefetch_count", "confirm")
    queues = await listed(broker_node, "queues", "name", "owner_pid")
    assert sorted(ours) == ["consumes", "publishes"]
    assert {one["timeout"] for one in ours.values()} == {10}
    consuming, publishing = ours["consumes"]["pid"], ours["publishes"]["pid"]
    of = {pid: [one for one in channels if one["connection"] == pid] for pid in (consuming, publishing)}
    assert [(one["consumer_count"], one["confirm"]) for one in of[publishing]] == [(0, True)]
    assert sorted(one["prefetch_count"] for one in of[consuming] if one["consumer_count"]) == [1, 7, 32]
    assert all(one["consumer_count"] <= 1 and not one["confirm"] for one in of[consuming])
    assert {one["name"]: one["owner_pid"] for one in queues}[topology.lock("explorer")] == consuming
    for feed in feeds:
        await feed.close()


async def close(node: PrivateNode, topology: Topology, which: str) -> None:
    """Let the broker close one of our connections."""
    lines = (await node.ctl("list_connections", "pid", "client_properties")).splitlines()
    (line,) = [line for line in lines if f"test-{topology.run} {which}" in line]
    await node.ctl("close_connection", line.split("\t")[0], "for the test")


async def test_the_lock_goes_with_the_connection_that_consumes_and_with_no_other(
    bus: RabbitBus, broker_node: PrivateNode, broker_url: str, topology: Topology
) -> None:
    lock = await bus.lock("trainer")
    lost: list[bool] = []
    bus.on_change(lambda: lost.append(not lock.held))
    await close(broker_node, topology, "publishes")
    async with asyncio.timeout(10):
        assert await bus.publish("", topology.dead.name, note("x")) in {True, False}
        await bus.wait_usable()
    assert not any(lost)
    assert lock.held
    lost.clear()
    await close(broker_node, topology, "consumes")
    async with asyncio.timeout(10):
        await bus.depth(topology.dead.name)
        await bus.wait_usable()
    assert lost[0]
    assert lock.held, "nobody took it: it is ours again"
    async with connected(broker_url, topology) as other:
        with pytest.raises(LockHeld):
            await other.lock("trainer")


async def test_the_brokers_own_limit_never_strikes(bus: RabbitBus, topology: Topology) -> None:
    """More returns than RabbitMQ 4's default of 20; nothing is dead-lettered but what is rejected."""
    await bus.declare(topology.tasks_train, topology.dead)
    await bus.publish(topology.exchange("tasks"), "train.1", note("again"))
    async with await bus.consume(topology.tasks_train, prefetch=1) as feed:
        for count in range(30):
            delivery = await next_of(feed)
            assert (delivery.body, delivery.deliveries_before) == (b"again", count)
            await delivery.requeue()
        delivery = await next_of(feed)
        assert await bus.depth(topology.dead.name) == 0
        await delivery.reject()
    async with await bus.consume(topology.dead) as dead:
        letter = await next_of(dead)
        assert (letter.body, letter.routing_key) == (b"again", "train.1")
        assert letter.headers["x-first-death-reason"] == "rejected"
        await letter.ack()


async def test_whatever_was_delivered_counts_started_or_not(
    bus: RabbitBus, broker_node: PrivateNode, topology: Topology
) -> None:
    """nack, closed consumer, lost connection: each adds one to all that was delivered, looked at or not."""
    await bus.declare(topology.tasks_train)
    for text in "abc":
        await bus.publish(topology.exchange("tasks"), "train.1", note(text))
    feed = await bus.consume(topology.tasks_train, prefetch=2)
    first = await next_of(feed)  # b is delivered too, and nobody has looked at it
    assert (first.body, first.deliveries_before) == (b"a", 0)
    await feed.close()
    feed = await bus.consume(topology.tasks_train, prefetch=2)
    held = [await next_of(feed) for _ in range(2)]
    assert [(one.body, one.deliveries_before) for one in held] == [(b"a", 1), (b"b", 1)]
    await close(broker_node, topology, "consumes")
    again = [await next_of(feed) for _ in range(2)]
    assert [(one.body, one.deliveries_before) for one in again] == [(b"a", 2), (b"b", 2)]
    await again[0].requeue()
    back = await next_of(feed)
    assert (back.body, back.deliveries_before) == (b"a", 3)
    await back.ack()
    await again[1].ack()
    last = await next_of(feed)
    assert (last.body, last.deliveries_before) == (b"c", 0), "no read-ahead: it was delivered to nobody before"
    await feed.close()


async def test_declaring_a_batch_queue_starts_its_expiry_anew_and_publishing_does_not(
    bus: RabbitBus, topology: Topology
) -> None:
    short = {"single_active_consumer": True, "expires_ms": 2000, "redeclare": False}
    kept, left = (Queue(name=f"{topology.prefix}batch.{name}", **short) for name in ("kept", "left"))  # type: ignore[arg-type]
    await bus.declare(kept, left)
    for _ in range(9):  # the broker looks every five seconds
        await asyncio.sleep(1.0)
        await bus.declare(kept)
        await bus.publish("", left.name, note("x"))
    assert await bus.depth(left.name) is None
    assert await bus.depth(kept.name) == 0
    await bus.delete(kept.name)


async def test_a_stream_whose_channel_was_closed_goes_on_behind_the_last(bus: RabbitBus, topology: Topology) -> None:
    """The broker closes the channel of whoever holds a delivery for too long: none is held, and none is missed."""
    await bus.declare(topology.results)
    for n in range(40):
        await bus.publish(topology.exchange("results"), "1", note(str(n)))
    async with await bus.consume(topology.results, offset=0) as feed:
        seen = [await next_of(feed) for _ in range(10)]
        channel = seen[0]._channel  # type: ignore[attr-defined]
        await channel.basic_ack(999_999, wait=False)  # 406 closes the channel
        seen += [await next_of(feed) for _ in range(30)]
    assert [one.body for one in seen] == [str(n).encode() for n in range(40)]
    assert all(one.deliveries_before == 0 for one in seen)


async def test_while_the_locks_may_be_anothers_nothing_is_published(
    broker_url: str, broker_node: PrivateNode, topology: Topology
) -> None:
    """Without the connection that consumes it is not known whose the locks are."""
    async with FaultProxy(broker_url) as proxy, connected(proxy.url, topology) as bus:
        await bus.declare(topology.dead)
        lock = await bus.lock("explorer")
        suspended = asyncio.Event()
        bus.on_change(suspended.set)
        proxy.refuses = lambda port: True
        await close(broker_node, topology, "consumes")
        async with asyncio.timeout(10):
            await suspended.wait()
        assert not lock.held
        publishing = asyncio.create_task(bus.publish("", topology.dead.name, note("x")))
        done, _ = await asyncio.wait([publishing], timeout=0.5)
        proxy.refuses = lambda port: False
        async with asyncio.timeout(10):
            assert await publishing
        assert lock.held
        assert not done
