"""What an AMQP client's errors come to, that nobody waits for a dead connection, and how it connects again."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from aiormq.exceptions import (
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelLockedResource,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionClosed,
)
from tenacity import RetryCallState

from trinity_mq.bus.base import BusRefused, BusUnavailable, QueueGone
from trinity_mq.bus.rabbit import bus as rabbit_bus
from trinity_mq.bus.rabbit.bus import RabbitBus
from trinity_mq.bus.rabbit.connection import BrokerConnectError, InequivalentError, Locked, _drain, amqp_errors
from trinity_mq.bus.retry import backoff, retrying
from trinity_mq.bus.topology import Topology
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.testing.virtual_time import run_virtually


@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (ChannelNotFoundEntity("NOT_FOUND - no queue 'q' in vhost '/'"), QueueGone),
        (ChannelNotFoundEntity("NOT_FOUND - home node 'n' of durable queue 'q' is down"), BrokerConnectError),
        (ChannelNotFoundEntity("NOT_FOUND - no exchange 'e' in vhost '/'"), BrokerConnectError),
        (ChannelPreconditionFailed("inequivalent arg"), InequivalentError),
        (ChannelLockedResource("cannot obtain exclusive access"), Locked),
        (ChannelAccessRefused("no permission"), BusRefused),
        (ChannelInvalidStateError("closed"), BrokerConnectError),
        (ConnectionClosed(320, "CONNECTION_FORCED"), BrokerConnectError),
        (ConnectionResetError("reset"), BrokerConnectError),
        # nobody cancelled us: the client did it to a dead connection's futures
        (asyncio.CancelledError(), BrokerConnectError),
        (Exception(), BrokerConnectError),
        (ValueError("routing key too long"), ValueError),
    ],
)
async def test_errors_are_sorted_by_what_to_do_about_them(raised: BaseException, wanted: type[BaseException]) -> None:
    with pytest.raises(wanted) as caught, amqp_errors():
        raise raised
    assert caught.type is wanted


async def test_our_own_cancellation_stays_one() -> None:
    async def wait() -> None:
        with amqp_errors():
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_dead_connections_write_queue_lets_everybody_go() -> None:
    transport = SimpleNamespace(write_queue=asyncio.Queue(maxsize=10))
    async with asyncio.timeout(1), asyncio.TaskGroup() as group:
        for number in range(35):
            group.create_task(transport.write_queue.put(number))
        await asyncio.sleep(0)
        assert transport.write_queue.full()
        _drain(transport)
    assert transport.write_queue.empty()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_the_client_swallows_is_raised(fails: bool) -> None:
    """As ``asyncio.wait_for`` does before Python 3.12 where a result comes at the moment of the cancellation."""
    began = asyncio.Event()

    async def forever() -> None:
        while True:
            with contextlib.suppress(BrokerConnectError), amqp_errors():
                began.set()
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    if fails:
                        raise OSError("the connection died at the same time") from None

    task = asyncio.create_task(forever())
    await began.wait()
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done == {task}
    assert task.cancelled()


async def test_what_a_cancelled_task_cleans_up_is_not_cut_off() -> None:
    closed = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            with amqp_errors():
                await asyncio.sleep(0)
            closed.append(True)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert closed == [True]


@pytest.mark.parametrize("ends_well", [False, True])
def test_a_cancellation_that_meets_the_end_of_an_attempt_ends_the_routine(ends_well: bool) -> None:
    """As wait_for of Python 3.11 loses it: what it waited for is over in the same moment."""
    connecting = asyncio.Event()

    class LosesCancellation(RabbitBus):
        async def _renew_consuming(self, _old: object) -> Any:
            if connecting.is_set():
                return await super()._open("consumes", print)
            connecting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not ends_well:
                    raise BrokerConnectError("refused") from None

    async def closed_while_it_connects() -> None:
        bus = LosesCancellation("amqp://nobody@127.0.0.1:1/", Topology("r"), config=BrokerConfig(), name="test")
        bus._routine = asyncio.create_task(bus._keep())
        bus._broken.set()
        await connecting.wait()
        await bus.close()
        with pytest.raises(BusUnavailable):
            await bus.wait_usable()

    run_virtually(closed_while_it_connects(), limit=60)


class LookingBus(RabbitBus):
    """A bus on a broker that answers with these functions."""

    def __init__(self, **broker: Any) -> None:
        config = BrokerConfig(connect_timeout=0.1)
        super().__init__("amqp://nobody@127.0.0.1:1/", Topology("r"), config=config, name="test")
        self.repaired = asyncio.Event()
        answers: Any = SimpleNamespace(own=self.own, **broker)
        self._admin = answers
        self._rebuilt.set()

    async def own(self, _name: str) -> None:
        """Let any lock be taken."""

    async def look(self) -> None:
        await self._look_for_own_queues()

    async def _repair(self) -> None:
        self.repaired.set()


async def is_lost(_name: str) -> bool:
    return True


async def test_a_lock_that_another_connection_took_is_not_held_while_it_is_taken_again() -> None:
    held = []

    async def own_again(_name: str) -> None:
        held.append(lock.held)
        await lock.release()  # its agent ends meanwhile
        raise Locked("it belongs to another connection")

    bus = LookingBus(is_lost=is_lost, own_again=own_again)
    lock = await bus.lock("explorer")
    await bus.look()
    assert held == [False]
    async with asyncio.timeout(1):
        await lock.wait_lost()
    assert await bus.lock("explorer") is not lock, "the bus has forgotten the lost lock"


async def test_a_lock_that_is_released_while_it_is_taken_again_is_not_kept() -> None:
    deleted = []

    async def own_again(_name: str) -> None:
        await lock.release()

    async def delete(name: str) -> None:
        deleted.append(name)

    bus = LookingBus(is_lost=is_lost, own_again=own_again, delete=delete)
    lock = await bus.lock("explorer")
    await bus.look()
    assert deleted == [lock.queue]
    assert not lock.held


async def test_a_lock_that_could_not_be_taken_again_is_tried_at_the_next_look() -> None:
    answers: Any = iter([BrokerConnectError("the channel was closed"), None])

    async def own_again(_name: str) -> None:
        if (error := next(answers)) is not None:
            raise error

    bus = LookingBus(is_lost=is_lost, own_again=own_again)
    lock = await bus.lock("explorer")
    await bus.look()
    assert not lock.held
    await bus.look()
    assert lock.held


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_look_for_queues_that_fails_or_hangs_does_not_end_the_reconnect_routine(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(rabbit_bus, "LOOK_SECONDS", 0.01)
    looked = asyncio.Event()

    async def fails(_name: str) -> bool:
        looked.set()
        if hangs:
            await asyncio.Event().wait()
        raise ValueError("unexpected")

    bus = LookingBus(is_lost=fails)
    await bus.lock("explorer")
    bus._routine = asyncio.create_task(bus._keep())
    async with asyncio.timeout(10):
        await looked.wait()
        bus._broken.set()
        await bus.repaired.wait()
    await bus.close()


class FlakyError(Exception):
    """Goes away by itself."""


def test_waits_are_drawn_below_a_bound_that_doubles_up_to_a_limit() -> None:
    state, wait = RetryCallState(retrying(FlakyError), None, (), {}), backoff(first=0.1, maximum=2.0)
    for state.attempt_number, bound in ((1, 0.1), (2, 0.2), (4, 0.8), (10, 2.0)):
        drawn = [wait(state) for _ in range(200)]
        assert 0 <= min(drawn) < 0.3 * bound
        assert 0.7 * bound < max(drawn) <= bound
