"""What every Bus must do, asked of MemoryBus and of RabbitBus on a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.contract.bus_worlds import MemoryWorld, RabbitWorld, World
from tests.waiting import until
from trinity_mq.bus.base import (
    Bus,
    BusUnavailable,
    Consumer,
    Delivery,
    Envelope,
    Lock,
    LockHeld,
    MessageTooLarge,
    QueueGone,
    StaleDelivery,
)
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

SILENCE = 0.15
"""Seconds in which nothing arriving counts as nothing coming."""


@pytest.fixture(params=["memory", pytest.param("rabbit", marks=pytest.mark.broker)])
def made_world(request: pytest.FixtureRequest, topology: Topology) -> World:
    if request.param == "memory":
        return MemoryWorld(topology)
    return RabbitWorld(topology, request.getfixturevalue("broker_url"))


@pytest.fixture
async def world(made_world: World) -> AsyncIterator[World]:
    async with made_world.stack:
        yield made_world


@pytest.fixture
async def bus(world: World) -> Bus:
    return await world.bus()


def note(text: str, **extra: str) -> Envelope:
    return Envelope(body=text.encode(), kind="note", **extra)


async def receive(consumer: Consumer) -> Delivery:
    async with asyncio.timeout(10):
        return await anext(consumer)


async def texts(consumer: Consumer, count: int, *, ack: bool = True) -> list[str]:
    found = []
    for _ in range(count):
        delivery = await receive(consumer)
        if ack:
            await delivery.ack()
        found.append(delivery.body.decode())
    return found


async def assert_silent(consumer: Consumer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SILENCE):
            await anext(consumer)


async def wait_depth(bus: Bus, queue: Queue, wanted: int) -> None:
    async def has_it() -> bool:
        return await bus.depth(queue.name) == wanted

    await until(has_it)


async def take_lock(bus: Bus, name: str) -> Lock:
    """Take a lock whose holder is just going."""
    taken: list[Lock] = []

    async def try_it() -> bool:
        with contextlib.suppress(LockHeld):
            taken.append(await bus.lock(name))
        return bool(taken)

    await until(try_it)
    return taken[0]


async def publish_all(bus: Bus, queue: Queue, *bodies: str) -> None:
    for body in bodies:
        assert await bus.publish("", queue.name, note(body))


async def tell(bus: Bus, topology: Topology, *bodies: str) -> None:
    """Publish to the stream of results."""
    for body in bodies:
        assert await bus.publish(topology.exchange("results"), "1", note(body))


class TestPublishing:
    async def test_everything_sent_arrives(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.submitted)
        sent = Envelope(
            body=bytes(range(256)),
            kind="task_submission",
            message_id="id-1",
            content_type="application/json",
            headers={"batch": "3/x", "attempt": 2, "share": 0.5, "urgent": True},
            correlation_id="c-1",
            reply_to="r-1",
        )
        assert await bus.publish(topology.exchange("tasks"), "submit", sent)
        got = await receive(await bus.consume(topology.submitted))
        assert got.body == sent.body
        assert (got.message_id, got.content_type, got.correlation_id, got.reply_to) == (
            "id-1",
            "application/json",
            "c-1",
            "r-1",
        )
        assert got.headers == {"batch": "3/x", "attempt": 2, "share": 0.5, "urgent": True, "kind": "task_submission"}
        assert (got.kind, got.exchange, got.routing_key) == ("task_submission", topology.exchange("tasks"), "submit")
        assert (got.queue, got.offset, got.deliveries_before) == (topology.submitted.name, None, 0)

    async def test_unroutable_is_false(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.tasks_train)
        assert not await bus.publish(topology.exchange("tasks"), "elsewhere", note("x"))
        assert not await bus.publish("", f"{topology.prefix}nobody", note("x"))
        assert await bus.publish(topology.exchange("tasks"), "train.1", note("x"))

    async def test_a_deleted_queue_is_declared_again_unless_it_must_not_be(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.closed)
        await bus.delete(topology.closed.name)
        with pytest.raises(QueueGone, match="does not exist any more"):
            await bus.publish_declared(replace(topology.closed, redeclare=False), "closed", note("a"))
        await bus.publish_declared(topology.closed, "closed", note("b"))
        async with await bus.consume(topology.closed) as consumer:
            assert await texts(consumer, 1) == ["b"]

    async def test_unknown_exchange_is_an_error_that_lists_the_known(self, bus: Bus, topology: Topology) -> None:
        with pytest.raises(ValueError, match="is not an exchange of this run"):
            await bus.publish("tmq.other.tasks", "train.1", note("x"))

    async def test_two_publishes_under_one_id_are_told_apart(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.tasks_train)
        same = note("x", message_id="same")
        exchange = topology.exchange("tasks")
        async with asyncio.TaskGroup() as group:
            keys = ("train.1", "elsewhere", "train.2", "nowhere")
            made = [group.create_task(bus.publish(exchange, key, same)) for key in keys]
        assert [task.result() for task in made] == [True, False, True, False]

    async def test_too_large_is_refused_and_harms_nobody(self, world: World, topology: Topology) -> None:
        bus = await world.bus(BrokerConfig(max_message_bytes=64 * 1024))
        await bus.declare(topology.dead)
        with pytest.raises(MessageTooLarge, match=r"65537 bytes is over broker\.max_message_bytes"):
            await bus.publish("", topology.dead.name, Envelope(body=bytes(64 * 1024 + 1), kind="note"))
        assert await bus.publish("", topology.dead.name, Envelope(body=bytes(64 * 1024), kind="note"))

    async def test_two_hundred_at_once_all_arrive_in_order(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(bus.publish("", topology.dead.name, note(str(n)))) for n in range(200)]
        assert all(task.result() for task in made)
        assert await texts(await bus.consume(topology.dead), 200) == [str(n) for n in range(200)]

    async def test_large_bodies_pass_unchanged(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        body = bytes(n % 251 for n in range(3_000_000))
        await bus.publish("", topology.dead.name, Envelope(body=body, kind="note"))
        assert (await receive(await bus.consume(topology.dead))).body == body

    async def test_lost_confirm_is_repeated_under_the_same_id(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        assert await world.publish_with_lost_confirm(bus, topology.dead, note("once", message_id="id-7"))
        consumer = await bus.consume(topology.dead)
        copies = [await receive(consumer), await receive(consumer)]
        assert [(copy.message_id, copy.body) for copy in copies] == [("id-7", b"once")] * 2
        await assert_silent(consumer)


class TestRouting:
    async def test_every_bound_queue_gets_its_copy(self, bus: Bus, topology: Topology) -> None:
        first = topology.listener("a", "1", "telemetry", "beat.#")
        second = topology.listener("b", "1", "telemetry", "beat.runner.*", "metrics.#")
        consumers = [await bus.consume(first), await bus.consume(second)]
        exchange = topology.exchange("telemetry")
        for key in ("beat", "beat.runner.1", "beat.runner.1.x", "metrics", "metrics.trainer.0"):
            assert await bus.publish(exchange, key, note(key))
        assert not await bus.publish(exchange, "other.beat", note("lost"))
        assert await texts(consumers[0], 3) == ["beat", "beat.runner.1", "beat.runner.1.x"]
        assert await texts(consumers[1], 3) == ["beat.runner.1", "metrics", "metrics.trainer.0"]

    async def test_unbound_queue_gets_nothing_more_also_after_a_reconnect(
        self, world: World, topology: Topology
    ) -> None:
        bus = await world.bus()
        exchange = topology.exchange("tasks")
        await bus.declare(topology.tasks_train)
        await bus.unbind(topology.tasks_train)
        assert not await bus.publish(exchange, "train.1", note("x"))
        world.keep_out(bus)
        world.let_in(bus)
        await wait_depth(bus, topology.tasks_train, 0)
        assert not await bus.publish(exchange, "train.1", note("x"))

    async def test_replies_reach_an_exclusive_queue(self, world: World, topology: Topology) -> None:
        asking, answering = await world.bus(), await world.bus()
        replies = topology.listener("submit", "1", "control")
        consumer = await asking.consume(replies)
        assert await answering.publish("", replies.name, note("done", correlation_id="c"))
        assert (await receive(consumer)).correlation_id == "c"


class TestWorkQueues:
    async def test_answers_end_or_repeat_a_delivery(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.tasks_train, topology.dead)
        await publish_all(bus, topology.tasks_train, "a", "b", "c")
        consumer = await bus.consume(topology.tasks_train, prefetch=1)
        first = await receive(consumer)
        await first.requeue()
        again = await receive(consumer)
        assert (again.body, again.deliveries_before) == (b"a", 1)
        await again.requeue()
        third = await receive(consumer)
        assert (third.body, third.deliveries_before) == (b"a", 2)
        await third.ack()
        assert await texts(consumer, 2) == ["b", "c"]
        await assert_silent(consumer)
        assert await bus.depth(topology.tasks_train.name) == 0

    async def test_rejected_goes_to_dead_with_its_reason(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.tasks_train, topology.dead)
        sent = note("bad", message_id="id-3")
        await bus.publish(topology.exchange("tasks"), "train.9", sent)
        await (await receive(await bus.consume(topology.tasks_train))).reject()
        dead = await receive(await bus.consume(topology.dead))
        assert (dead.body, dead.message_id, dead.routing_key, dead.kind) == (b"bad", "id-3", "train.9", "note")
        assert dead.exchange == topology.exchange("dead")
        assert dead.headers["x-first-death-queue"] == topology.tasks_train.name
        assert dead.headers["x-first-death-reason"] == "rejected"

    async def test_prefetch_bounds_what_is_under_way(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        await publish_all(bus, topology.dead, "a", "b", "c")
        consumer = await bus.consume(topology.dead, prefetch=2)
        first, second = await receive(consumer), await receive(consumer)
        await assert_silent(consumer)
        await second.ack()
        assert (await receive(consumer)).body == b"c"
        await first.ack()

    async def test_two_consumers_share_and_lose_nothing(self, world: World, topology: Topology) -> None:
        buses = [await world.bus(), await world.bus()]
        await buses[0].declare(topology.dead)
        await publish_all(buses[0], topology.dead, *map(str, range(20)))
        consumers = [await bus.consume(topology.dead, prefetch=1) for bus in buses]
        found: list[str] = []
        shares = Counter[int]()

        async def work(number: int, consumer: Consumer) -> None:
            async for delivery in consumer:
                found.append(delivery.body.decode())
                shares[number] += 1
                await delivery.ack()
                if len(found) == 20:
                    for one in consumers:
                        await one.close()

        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for number, consumer in enumerate(consumers):
                group.create_task(work(number, consumer))
        assert sorted(found, key=int) == [str(n) for n in range(20)]
        assert len(shares) == 2

    async def test_closing_gives_back_and_counts(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        await publish_all(bus, topology.dead, "a", "b")
        consumer = await bus.consume(topology.dead)
        held = await receive(consumer)
        await consumer.close()
        with pytest.raises(StaleDelivery):
            await held.ack()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        second = await bus.consume(topology.dead)
        again = [await receive(second), await receive(second)]
        assert [(one.body, one.deliveries_before) for one in again] == [(b"a", 1), (b"b", 1)]

    async def test_stopping_keeps_what_has_arrived(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        await bus.declare(topology.dead)
        await publish_all(bus, topology.dead, "a", "b", "c")
        consumer = await bus.consume(topology.dead, prefetch=2)
        held = await receive(consumer)
        await wait_depth(bus, topology.dead, 1)
        await consumer.stop()
        await held.ack()
        assert [delivery.body async for delivery in consumer] == [b"b"]
        elsewhere = await other.consume(topology.dead)
        assert await texts(elsewhere, 1) == ["c"]
        await consumer.close()
        assert await texts(elsewhere, 1) == ["b"]

    async def test_get_nowait_takes_only_what_is_there(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        consumer = await bus.consume(topology.dead)
        assert consumer.get_nowait() is None
        await publish_all(bus, topology.dead, "a", "b")
        assert await texts(consumer, 1) == ["a"]
        found: list[Delivery] = []
        await until(lambda: bool((one := consumer.get_nowait()) and (found.append(one) or True)))
        assert [one.body for one in found] == [b"b"]

    async def test_a_second_answer_is_stale(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.dead)
        await publish_all(bus, topology.dead, "a", "b")
        consumer = await bus.consume(topology.dead)
        first = await receive(consumer)
        await first.ack()
        with pytest.raises(StaleDelivery, match="already answered"):
            await first.requeue()
        assert await texts(consumer, 1) == ["b"]

    async def test_single_active_consumer_hands_over_in_order(self, world: World, topology: Topology) -> None:
        active, waiting = await world.bus(), await world.bus()
        queue = topology.batch_queue(1, "t1")
        await active.declare(queue)
        await publish_all(active, queue, "a", "b", "c")
        first = await active.consume(queue, prefetch=3)
        assert await texts(first, 3, ack=False) == ["a", "b", "c"]
        second = await waiting.consume(queue)
        await assert_silent(second)
        await publish_all(active, queue, "d")
        await assert_silent(second)
        await first.close()
        assert await texts(second, 4) == ["a", "b", "c", "d"]
        await waiting.delete(queue.name)


class TestQueuesThatComeAndGo:
    async def test_declaring_again_changes_nothing(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.tasks_train)
        await publish_all(bus, topology.tasks_train, "a")
        await bus.declare(topology.tasks_train)
        assert await bus.depth(topology.tasks_train.name) == 1

    async def test_a_queue_with_other_arguments_is_used_as_it_is(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        await bus.declare(topology.results)
        await other.declare(replace(topology.results, max_length_bytes=64 * 1024**2))
        assert await other.publish(topology.exchange("results"), "1", note("a"))
        assert (await receive(await other.consume(topology.results, offset=0))).body == b"a"

    async def test_depth_of_nothing_is_none_and_makes_nothing(self, bus: Bus, topology: Topology) -> None:
        assert await bus.depth(topology.dead.name) is None
        assert await bus.depth(topology.dead.name) is None
        await bus.delete(topology.dead.name)

    async def test_deleting_ends_its_consumers(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        queue = topology.batch_queue(1, "t1")
        await bus.declare(queue)
        consumer = await other.consume(queue)
        pending = asyncio.create_task(receive(consumer))
        await asyncio.sleep(0)
        await bus.delete(queue.name)
        with pytest.raises(QueueGone, match=r"batch\.t1"):
            await pending
        with pytest.raises(QueueGone):
            await receive(consumer)
        with pytest.raises(QueueGone, match=r"batch\.t1"):
            await bus.consume(queue)
        assert await bus.depth(queue.name) is None

    async def test_a_reconnect_does_not_bring_back_what_was_deleted(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        queue = topology.batch_queue(1, "t1")
        await bus.declare(queue, topology.dead)
        consumer = await bus.consume(queue)
        world.keep_out(bus)
        await other.delete(queue.name)
        world.let_in(bus)
        with pytest.raises(QueueGone):
            await receive(consumer)
        assert await bus.depth(queue.name) is None

    async def test_a_deleted_work_queue_comes_back_with_its_consumer(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        consumer = await bus.consume(topology.tasks_train)
        exchange = topology.exchange("tasks")
        await other.publish(exchange, "train.1", note("before"))
        delivery = await receive(consumer)
        await other.delete(topology.tasks_train.name)
        await until(lambda: other.publish(exchange, "train.1", note("after")))
        assert await texts(consumer, 1) == ["after"]
        with contextlib.suppress(StaleDelivery):
            await delivery.ack()

    async def test_a_reconnect_makes_the_others_again(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        listener = topology.listener("a", "1", "control", "restart.a")
        consumer = await bus.consume(listener)
        await bus.declare(topology.tasks_train)
        world.keep_out(bus)
        await other.delete(topology.tasks_train.name)
        world.let_in(bus)
        await until(lambda: other.publish(topology.exchange("control"), "restart.a", note("again")))
        assert await texts(consumer, 1) == ["again"]
        assert await bus.publish(topology.exchange("tasks"), "train.1", note("x"))


class TestStreams:
    async def test_reads_from_an_offset_as_often_as_wanted(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.results)
        await tell(bus, topology, *map(str, range(10)))
        for start in (0, 7):
            async with await bus.consume(topology.results, offset=start) as consumer:
                found = [await receive(consumer) for _ in range(10 - start)]
                assert [one.offset for one in found] == list(range(start, 10))
                assert [one.body for one in found] == [str(n).encode() for n in range(start, 10)]
                await found[0].ack()
                await found[0].reject()

    async def test_no_offset_means_from_now_on(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.results)
        await tell(bus, topology, "old", "older")
        consumer = await bus.consume(topology.results)
        await tell(bus, topology, "new")
        first = await receive(consumer)
        assert (first.body, first.offset) == (b"new", 2)

    async def test_a_reader_knows_by_its_mark_that_it_has_read_all(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.results)
        await tell(bus, topology, "a", "b")
        consumer = await bus.consume(topology.results, offset=0)
        await bus.publish(topology.exchange("results"), "1", Envelope(body=b"nonce", kind="mark"))
        found = []
        while (delivery := await receive(consumer)).kind != "mark":
            found.append(delivery.body)
        assert found == [b"a", b"b"]

    async def test_more_than_a_window_flows_without_answers(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.results)
        async with asyncio.TaskGroup() as group:
            for n in range(200):
                group.create_task(tell(bus, topology, str(n)))
        consumer = await bus.consume(topology.results, offset=0)
        assert await texts(consumer, 200, ack=False) == [str(n) for n in range(200)]

    async def test_an_offset_beyond_the_end_waits(self, bus: Bus, topology: Topology) -> None:
        await bus.declare(topology.results)
        consumer = await bus.consume(topology.results, offset=2)
        await tell(bus, topology, "a", "b")
        await assert_silent(consumer)

    async def test_goes_on_behind_the_last_after_a_reconnect(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        await bus.declare(topology.results)
        await tell(bus, topology, *map(str, range(50)))
        consumer = await bus.consume(topology.results, offset=0)
        assert await texts(consumer, 20) == [str(n) for n in range(20)]
        world.cut(bus)
        await tell(other, topology, "50")
        assert await texts(consumer, 31) == [str(n) for n in range(20, 51)]

    async def test_nothing_is_missed_when_cut_before_the_first(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        consumer = await bus.consume(topology.results)
        world.keep_out(bus)
        await tell(other, topology, "while away")
        world.let_in(bus)
        assert await texts(consumer, 1) == ["while away"]


class TestReconnecting:
    async def test_unanswered_comes_again_and_old_answers_are_stale(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        await publish_all(bus, topology.dead, "a", "b")
        consumer = await bus.consume(topology.dead, prefetch=1)
        held = await receive(consumer)
        world.cut(bus)
        again = await receive(consumer)
        assert (again.body, again.deliveries_before) == (b"a", 1)
        with pytest.raises(StaleDelivery):
            await held.ack()
        await again.ack()
        assert await texts(consumer, 1) == ["b"]

    async def test_publishes_under_way_complete(self, world: World, topology: Topology) -> None:
        bus, other = await world.bus(), await world.bus()
        await bus.declare(topology.dead)
        body = bytes(20_000)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            made = [
                group.create_task(
                    bus.publish("", topology.dead.name, Envelope(body=body, kind="note", message_id=str(n)))
                )
                for n in range(100)
            ]
            await asyncio.sleep(0.002)
            world.cut(bus)
        assert all(task.result() for task in made)
        found: set[str | None] = set()
        consumer = await other.consume(topology.dead)
        while len(found) < 100:
            found.add((await receive(consumer)).message_id)
        assert found == {str(n) for n in range(100)}

    async def test_usable_tells_and_operations_wait(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        seen: list[bool] = []
        bus.on_change(lambda: seen.append(bus.usable))
        assert bus.trouble is None
        world.keep_out(bus)
        await until(lambda: not bus.usable)
        assert "connection" in (bus.trouble or "")
        publishing = asyncio.create_task(bus.publish("", topology.dead.name, note("late")))
        looking = asyncio.create_task(bus.depth(topology.dead.name))
        await asyncio.sleep(0.05)
        assert not publishing.done()
        assert not looking.done()
        world.let_in(bus)
        async with asyncio.timeout(10):
            await bus.wait_usable()
            assert await publishing
            assert await looking is not None
        assert bus.trouble is None
        assert seen == [False, True]

    async def test_a_publish_gives_up_in_time(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        world.keep_out(bus)
        with pytest.raises(BusUnavailable, match=r"not confirmed in 0\.1 s"):
            await bus.publish("", topology.dead.name, note("x"), timeout=0.1)

    async def test_closing_while_disconnected(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        consumer = await bus.consume(topology.dead)
        world.keep_out(bus)
        publishing = asyncio.create_task(bus.publish("", topology.dead.name, note("x")))
        iterating = asyncio.create_task(receive(consumer))
        await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            await bus.close()
            with pytest.raises(BusUnavailable, match="closed"):
                await publishing
            with pytest.raises(StopAsyncIteration):
                await iterating
            with pytest.raises(BusUnavailable, match="closed"):
                await bus.wait_usable()
        await bus.close()

    async def test_a_closed_bus_may_be_connected_again(self, world: World, topology: Topology) -> None:
        bus = await world.bus()
        await bus.declare(topology.dead)
        await bus.lock("explorer")
        await bus.close()
        await bus.connect()
        assert bus.usable
        assert await bus.publish("", topology.dead.name, note("x"))
        async with await bus.consume(topology.dead) as consumer:
            assert (await receive(consumer)).body == b"x"
        other = await world.bus()
        assert (await take_lock(other, "explorer")).held, "the lock went with the connection"


class TestLocks:
    async def test_excludes_and_passes_on(self, world: World, topology: Topology) -> None:
        first, second = await world.bus(), await world.bus()
        lock = await first.lock("explorer")
        assert lock.held
        with pytest.raises(LockHeld):
            await second.lock("explorer")
        with pytest.raises(LockHeld):
            await second.lock(topology.lock("explorer"))
        other = await second.lock("trainer")
        assert other.held
        await lock.release()
        assert not lock.held
        assert (await second.lock("explorer")).held

    async def test_is_retaken_after_a_reconnect(self, world: World) -> None:
        first, second = await world.bus(), await world.bus()
        lock = await first.lock("explorer")
        world.keep_out(first)
        await until(lambda: not lock.held)
        async with asyncio.timeout(10):
            world.let_in(first)
            await first.wait_usable()
        assert lock.held
        with pytest.raises(LockHeld):
            await second.lock("explorer")

    async def test_is_lost_when_another_took_it_meanwhile(self, world: World) -> None:
        first = await world.bus(BrokerConfig(heartbeat=1))
        second = await world.bus()
        lock = await first.lock("explorer")
        world.keep_out(first)
        await take_lock(second, "explorer")
        async with asyncio.timeout(10):
            world.let_in(first)
            await lock.wait_lost()
        assert not lock.held
