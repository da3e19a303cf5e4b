"""A Bus without a broker and with the same semantics, for tests. It uses only asyncio, so it follows any loop's
clock.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

from trinity_mq.bus.base import (
    CLOSED,
    Bus,
    BusRefused,
    BusUnavailable,
    Consumer,
    Lock,
    LockHeld,
    QueueGone,
)
from trinity_mq.bus.memory.queues import MemoryConsumer, MemoryQueue, Stored, StreamQueue, WorkQueue
from trinity_mq.bus.properties import Envelope
from trinity_mq.bus.routing import topic_matches
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

REPEAT_PAUSE = 0.1
"""Seconds until a publish with a lost confirm is repeated."""


class MemoryBroker:
    """In-memory broker of a test, shared by its buses, with the faults that the test can inject."""

    def __init__(self) -> None:
        self.queues: dict[str, MemoryQueue] = {}
        self.blocked = False
        self._bindings: dict[str, set[tuple[str, str]]] = defaultdict(set)  # exchange to (pattern, queue)
        self._clients: list[MemoryBus] = []
        self._confirms_to_lose = 0

    @property
    def clients(self) -> list[MemoryBus]:
        """Connected buses, oldest connection first."""
        return list(self._clients)

    def drop(self, bus: MemoryBus, *, delay: float | None = 0.5) -> None:
        """Cut the connection of ``bus``. It reconnects after ``delay`` seconds, or on :meth:`restore` if ``delay`` is
        None.
        """
        bus.disconnect("connection lost")
        if delay is not None:
            bus.reconnect_in(delay)

    def restore(self, bus: MemoryBus) -> None:
        """Reconnect ``bus`` now."""
        bus.reconnect()

    def block(self) -> None:
        """Raise an alarm that makes publishers wait."""
        self._alarm(True)

    def unblock(self) -> None:
        self._alarm(False)

    def lose_confirm_once(self) -> None:
        """Store the next message but lose its confirm, so that its publisher repeats it."""
        self._confirms_to_lose += 1

    def loses_confirm(self) -> bool:
        if not self._confirms_to_lose:
            return False
        self._confirms_to_lose -= 1
        return True

    def enter(self, client: MemoryBus) -> None:
        self._clients.append(client)

    def leave(self, client: MemoryBus) -> None:
        """Remove a connection and its exclusive queues."""
        self._clients.remove(client)
        for name in [name for name, queue in self.queues.items() if queue.owner is client]:
            self.delete(name)

    def declare(self, queue: Queue, client: MemoryBus | None) -> MemoryQueue:
        """Return the queue with its bindings, and create it if it is missing. Raises BusRefused if another connection
        owns it exclusively.
        """
        stored_queue = self.queues.get(queue.name)
        if stored_queue is None:
            owner = client if queue.kind == "exclusive" else None
            stored_queue = StreamQueue(queue, owner) if queue.kind == "stream" else WorkQueue(queue, owner)
            self.queues[queue.name] = stored_queue
        check_owner(stored_queue, client)
        for binding in queue.bindings:
            self._bindings[binding.exchange].add((binding.pattern, queue.name))
        return stored_queue

    def unbind(self, queue: Queue) -> None:
        for binding in queue.bindings:
            self._bindings[binding.exchange].discard((binding.pattern, queue.name))

    def delete(self, name: str) -> None:
        """Remove a queue with its bindings. Consumers that declare the queue again are attached to the new queue; all
        other consumers end.
        """
        for bound in self._bindings.values():
            bound.difference_update({entry for entry in bound if entry[1] == name})
        queue = self.queues.pop(name, None)
        if queue is not None:
            for consumer in queue.delete():
                consumer.attach(self.declare(consumer.queue, None))

    def delete_exchange(self, name: str) -> None:
        """Remove an exchange with its bindings."""
        self._bindings.pop(name, None)

    def route(self, message: Stored) -> bool:
        """Store a message in every queue with a matching binding. Return whether a queue matched."""
        if message.exchange:
            bound = self._bindings[message.exchange]
            names = {name for pattern, name in bound if topic_matches(pattern, message.routing_key)}
        else:
            names = {message.routing_key} & self.queues.keys()
        for name in sorted(names):
            self.queues[name].put(message)
        return bool(names)

    def dead_letter(self, queue: Queue, message: Stored) -> None:
        """Route a rejected message to the dead-letter exchange, with the reason, under its own routing key or the
        queue's dead-letter key. Drop it if the queue has no dead-letter exchange.
        """
        if queue.dead_letter_exchange is None:
            return
        reason = {
            "x-first-death-queue": queue.name,
            "x-first-death-reason": "rejected",
            "x-first-death-exchange": message.exchange,
        }
        headers = {**message.headers, **reason}
        key = queue.dead_letter_routing_key or message.routing_key
        moved = replace(message, exchange=queue.dead_letter_exchange, routing_key=key, headers=headers)
        self.route(replace(moved, deliveries_before=0))

    def _alarm(self, blocked: bool) -> None:
        self.blocked = blocked
        for client in self._clients:
            client.refresh()


class MemoryBus(Bus):
    """Access of a single agent to a :class:`MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, topology: Topology, *, config: BrokerConfig) -> None:
        super().__init__(topology, config)
        self._broker = broker
        self._connected = asyncio.Event()
        self._return: asyncio.TimerHandle | None = None
        self._declared: dict[str, Queue] = {}
        self._consumers: list[MemoryConsumer] = []

    async def connect(self) -> None:
        if self._closed:
            self._closed = False
            self._locks.clear()
        self.reconnect()

    async def close(self) -> None:
        for consumer in tuple(self._consumers):
            await consumer.close()
        self._closed = True
        self.disconnect(CLOSED)

    async def declare(self, *queues: Queue) -> None:
        await self._connection()
        for queue in queues:
            self._broker.declare(queue, self)
            if queue.redeclare:
                self._declared[queue.name] = queue

    async def unbind(self, queue: Queue) -> None:
        await self._connection()
        self._broker.unbind(queue)
        if queue.name in self._declared:
            self._declared[queue.name] = replace(queue, bindings=())

    async def delete(self, name: str) -> None:
        await self._connection()
        self._declared.pop(name, None)
        self._broker.delete(name)

    async def delete_exchanges(self) -> None:
        await self._connection()
        for name in self._topology.exchanges:
            self._broker.delete_exchange(name)

    async def depth(self, name: str) -> int | None:
        await self._connection()
        queue = self._broker.queues.get(name)
        return None if queue is None else queue.depth

    async def _publish(self, exchange: str, routing_key: str, envelope: Envelope) -> bool:
        message = Stored(
            body=envelope.body,
            exchange=exchange,
            routing_key=routing_key,
            queue="",
            message_id=envelope.message_id,
            content_type=envelope.content_type,
            headers={**envelope.headers, "kind": envelope.kind},
            correlation_id=envelope.correlation_id,
            reply_to=envelope.reply_to,
        )
        while True:
            await asyncio.sleep(0)  # a confirm takes a round trip, and callers must not rely on less
            await self.wait_usable()
            routed = self._broker.route(message)
            if not self._broker.loses_confirm():
                return routed
            await asyncio.sleep(REPEAT_PAUSE)

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        await self._connection()
        if queue.redeclare:
            await self.declare(queue)
        elif queue.name not in self._broker.queues:
            raise QueueGone(f"queue {queue.name} does not exist")
        stored_queue = self._broker.queues[queue.name]
        check_owner(stored_queue, self)
        consumer = MemoryConsumer(queue, prefetch, offset, self._broker.dead_letter, self._forget)
        self._consumers.append(consumer)
        consumer.attach(stored_queue)
        return consumer

    async def lock(self, name: str) -> Lock:
        await self._connection()
        queue = self._topology.lock(name)
        if not self._take(queue):
            raise LockHeld(f"{queue} is held")
        lock = self._locks[queue] = Lock(queue, self._release)
        return lock

    def _take(self, lock: str) -> bool:
        """Declare the queue of a lock, unless the queue exists. Return whether the lock was taken."""
        if lock in self._broker.queues:
            return False
        self._broker.declare(Queue(name=lock, kind="exclusive"), self)
        return True

    async def _release(self, lock: Lock) -> None:
        self._locks.pop(lock.queue, None)
        if lock.held:
            self._broker.delete(lock.queue)

    def disconnect(self, reason: str) -> None:
        """Drop the connection: deliveries return to their queues, and exclusive queues and locks are lost."""
        self._cancel_return()
        self._down = reason
        if self._connected.is_set():
            self._connected.clear()
            for lock in self._locks.values():
                lock.held = False
            for consumer in self._consumers:
                consumer.detach()
            self._broker.leave(self)
        self.refresh()

    def reconnect_in(self, seconds: float) -> None:
        self._return = asyncio.get_running_loop().call_later(seconds, self.reconnect)

    def reconnect(self) -> None:
        """Connect, and rebuild locks, queues and consumers."""
        self._cancel_return()
        if self._closed or self._connected.is_set():
            return
        self._broker.enter(self)
        self._connected.set()
        self._down = None
        for name, lock in tuple(self._locks.items()):
            lock.reconnected(retaken=self._take(name))
            if not lock.held:
                del self._locks[name]
        for queue in self._declared.values():
            self._broker.declare(queue, self)
        for consumer in self._consumers:
            if not consumer.over:
                consumer.attach(self._broker.queues.get(consumer.queue.name))
        self.refresh()

    def refresh(self) -> None:
        """Update the state of the bus from the broker's alarm and the connection."""
        self._blocked = self._broker.blocked
        self._refresh()

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


def check_owner(queue: MemoryQueue, client: MemoryBus | None) -> None:
    """Refuse the use of an exclusive queue of another connection."""
    if queue.owner is not None and queue.owner is not client:
        raise BusRefused(f"queue {queue.declared.name} is exclusive to another connection")
