"""A Bus without a broker and with the same semantics, for tests: on asyncio alone, so it follows any loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tenacity import wait_fixed

from trinity_mq.bus.base import Bus, BusUnavailable, Consumer, Envelope, Lock, LockHeld, QueueGone
from trinity_mq.bus.checks import BLOCKED, CLOSED, NOT_CONNECTED, Health, check_outgoing, lock_queue
from trinity_mq.bus.memory.broker import MemoryBroker, check_owner
from trinity_mq.bus.memory.consumer import MemoryConsumer
from trinity_mq.bus.memory.queues import Stored
from trinity_mq.bus.retry import retrying
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

__all__ = ["MemoryBroker", "MemoryBus"]

REPEAT_PAUSE = 0.1
"""Seconds until a publish whose confirm was lost is repeated."""


class _ConfirmLostError(Exception):
    """Stored, but the publisher does not know."""


class MemoryBus(Bus):
    """One agent's access to a :class:`MemoryBroker`.

    Args:
        broker: The state that all buses of a test share.
        topology: Names of the run.
        config: Sizes and timeouts, as for RabbitMQ.
    """

    def __init__(self, broker: MemoryBroker, topology: Topology, *, config: BrokerConfig) -> None:
        self.max_message_bytes = config.max_message_bytes
        self._broker, self._topology, self._config = broker, topology, config
        self._exchanges = frozenset(topology.exchanges)
        self._health = Health()
        self._connected = asyncio.Event()
        self._down: str | None = NOT_CONNECTED
        self._closed = False
        self._return: asyncio.TimerHandle | None = None
        self._declared: dict[str, Queue] = {}
        self._consumers: list[MemoryConsumer] = []
        self._locks: dict[str, _MemoryLock] = {}

    async def connect(self) -> None:
        """Connect; a broker in memory never refuses."""
        self.reconnect()

    async def close(self) -> None:
        """Close everything."""
        for consumer in tuple(self._consumers):
            await consumer.close()
        self._closed = True
        self.disconnect(CLOSED)
        self._health.close()

    @property
    def usable(self) -> bool:
        """Connected and not blocked."""
        return self._health.usable

    @property
    def trouble(self) -> str | None:
        """Why it is not usable."""
        return self._health.trouble

    async def wait_usable(self) -> None:
        """Return once usable."""
        await self._health.wait_usable()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when :attr:`usable` changes."""
        self._health.on_change(callback)

    async def declare(self, *queues: Queue) -> None:
        """Declare queues and bindings."""
        await self._connection()
        for queue in queues:
            self._broker.declare(queue, self)
            if queue.redeclare:
                self._declared[queue.name] = queue

    async def unbind(self, queue: Queue) -> None:
        """Remove the queue's bindings."""
        await self._connection()
        self._broker.unbind(queue.name, queue.bindings)
        if queue.name in self._declared:
            self._declared[queue.name] = replace(queue, bindings=())

    async def delete(self, name: str) -> None:
        """Delete a queue."""
        await self._connection()
        self._declared.pop(name, None)
        self._broker.delete(name)

    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages."""
        await self._connection()
        queue = self._broker.queues.get(name)
        return None if queue is None else queue.depth

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish and wait for the confirm."""
        check_outgoing(self._exchanges, exchange, envelope, self.max_message_bytes)
        seconds = self._config.publish_timeout if timeout is None else timeout
        message = Stored(
            body=envelope.body,
            exchange=exchange,
            routing_key=routing_key,
            message_id=envelope.message_id,
            content_type=envelope.content_type,
            headers={**envelope.headers, "kind": envelope.kind},
            correlation_id=envelope.correlation_id,
            reply_to=envelope.reply_to,
        )
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._publish_once(message)
                except _ConfirmLostError:
                    again = retrying(_ConfirmLostError, wait=wait_fixed(REPEAT_PAUSE))
                    await asyncio.sleep(REPEAT_PAUSE)
                    return await again(self._publish_once, message)
        except TimeoutError:
            what = f"{envelope.kind} {envelope.message_id}"
            raise BusUnavailable(f"{what} was not confirmed in {seconds:g} s: {self.trouble or 'no reply'}") from None

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming."""
        await self._connection()
        if queue.redeclare:
            await self.declare(queue)
        elif queue.name not in self._broker.queues:
            raise QueueGone(f"queue {queue.name} does not exist")
        check_owner(self._broker.queues[queue.name], self)
        consumer = MemoryConsumer(self._broker, queue, prefetch, offset, self._forget)
        self._consumers.append(consumer)
        consumer.attach()
        return consumer

    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock."""
        await self._connection()
        queue = Queue(name=lock_queue(self._topology, name), kind="exclusive")
        if queue.name in self._broker.queues:
            raise LockHeld(f"{queue.name} is held")
        self._broker.declare(queue, self)
        lock = self._locks[queue.name] = _MemoryLock(self, queue)
        return lock

    def retake(self, queue: Queue) -> bool:
        """Take a lock's queue again, unless another has it."""
        if queue.name in self._broker.queues:
            return False
        self._broker.declare(queue, self)
        return True

    def release(self, queue: Queue, held: bool) -> None:
        """Give a lock up."""
        self._locks.pop(queue.name, None)
        if held:
            self._broker.delete(queue.name)

    def disconnect(self, reason: str) -> None:
        """Lose the connection: deliveries return, exclusive queues and locks go."""
        self._cancel_return()
        self._down = reason
        if self._connected.is_set():
            self._connected.clear()
            for lock in self._locks.values():
                lock.suspend()
            for consumer in self._consumers:
                consumer.detach()
            self._broker.leave(self)
        self.refresh()

    def reconnect_in(self, seconds: float) -> None:
        """Reconnect after a while."""
        self._return = asyncio.get_running_loop().call_later(seconds, self.reconnect)

    def reconnect(self) -> None:
        """Connect and rebuild: locks, queues, consumers."""
        self._cancel_return()
        if self._closed or self._connected.is_set():
            return
        self._broker.enter(self)
        self._connected.set()
        self._down = None
        for name, lock in tuple(self._locks.items()):
            if not lock.resume():
                del self._locks[name]
        for queue in self._declared.values():
            self._broker.declare(queue, self)
        for consumer in self._consumers:
            if not consumer.over:
                consumer.attach()
        self.refresh()

    def refresh(self) -> None:
        """Work out what the trouble is, if any."""
        self._health.set(self._down or (BLOCKED if self._broker.blocked else None))

    def _forget(self, consumer: MemoryConsumer) -> None:
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    def _cancel_return(self) -> None:
        if self._return is not None:
            self._return.cancel()
            self._return = None

    async def _connection(self) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise BusUnavailable(CLOSED)
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                await self._connected.wait()
        except TimeoutError:
            raise BusUnavailable(f"not connected in {self._config.connect_timeout:g} s: {self.trouble}") from None

    async def _publish_once(self, message: Stored) -> bool:
        await asyncio.sleep(0)  # a confirm takes a round trip: callers must not count on less
        await self._health.wait_usable()
        routed = self._broker.route(message)
        if self._broker.loses_confirm():
            raise _ConfirmLostError
        return routed


class _MemoryLock(Lock):
    """An exclusive queue and what became of it."""

    def __init__(self, bus: MemoryBus, queue: Queue) -> None:
        self._bus, self._queue = bus, queue
        self._held = True
        self._lost = asyncio.Event()

    @property
    def held(self) -> bool:
        """Held now."""
        return self._held

    async def wait_lost(self) -> None:
        """Return when another took it."""
        await self._lost.wait()

    async def release(self) -> None:
        """Give it up."""
        self._bus.release(self._queue, self._held)
        self._held = False

    def suspend(self) -> None:
        """Disconnected."""
        self._held = False

    def resume(self) -> bool:
        """Connected again: retake it, or it is lost."""
        self._held = self._bus.retake(self._queue)
        if not self._held:
            self._lost.set()
        return self._held
