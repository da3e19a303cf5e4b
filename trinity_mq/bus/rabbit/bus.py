"""Bus implementation on RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity_mq.bus.addresses import Addresses
from trinity_mq.bus.base import Bus, BusRefused, BusUnavailable, Consumer, Envelope, Lock, LockHeld, QueueGone
from trinity_mq.bus.checks import check_outgoing, lock_queue
from trinity_mq.bus.rabbit.admin import RabbitLock
from trinity_mq.bus.rabbit.connection import Locked
from trinity_mq.bus.rabbit.consumer import RabbitConsumer
from trinity_mq.bus.rabbit.reconnect import Reconnector
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig


class RabbitBus(Bus):
    """One agent's access to RabbitMQ 3.10 or newer.

    One connection publishes; the other consumes, declares and holds the locks, since an alarm stops a publishing
    connection altogether, its acknowledgements included.

    Args:
        url: ``amqp://user:password@host:port/vhost``, several with commas between, or where to find them; TLS as
            ``config`` says.
        topology: Names of the run; its exchanges are declared on connect.
        config: Sizes and timeouts.
        name: Shown by the broker for the connections.
    """

    def __init__(self, url: str | Addresses, topology: Topology, *, config: BrokerConfig, name: str) -> None:
        self.max_message_bytes = config.max_message_bytes
        self._topology, self._config = topology, config
        self._exchanges = frozenset(topology.exchanges)
        addresses = Addresses(url, password_file=config.password_file, tls=config.tls) if isinstance(url, str) else url
        self._keeper = Reconnector(addresses, topology, config, name)

    async def connect(self) -> None:
        """Open the connections."""
        await self._keeper.start()

    async def close(self) -> None:
        """Close everything."""
        await self._keeper.stop()

    @property
    def usable(self) -> bool:
        """Connected and not blocked."""
        return self._keeper.health.usable

    @property
    def trouble(self) -> str | None:
        """Why it is not usable."""
        return self._keeper.health.trouble

    @property
    def broker_version(self) -> str | None:
        """Version that the broker reports, None when not connected."""
        return self._keeper.version

    async def wait_usable(self) -> None:
        """Return once usable. Raises BusUnavailable once closed."""
        await self._keeper.health.wait_usable()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when :attr:`usable` changes."""
        self._keeper.health.on_change(callback)

    async def declare(self, *queues: Queue) -> None:
        """Declare queues and bindings."""
        for queue in queues:
            await self._keeper.administer(self._keeper.admin.declare, queue)

    async def unbind(self, queue: Queue) -> None:
        """Remove the queue's bindings."""
        await self._keeper.administer(self._keeper.admin.unbind, queue)

    async def delete(self, name: str) -> None:
        """Delete a queue."""
        await self._keeper.administer(self._keeper.admin.delete, name)

    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages (of a stream, what the broker gives: 0 on 3.10)."""
        return await self._keeper.administer(self._keeper.admin.depth, name)

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish and wait for the confirm."""
        check_outgoing(self._exchanges, exchange, envelope, self.max_message_bytes)
        seconds = self._config.publish_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                await self._keeper.stands()
                return await self._keeper.publisher.publish(exchange, routing_key, envelope)
        except TimeoutError:
            what = f"{envelope.kind} {envelope.message_id}"
            raise BusUnavailable(f"{what} was not confirmed in {seconds:g} s: {self.trouble or 'no reply'}") from None

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming."""
        if queue.redeclare:
            await self.declare(queue)
        elif await self.depth(queue.name) is None:
            raise QueueGone(f"queue {queue.name} does not exist")
        keeper = self._keeper
        consumer = RabbitConsumer(queue, prefetch, offset, keeper.repair_soon, keeper.consumers.discard)
        keeper.consumers.add(consumer)
        try:
            await keeper.administer(keeper.attach, consumer)
            if isinstance(consumer.error, QueueGone | BusRefused):
                raise consumer.error
        except BaseException:
            await consumer.close()
            raise
        return consumer

    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock, named as for :meth:`Topology.lock` or by its full queue name."""
        queue, keeper = lock_queue(self._topology, name), self._keeper
        if queue in keeper.locks:
            raise LockHeld(f"{queue} is held by this bus already")
        try:
            await keeper.administer(keeper.admin.own, queue)
        except Locked as error:
            raise LockHeld(f"{queue} is held by another connection") from error
        lock = keeper.locks[queue] = RabbitLock(queue, self._release)
        if not keeper.consuming:
            lock.suspend()  # lost this very moment: the reconnect routine retakes it
        return lock

    async def _release(self, lock: RabbitLock) -> None:
        self._keeper.locks.pop(lock.queue, None)
        if lock.held:
            await self.delete(lock.queue)
