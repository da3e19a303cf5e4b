"""The Bus on RabbitMQ: two plain AMQP connections, and one routine that makes everything again when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from tenacity import RetryCallState

from trinity_mq.bus._common import BLOCKED, CLOSED, NOT_CONNECTED, Health, check_outgoing, lock_queue
from trinity_mq.bus._rabbit_admin import Admin
from trinity_mq.bus._rabbit_consumer import RabbitConsumer
from trinity_mq.bus._rabbit_link import Link, LinkError, Locked, address
from trinity_mq.bus._rabbit_lock import RabbitLock
from trinity_mq.bus._rabbit_publisher import Publisher
from trinity_mq.bus.base import Bus, BusError, BusUnavailable, Consumer, Envelope, Lock, LockHeld, QueueGone
from trinity_mq.bus.retry import retrying
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

A = TypeVar("A")
T = TypeVar("T")

GHOST_HEARTBEATS = 4
"""Heartbeats after which the broker has noticed a dead connection for certain, and freed its exclusive queues."""

log = structlog.get_logger(__name__)


class RabbitBus(Bus):
    """One agent's access to RabbitMQ 3.10 or newer.

    One connection publishes; the other consumes, declares and holds the locks, since an alarm stops a publishing
    connection altogether.

    Args:
        url: ``amqp://user:password@host:port/vhost``.
        topology: Names of the run; its exchanges are declared on connect.
        config: Sizes and timeouts.
        name: Shown by the broker for the connections.
    """

    def __init__(self, url: str, topology: Topology, *, config: BrokerConfig, name: str) -> None:
        self.max_message_bytes = config.max_message_bytes
        self._url, self._topology, self._config, self._name = url, topology, config, name
        self._exchanges = frozenset(topology.exchanges)
        self._health = Health()
        self._down: str | None = NOT_CONNECTED
        self._blocked = False
        self._closed = False
        self._admin = Admin(topology, GHOST_HEARTBEATS * config.heartbeat)
        self._publisher = Publisher(self._on_blocked)
        self._consuming: Link | None = None
        self._publishing: Link | None = None
        self._consumers: set[RabbitConsumer] = set()
        self._locks: dict[str, RabbitLock] = {}
        self._rebuilt = asyncio.Event()  # the consuming connection stands with its queues, or the bus is closed
        self._broken = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Open the connections."""
        seconds = self._config.connect_timeout
        try:
            async with asyncio.timeout(seconds):
                await retrying(LinkError, before_sleep=self._note_failure)(self._repair)
        except BaseException as error:
            await self._drop_links()
            if isinstance(error, TimeoutError):
                raise BusUnavailable(
                    f"no RabbitMQ at {address(self._url)} within {seconds:g} s ({self._down}): "
                    "is it running, and are host and port in broker.url or TRINITY_MQ_BROKER_URL right?"
                ) from None
            raise
        self._keeper = asyncio.create_task(self._keep(), name=f"{self._name}: reconnect")

    async def close(self) -> None:
        """Close everything."""
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            await _end(self._keeper)
        for consumer in tuple(self._consumers):
            await consumer.close()
        self._publisher.close()
        self._health.close()
        self._rebuilt.set()
        await self._drop_links()
        self._locks.clear()

    @property
    def usable(self) -> bool:
        """Connected and not blocked."""
        return self._health.usable

    @property
    def trouble(self) -> str | None:
        """Why it is not usable."""
        return self._health.trouble

    @property
    def broker_version(self) -> str | None:
        """What the broker says it is, None when not connected."""
        return self._consuming.version if self._consuming is not None else None

    async def wait_usable(self) -> None:
        """Return once usable."""
        await self._health.wait_usable()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when :attr:`usable` changes."""
        self._health.on_change(callback)

    async def declare(self, *queues: Queue) -> None:
        """Declare queues and bindings."""
        for queue in queues:
            await self._administer(self._admin.declare, queue)

    async def unbind(self, queue: Queue) -> None:
        """Remove the queue's bindings."""
        await self._administer(self._admin.unbind, queue)

    async def delete(self, name: str) -> None:
        """Delete a queue."""
        await self._administer(self._admin.delete, name)

    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages (of a stream, what the broker gives: 0 on 3.10)."""
        return await self._administer(self._admin.depth, name)

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish and wait for the confirm."""
        check_outgoing(self._exchanges, exchange, envelope, self.max_message_bytes)
        seconds = self._config.publish_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                return await self._publisher.publish(exchange, routing_key, envelope)
        except TimeoutError:
            what = f"{envelope.kind} {envelope.message_id}"
            raise BusUnavailable(f"{what} was not confirmed in {seconds:g} s: {self.trouble or 'no reply'}") from None

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming."""
        if queue.redeclare:
            await self.declare(queue)
        elif await self.depth(queue.name) is None:
            raise QueueGone(f"queue {queue.name} does not exist")
        consumer = RabbitConsumer(queue, prefetch, offset, self._broken.set, self._consumers.discard)
        self._consumers.add(consumer)
        try:
            await self._administer(self._attach, consumer)
            if consumer.error is not None:
                raise consumer.error
        except BaseException:
            await consumer.close()
            raise
        return consumer

    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock."""
        queue = lock_queue(self._topology, name)
        if queue in self._locks:
            raise LockHeld(f"{queue} is held by this bus already")
        try:
            await self._administer(self._admin.own, queue)
        except Locked as error:
            raise LockHeld(f"{queue} is held by another connection") from error
        lock = self._locks[queue] = RabbitLock(queue, self._release)
        if not self._rebuilt.is_set():
            lock.suspend()  # lost this very moment: the reconnect routine retakes it
        return lock

    async def _release(self, lock: RabbitLock) -> None:
        self._locks.pop(lock.queue, None)
        if lock.held:
            await self.delete(lock.queue)

    async def _administer(self, work: Callable[[A], Awaitable[T]], argument: A) -> T:
        """Do something on the consuming connection, again if that is lost meanwhile."""

        async def once() -> T:
            await self._rebuilt.wait()
            if self._closed:
                raise BusUnavailable(CLOSED)
            return await work(argument)

        seconds = self._config.connect_timeout
        try:
            async with asyncio.timeout(seconds):
                return await retrying(LinkError)(once)
        except TimeoutError:
            raise BusUnavailable(f"the broker did not answer in {seconds:g} s: {self.trouble or 'no reply'}") from None

    async def _attach(self, consumer: RabbitConsumer) -> None:
        if self._consuming is None:
            raise LinkError("not connected")
        await consumer.attach(self._consuming)

    async def _keep(self) -> None:
        """The reconnect routine: whatever is lost, repair until all stands."""
        while True:
            await self._broken.wait()
            self._broken.clear()
            await retrying(Exception, before_sleep=self._note_failure)(self._repair)

    async def _repair(self) -> None:
        """Open what is closed, and make again what belonged to it: locks, then queues, consumers, publishing last."""
        if self._consuming is None or not self._consuming.alive:
            self._consuming = await self._renew_consuming(self._consuming)
            self._rebuilt.set()
        for consumer in tuple(self._consumers):
            await consumer.attach(self._consuming)
        if self._publishing is None or not self._publishing.alive:
            self._publishing = await self._renew_publishing(self._publishing)
        if not self._publisher.ready:
            await self._admin.make_exchanges()  # a missing one closes the channel
            await self._publisher.open(self._publishing, self._lost_channel)
        if not (self._consuming.alive and self._publishing.alive and self._publisher.ready):
            raise LinkError("lost again while it was being made")
        if self._down not in {None, NOT_CONNECTED}:
            log.info("connected to the broker again", broker=address(self._url), bus=self._name)
        self._down = None
        self._refresh()

    async def _renew_consuming(self, old: Link | None) -> Link:
        if old is not None:
            await old.close()
        link = await Link.open(self._url, f"{self._name} consumes", self._config.heartbeat, self._lost_consuming)
        try:
            self._admin.use(link)
            for lock in tuple(self._locks.values()):
                await lock.retake(self._admin)
            await self._admin.make_exchanges()
            await self._admin.make_queues()
        except BaseException:
            await link.close()
            raise
        return link

    async def _renew_publishing(self, old: Link | None) -> Link:
        if self._watcher is not None:
            await _end(self._watcher)
        if old is not None:
            await old.close()
        link = await Link.open(self._url, f"{self._name} publishes", self._config.heartbeat, self._lost)
        self._watcher = asyncio.create_task(self._publisher.watch(link), name=f"{self._name}: watch for alarms")
        return link

    def _lost_consuming(self, reason: str) -> None:
        self._rebuilt.clear()
        for lock in self._locks.values():
            lock.suspend()
        self._lost(reason)

    def _lost_channel(self) -> None:
        self._lost("the publishing channel was closed")

    def _lost(self, reason: str) -> None:
        if self._closed:
            self._rebuilt.set()
            return
        if self._down is None:
            log.warning("connection to the broker lost", broker=address(self._url), bus=self._name, reason=reason)
        self._down = f"connection to the broker at {address(self._url)} lost: {reason}"
        self._refresh()
        self._broken.set()

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        self._down = f"no connection to the broker at {address(self._url)}: {error}"
        unexpected = not isinstance(error, LinkError | BusError)
        log.warning("broker not reachable", bus=self._name, reason=self._down, exc_info=error if unexpected else None)
        self._refresh()

    def _on_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        self._refresh()

    def _refresh(self) -> None:
        self._health.set(self._down or (BLOCKED if self._blocked else None))

    async def _drop_links(self) -> None:
        if self._watcher is not None:
            await _end(self._watcher)
        for link in (self._publishing, self._consuming):
            if link is not None:
                await link.close()
        self._publishing = self._consuming = None


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task of ours and wait for its end."""
    task.cancel()
    await asyncio.wait([task])
