"""RabbitBus where only a real broker can answer: refusals, closed channels, full sockets, segments, alarms."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import aiormq
import pytest
from structlog.testing import capture_logs
from yarl import URL

from tests.broker_fixtures import Tools, connected, note
from tests.waiting import until
from trinity_mq.bus.base import BusRefused, BusUnavailable, LockHeld, StreamCut
from trinity_mq.bus.rabbit import consumer as rabbit_consumer
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.rabbit.connection import BrokerConnection
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.local_broker.ports import free_ports
from trinity_mq.testing.tcp_proxy import FaultProxy

OWNED = (
    "[rabbit_amqqueue:delete(Q, false, false, <<>>) || Q <- rabbit_amqqueue:list(), "
    'string:prefix(element(4, amqqueue:get_name(Q)), <<"{prefix}">>) =/= nomatch, '
    "amqqueue:get_exclusive_owner(Q) =/= none], ok."
)
"""Deletes, of all queues with this prefix, those that belong to a connection."""
FORGOTTEN = (
    "[mnesia:dirty_delete(rabbit_queue, amqqueue:get_name(Q)) || Q <- rabbit_amqqueue:list(), "
    'string:prefix(element(4, amqqueue:get_name(Q)), <<"{prefix}">>) =/= nomatch, '
    "amqqueue:get_exclusive_owner(Q) =/= none], ok."
)
"""Deletes the records of the same queues. Their processes live on, and their consumers hear nothing of it."""

pytestmark = pytest.mark.broker


class TestConnecting:
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda url: url.with_password("s3cr3t"), "wrong user name or password.*broker.url"),
            (lambda url: url.with_path("/nowhere"), "does not open virtual host 'nowhere'"),
        ],
    )
    async def test_wrong_password_or_virtual_host_is_refused_at_once_without_repeating_it(
        self, broker_url: str, topology: Topology, change: Callable[[URL], URL], why: str
    ) -> None:
        place = change(URL(broker_url))
        with pytest.raises(BusRefused, match=why) as refused:
            async with connected(str(place), topology):
                pass
        assert str(place.password) not in str(refused.value)
        assert f"{place.host}:{place.port}" in str(refused.value)
        assert "\n" not in str(refused.value)

    async def test_no_broker_is_unavailable_in_time(self, topology: Topology) -> None:
        url = f"amqp://tmq:s3cr3t@127.0.0.1:{free_ports(1)[0]}/%2F"
        with pytest.raises(BusUnavailable, match=r"no RabbitMQ at 127\.0\.0\.1:\d+ within 0\.5 s") as unavailable:
            async with connected(url, topology, connect_timeout=0.5):
                pass
        assert "s3cr3t" not in str(unavailable.value)

    async def test_waits_for_a_broker_that_comes_later(self, broker_url: str, topology: Topology) -> None:
        async with FaultProxy(broker_url) as proxy:
            proxy.refuse()
            bus = RabbitBus(proxy.url, topology, config=BrokerConfig(), name="test")
            connecting = asyncio.create_task(bus.connect())
            await asyncio.sleep(0.1)
            assert not connecting.done()
            assert "not connected" in (bus.trouble or "") or "no connection" in (bus.trouble or "")
            proxy.accept()
            async with asyncio.timeout(10):
                await connecting
            assert bus.usable
            assert bus.broker_version
            await bus.close()


class TestChannels:
    async def test_other_arguments_are_told_once(self, bus: RabbitBus, topology: Topology) -> None:
        await bus.declare(topology.results)
        smaller = Queue(name=topology.results.name, kind="stream", max_length_bytes=10**8)
        with capture_logs() as logs:
            await bus.declare(smaller)
            await bus.declare(smaller)
        assert [(line["log_level"], line["queue"]) for line in logs] == [("warning", smaller.name)]
        assert "x-max-length-bytes" in logs[0]["broker"]

    async def test_answers_of_one_turn_each_count_for_their_own_delivery(
        self, bus: RabbitBus, topology: Topology
    ) -> None:
        """Acknowledged, rejected and kept ones mixed, all answered at once: no acknowledgement covers a neighbour."""
        await bus.declare(topology.tasks_train, topology.dead)
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(bus.publish("", topology.tasks_train.name, note(str(number))))
        consumer = await bus.consume(topology.tasks_train)
        deliveries = [await anext(consumer) for _ in range(30)]
        async with asyncio.TaskGroup() as group:
            for delivery in reversed(deliveries[2:]):
                group.create_task(delivery.reject() if int(delivery.body) % 3 == 0 else delivery.ack())
        await consumer.close()
        rejected = sum(int(delivery.body) % 3 == 0 for delivery in deliveries[2:])

        async def settled() -> bool:
            depths = [await bus.depth(queue.name) for queue in (topology.dead, topology.tasks_train)]
            return depths == [rejected, 2]

        await until(settled)

    async def test_a_deleted_exchange_is_made_again(self, bus: RabbitBus, broker_url: str, topology: Topology) -> None:
        await bus.declare(topology.tasks_train, topology.dead)
        async with aiormq.connect(broker_url) as connection:
            await (await connection.channel()).exchange_delete(topology.exchange("tasks"))
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(bus.publish(topology.exchange("tasks"), "train.1", note("x")))
            other = group.create_task(bus.publish("", topology.dead.name, note("y")))
        assert other.result()

    async def test_publishes_stuck_in_a_full_socket_complete_after_a_cut(
        self, broker_url: str, topology: Topology
    ) -> None:
        async with FaultProxy(broker_url) as proxy, connected(proxy.url, topology) as bus:
            await bus.declare(topology.dead)
            proxy.hold_requests()
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                made = [
                    group.create_task(bus.publish("", topology.dead.name, note("", size, message_id=str(n))))
                    for n, size in enumerate([500_000] * 30 + [5_000] * 30)
                ]
                await asyncio.sleep(0.2)
                assert not any(task.done() for task in made)
                proxy.cut()
            assert all(task.result() for task in made)
            assert await bus.depth(topology.dead.name) == 60

    @pytest.mark.timeout(60)
    async def test_one_that_nobody_reads_any_more_does_not_hold_up_its_connection(self, broker_url: str) -> None:
        lost: list[str] = []
        link = await BrokerConnection.open(broker_url, "test", 10.0, lost.append)
        try:
            other = await link.channel()
            queue = (await other.queue_declare(exclusive=True)).queue
            assert queue is not None
            for _ in range(2000):
                await other.basic_publish(b"x" * 100, routing_key=queue)
            before = channel_readers()
            channel = await link.channel()
            (reader,) = channel_readers() - before

            async def receive(_: object) -> None:
                """Take no note of it."""

            await channel.basic_consume(queue, receive, no_ack=True)
            reader.cancel()  # as when its close takes longer than the client waits
            async with asyncio.timeout(8):  # below the three heartbeats after which the client gives a connection up
                await other.queue_declare(queue, passive=True)
            assert not lost
        finally:
            await link.close()

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("deletion", [OWNED, FORGOTTEN], ids=["told", "untold"])
    async def test_exclusive_queues_that_the_broker_takes_away_come_back_with_bindings_and_locks(
        self, bus: RabbitBus, broker_url: str, broker_node: Tools, topology: Topology, deletion: str
    ) -> None:
        """As the end of a cluster's node may do, while their connection stands."""
        ears = topology.listener("explorer-0", "x", "control", "#")
        lock = await bus.lock("explorer")
        async with connected(broker_url, topology) as other, await bus.consume(ears) as feed:
            await broker_node.ctl("eval", deletion.format(prefix=topology.prefix))
            await until(lambda: other.publish(topology.exchange("control"), "control.all", note("hello")), 30)
            async with asyncio.timeout(10):
                assert (await anext(feed)).body == b"hello"
            assert lock.held
            with pytest.raises(LockHeld):
                await other.lock("explorer")


def channel_readers() -> set[asyncio.Task[object]]:
    """The client's tasks that read channels."""
    return {task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_reader"}


async def test_a_stream_that_serves_a_reader_no_more_is_asked_anew(
    bus: RabbitBus, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cluster does to readers that come while it restarts a stream's replicas; here the reader is deaf."""
    monkeypatch.setattr(rabbit_consumer, "STREAM_IDLE", 0.5)
    await bus.declare(topology.results)
    async with await bus.consume(topology.results, offset=0) as feed, asyncio.timeout(20):
        await bus.publish(topology.exchange("results"), "1", note("a"))
        assert (await anext(feed)).body == b"a"
        feed._channel.consumers.clear()  # type: ignore[attr-defined]
        for text in "bc":
            await bus.publish(topology.exchange("results"), "1", note(text))
        assert [(await anext(feed)).body for _ in range(2)] == [b"b", b"c"]
        await asyncio.sleep(1.2)  # idle: asked anew, and nothing comes twice
        await bus.publish(topology.exchange("results"), "1", note("d"))
        assert (await anext(feed)).body == b"d"


class OfSmallSegments(Queue):
    @property
    def arguments(self) -> dict[str, Any]:
        return {**super().arguments, "x-stream-max-segment-size-bytes": 500_000}


class TestSegments:
    """Streams on disk are cut by segment, and each new segment takes one offset for itself."""

    async def fill(self, bus: RabbitBus, topology: Topology, retention: int) -> None:
        stream = OfSmallSegments(
            name=topology.results.name, kind="stream", bindings=topology.results.bindings, max_length_bytes=retention
        )
        await bus.declare(stream)
        for _ in range(6):
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(bus.publish(topology.exchange("results"), "1", note("", 50_000)))

    async def test_the_offset_behind_a_segment_is_no_cut(self, bus: RabbitBus, topology: Topology) -> None:
        await self.fill(bus, topology, retention=10**9)
        async with await bus.consume(topology.results, offset=0) as consumer:
            offsets = [(await anext(consumer)).offset or 0 for _ in range(60)]
        gaps = [after - 1 for before, after in itertools.pairwise(offsets) if after != before + 1]
        assert gaps
        async with await bus.consume(topology.results, offset=gaps[0]) as consumer:
            async with asyncio.timeout(10):
                assert (await anext(consumer)).offset == gaps[0] + 1

    async def test_what_retention_cut_is_told(self, bus: RabbitBus, topology: Topology) -> None:
        await self.fill(bus, topology, retention=1_000_000)
        consumer = await bus.consume(topology.results, offset=0)
        async with asyncio.timeout(10):
            with pytest.raises(StreamCut, match="offset 0 was requested") as cut:
                await anext(consumer)
        assert cut.value.got > 1


class TestAlarms:
    async def test_publishers_wait_and_consumers_do_not(
        self, bus: RabbitBus, broker_node: PrivateNode, topology: Topology
    ) -> None:
        await bus.declare(topology.dead)
        await bus.publish("", topology.dead.name, note("before"))
        consumer = await bus.consume(topology.dead)
        changes: list[bool] = []
        changed_now = asyncio.Event()
        bus.on_change(lambda: (changes.append(bus.usable), changed_now.set()))
        await broker_node.ctl("set_vm_memory_high_watermark", "0.0001")
        try:
            publishing = asyncio.create_task(bus.publish("", topology.dead.name, note("during")))
            async with asyncio.timeout(10):
                await changed_now.wait()
            assert "memory or disk alarm" in (bus.trouble or "")
            waiting = asyncio.create_task(bus.publish("", topology.dead.name, note("waiting")))
            await (await anext(consumer)).ack()
            assert await bus.depth(topology.dead.name) == 0
            assert not publishing.done()
            assert not waiting.done()
        finally:
            await broker_node.ctl("set_vm_memory_high_watermark", "0.4")
        async with asyncio.timeout(10):
            assert await publishing
            assert await waiting
            assert [(await anext(consumer)).body for _ in range(2)] == [b"during", b"waiting"]
            await bus.wait_usable()
        assert changes == [False, True]
