"""Bus implementation on RabbitMQ, including the routine that rebuilds the bus state after a lost connection.

The declarations on the consuming connection (:class:`Admin`) are repeated after a reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import structlog
from aiormq.channel import Channel
from pamqp import commands
from tenacity import RetryCallState

from trinity_mq.bus.addresses import Addresses, address
from trinity_mq.bus.base import (
    CLOSED,
    NOT_CONNECTED,
    Bus,
    BusError,
    BusRefused,
    BusUnavailable,
    Consumer,
    Lock,
    LockHeld,
    QueueGone,
)
from trinity_mq.bus.properties import MAX_PROPERTY, Envelope
from trinity_mq.bus.rabbit.connection import (
    BrokerConnectError,
    BrokerConnection,
    InequivalentError,
    Locked,
    OwnQueueLost,
    amqp_errors,
    open_connection,
)
from trinity_mq.bus.rabbit.consumer import RabbitConsumer
from trinity_mq.bus.rabbit.publisher import Publisher
from trinity_mq.bus.retry import backoff, retrying
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.config.bus import BrokerConfig

A = TypeVar("A")
T = TypeVar("T")

GHOST_HEARTBEATS = 4
"""Number of heartbeat intervals after which the broker has closed a dead connection and freed its exclusive queues."""
LOOK_SECONDS = 10.0
"""Seconds between two checks that the exclusive queues still exist on the broker."""

log = structlog.get_logger(__name__)


class RabbitBus(Bus):
    """Access of a single agent to RabbitMQ 3.10 or newer.

    One connection publishes. The other consumes, declares and holds the locks, because an alarm stops a publishing
    connection entirely, including its acknowledgements.

    Args:
        url: ``amqp://user:password@host:port/vhost``, several URLs separated by commas, or the sources of the URLs.
            ``config`` sets TLS.
        topology: Names of the run. Its exchanges are declared on every new connection.
        config: Sizes and timeouts.
        name: Connection name that the broker shows.
    """

    def __init__(self, url: str | Addresses, topology: Topology, *, config: BrokerConfig, name: str) -> None:
        super().__init__(topology, config)
        if isinstance(url, str):
            url = Addresses(url, password_file=config.password_file, tls=config.tls)
        self._addresses = url
        self._name = name
        self._shown = "its address"  # read at the first connect
        self._admin = Admin(topology, GHOST_HEARTBEATS * config.heartbeat)
        self._publisher = Publisher(self._set_blocked)
        self._consumers: set[RabbitConsumer] = set()
        self._consuming: BrokerConnection | None = None
        self._publishing: BrokerConnection | None = None
        # set while the consuming connection and its queues are ready, or once the bus is closed
        self._rebuilt = asyncio.Event()
        self._broken = asyncio.Event()
        self._routine: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def broker_version(self) -> str | None:
        """Version that the broker reported at the last connect. None before the first connect and after
        :meth:`close`.
        """
        return self._consuming.version if self._consuming is not None else None

    async def connect(self) -> None:
        if self._closed:
            self._reopen()
        seconds = self._config.connect_timeout
        try:
            async with asyncio.timeout(seconds):
                await retrying(BrokerConnectError, before_sleep=self._note_failure)(self._repair)
        except BaseException as error:
            await self._drop_links()
            if isinstance(error, TimeoutError):
                raise BusUnavailable(
                    f"no RabbitMQ at {self._shown} within {seconds:g} s ({self._down}): "
                    "is it running, and are host and port in broker.url or TRINITY_MQ_BROKER_URL right?"
                ) from None
            raise
        self._routine = asyncio.create_task(self._keep(), name=f"{self._name}: reconnect")

    def _reopen(self) -> None:
        """Reset to the state before the first connect, without locks. Remembered declarations are repeated at the
        connect.
        """
        self._closed, self._down = False, NOT_CONNECTED
        self._locks.clear()
        self._publisher = Publisher(self._set_blocked)
        self._rebuilt.clear()
        self._broken.clear()
        self._refresh()

    async def close(self) -> None:
        """Close all connections. Waiting tasks get BusUnavailable."""
        if self._closed:
            return
        self._closed = True
        if self._routine is not None:
            await _end(self._routine)
        # each close waits for its reply, which confirms that the consumer's last answers arrived
        async with asyncio.TaskGroup() as group:
            for consumer in tuple(self._consumers):
                group.create_task(consumer.close())
        self._publisher.close()
        self._refresh()
        self._rebuilt.set()
        await self._drop_links()
        self._suspend_locks()

    async def declare(self, *queues: Queue) -> None:
        for queue in queues:
            await self._administer(self._admin.declare, queue)

    async def unbind(self, queue: Queue) -> None:
        await self._administer(self._admin.unbind, queue)

    async def delete(self, name: str) -> None:
        await self._administer(self._admin.delete, name)

    async def delete_exchanges(self) -> None:
        for name in self._topology.exchanges:
            await self._administer(self._admin.delete_exchange, name)

    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages. For a stream, return the broker's value, which is 0 on 3.10."""
        return await self._administer(self._admin.depth, name)

    async def _publish(self, exchange: str, routing_key: str, envelope: Envelope) -> bool:
        if not self._rebuilt.is_set():
            # without the consuming connection another agent may hold the locks, so this agent must not act
            await self._rebuilt.wait()
        return await self._publisher.publish(exchange, routing_key, envelope)

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        if queue.redeclare:
            await self.declare(queue)
        elif await self.depth(queue.name) is None:
            raise QueueGone(f"queue {queue.name} does not exist")
        consumer = RabbitConsumer(queue, prefetch, offset, self._broken.set, self._consumers.discard)
        self._consumers.add(consumer)
        try:
            await self._administer(self._attach, consumer)
            if isinstance(consumer.error, QueueGone | BusRefused):
                raise consumer.error
        except BaseException:
            await consumer.close()
            raise
        return consumer

    async def lock(self, name: str) -> Lock:
        queue = self._topology.lock(name)
        if queue in self._locks:
            raise LockHeld(f"{queue} is held by this bus already")
        try:
            await self._administer(self._admin.own, queue)
        except Locked as error:
            raise LockHeld(f"{queue} is held by another connection") from error
        lock = self._locks[queue] = Lock(queue, self._release)
        # if the connection was lost at this moment, the reconnect routine retakes the lock
        lock.held = self._rebuilt.is_set() and not self._closed
        return lock

    async def _release(self, lock: Lock) -> None:
        self._locks.pop(lock.queue, None)
        if lock.held:
            await self.delete(lock.queue)

    async def _administer(self, work: Callable[[A], Awaitable[T]], argument: A) -> T:
        """Run an operation on the consuming connection. Retry it if the connection is lost.

        Raises:
            BusUnavailable: The operation did not finish within the connect timeout, or the bus is closed.
        """

        async def once() -> T:
            await self._rebuilt.wait()
            if self._closed:
                raise BusUnavailable(CLOSED)
            return await work(argument)

        seconds = self._config.connect_timeout
        try:
            async with asyncio.timeout(seconds):
                return await retrying(BrokerConnectError)(once)
        except TimeoutError:
            why = self.trouble or "no reply"
            raise BusUnavailable(f"the broker did not answer in {seconds:g} s: {why}") from None

    # -- the reconnect routine

    async def _keep(self) -> None:
        # the loop must end: ``wait_for`` of Python 3.11, which the client uses to connect, loses a cancellation that
        # arrives just as the attempt ends
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._broken.wait()
            if self._broken.is_set():
                self._broken.clear()
                await retrying(Exception, before_sleep=self._note_failure)(self._repair)
            else:
                await self._look_for_own_queues()

    async def _look_for_own_queues(self) -> None:
        """Attach the consumers of exclusive queues again, and retake the locks, if their queues are gone.

        When a cluster notices that a node is dead, each remaining node deletes the exclusive queues of the dead node by
        name, including queues of the same name that were declared since. It does not tell their consumers (seen on
        4.0.5).
        """
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                for consumer in tuple(self._consumers):
                    is_own = consumer.queue.kind == "exclusive" and consumer.attached and not consumer.over
                    if is_own and await self._admin.is_lost(consumer.queue.name):
                        consumer.detach()
                for lock in tuple(self._locks.values()):
                    if lock.held and await self._admin.is_lost(lock.queue):
                        log.warning("lock_queue_gone", lock=lock.queue, action="take it again")
                        lock.held = False  # another connection may have it now, so this agent must not act
            if not all(lock.held for lock in self._locks.values()):
                await self._retake_locks()
        except (BrokerConnectError, BusRefused, TimeoutError):
            pass  # the connection reports its own loss, and the next look repeats the rest
        except Exception:  # without this routine the bus would never reconnect
            log.exception("own_queues_not_seen", bus=self._name)

    async def _repair(self) -> None:
        """Reopen closed connections and channels, and rebuild their state: locks, then queues, then consumers, then
        publishing.
        """
        if self._closed:
            return
        old_consuming = self._consuming
        if self._consuming is None or not self._consuming.alive:
            self._consuming = await self._renew_consuming(self._consuming)
            self._rebuilt.set()
        for consumer in tuple(self._consumers):
            await self._attach(consumer)
        if self._consuming is not old_consuming:
            await self._retake_locks()  # see _attach
        if self._publishing is None or not self._publishing.alive:
            self._publishing = await self._renew_publishing(self._publishing)
        if not self._publisher.ready:
            await self._admin.make_exchanges()  # publishing to a missing exchange closes the channel
            await self._publisher.open(self._publishing, lambda: self._lost("the publishing channel was closed"))
        if not (self._consuming.alive and self._publishing.alive and self._publisher.ready):
            raise BrokerConnectError("lost again while it was being set up")
        if self._down not in {None, NOT_CONNECTED}:
            log.info("connected to the broker again", broker=self._shown, bus=self._name)
        self._down = None
        self._refresh()

    async def _attach(self, consumer: RabbitConsumer) -> None:
        """Attach a consumer to the consuming connection. Raises BrokerConnectError."""
        link = self._consuming
        if link is None:
            raise BrokerConnectError("not connected")
        try:
            await consumer.attach(link)
        except OwnQueueLost:
            await self._retake_locks()  # the broker may have deleted their queues too: see _look_for_own_queues
            await self._admin.declare(consumer.queue)
            await consumer.attach(link)

    async def _retake_locks(self) -> None:
        """Retake the locks on a new connection. Wait for the broker to free locks of the old connection."""
        for lock in tuple(self._locks.values()):
            try:
                await self._admin.own_again(lock.queue)
            except Locked as error:
                log.error("lock lost to another connection", lock=lock.queue, broker=str(error))
                lock.reconnected(retaken=False)
                self._locks.pop(lock.queue, None)
            else:
                if lock.queue in self._locks:
                    lock.reconnected(retaken=True)
                else:  # its agent has released it during the await
                    await self._admin.delete(lock.queue)

    def _suspend_locks(self) -> None:
        for lock in self._locks.values():
            lock.held = False

    async def _renew_consuming(self, old: BrokerConnection | None) -> BrokerConnection:
        if old is not None:
            await old.close()
        link = await self._open("consumes", self._lost_consuming)
        try:
            self._admin.use(link)
            await self._retake_locks()
            await self._admin.make_exchanges()
            await self._admin.make_queues()
        except BaseException:
            await link.close()
            raise
        return link

    async def _renew_publishing(self, old: BrokerConnection | None) -> BrokerConnection:
        if self._watcher is not None:
            await _end(self._watcher)
        if old is not None:
            await old.close()
        link = await self._open("publishes", self._lost)
        self._watcher = asyncio.create_task(self._publisher.watch(link), name=f"{self._name}: watch for alarms")
        return link

    async def _open(self, use: str, on_lost: Callable[[str], None]) -> BrokerConnection:
        if self._closed:
            raise BrokerConnectError(CLOSED)
        urls = await asyncio.to_thread(self._addresses.read)
        self._shown = address(",".join(urls))
        return await open_connection(urls, self._addresses.tls, f"{self._name} {use}", self._config.heartbeat, on_lost)

    def _lost_consuming(self, reason: str) -> None:
        if not self._closed:
            self._rebuilt.clear()
        self._suspend_locks()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        if self._closed:
            return
        self._note(f"connection to the broker at {self._shown} lost: {reason}", None)
        self._broken.set()

    def _note_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        unexpected = None if isinstance(error, BrokerConnectError | BusError) else error
        self._note(f"no connection to the broker at {self._shown}: {error}", unexpected)

    def _note(self, reason: str, unexpected: BaseException | None) -> None:
        if reason != self._down:
            log.warning(reason, bus=self._name, exc_info=unexpected)
        self._down = reason
        self._refresh()

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        self._refresh()

    async def _drop_links(self) -> None:
        if self._watcher is not None:
            await _end(self._watcher)
        for link in (self._publishing, self._consuming):
            if link is not None:
                await link.close()
        self._publishing = self._consuming = None


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task of this bus and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


class Admin:
    """Operations that may fail, such as declarations, on a channel of their own. A failure closes the channel, which is
    then reopened.

    Args:
        topology: Names of the run. Its exchanges are declared on every new connection.
        ghost_seconds: Maximum seconds until the broker notices that the previous connection died and frees its queues.
    """

    def __init__(self, topology: Topology, ghost_seconds: float) -> None:
        self._topology, self._ghost_seconds = topology, ghost_seconds
        self._declared: dict[str, Queue] = {}
        self._warned: set[str] = set()
        self._link: BrokerConnection | None = None
        self._channel: Channel | None = None
        self._one_at_a_time = asyncio.Lock()  # a failure would fail concurrent operations on the channel

    def use(self, link: BrokerConnection) -> None:
        self._link, self._channel = link, None

    async def make_exchanges(self) -> None:
        """Declare the exchanges of the run. If the user lacks the permission, check that the exchanges exist.

        Raises:
            BusRefused: The exchanges do not exist, and the user may not create them.
        """
        try:
            await self._each_exchange(passive=False)
        except BusRefused as refused:
            try:
                await self._each_exchange(passive=True)
            except BrokerConnectError as error:
                if "no exchange" not in str(error):
                    raise
                raise _not_there(f"run {self._topology.run!r}", refused) from error

    async def _each_exchange(self, *, passive: bool) -> None:
        async with self._opened() as channel:
            for exchange in self._topology.exchanges:
                await channel.exchange_declare(exchange, exchange_type="topic", durable=True, passive=passive)

    async def make_queues(self) -> None:
        for queue in tuple(self._declared.values()):
            await self._make(queue)

    async def declare(self, queue: Queue) -> None:
        """Declare a queue with its bindings, and remember it if a reconnect may declare it again."""
        await self._make(queue)
        if queue.redeclare:
            self._declared[queue.name] = queue

    async def unbind(self, queue: Queue) -> None:
        """Remove the bindings of a queue, and do not restore them on reconnect."""
        if queue.name in self._declared:
            self._declared[queue.name] = replace(queue, bindings=())
        with contextlib.suppress(QueueGone):
            async with self._opened() as channel:
                for binding in queue.bindings:
                    await channel.queue_unbind(queue.name, binding.exchange, binding.pattern)

    async def delete(self, name: str) -> None:
        """Delete a queue, and do not restore it on reconnect."""
        self._declared.pop(name, None)
        if not _is_queue_name(name):
            return
        with contextlib.suppress(QueueGone):
            async with self._opened() as channel:
                await channel.queue_delete(name)

    async def delete_exchange(self, name: str) -> None:
        async with self._opened() as channel:
            await channel.exchange_delete(name)

    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages. Return None if the queue does not exist or its name is not a valid queue
        name.
        """
        if not _is_queue_name(name):
            return None
        with contextlib.suppress(QueueGone):
            async with self._opened() as channel:
                return (await channel.queue_declare(name, passive=True)).message_count or 0
        return None

    async def is_lost(self, name: str) -> bool:
        """Return whether an exclusive queue of this connection is gone, or belongs to another connection now."""
        try:
            return await self.depth(name) is None
        except Locked:
            return True

    async def own(self, name: str) -> None:
        """Declare an exclusive queue. Raises Locked if another connection holds it."""
        async with self._opened() as channel:
            await channel.queue_declare(name, exclusive=True)

    async def own_again(self, name: str) -> None:
        """Declare an exclusive queue that the previous connection may still hold on the broker. Raises Locked if
        another connection holds it after ``ghost_seconds``.
        """
        try:
            async with asyncio.timeout(self._ghost_seconds):
                await retrying(Locked, wait=backoff(maximum=1.0))(self.own, name)
        except TimeoutError as error:
            raise Locked(f"queue {name} is exclusive to another connection") from error

    async def _make(self, queue: Queue) -> None:
        if queue.kind == "exclusive":
            await self.own_again(queue.name)
        elif not await self._make_durable(queue):
            return
        async with self._opened() as channel:
            for binding in queue.bindings:
                await channel.queue_bind(queue.name, binding.exchange, binding.pattern)

    async def _make_durable(self, queue: Queue) -> bool:
        """Declare a durable queue. Return False if only another user may declare it: then that user also makes its
        bindings.
        """
        try:
            async with self._opened() as channel:
                await channel.queue_declare(queue.name, durable=True, arguments=dict(queue.arguments))
        except InequivalentError as error:
            if queue.name not in self._warned:
                self._warned.add(queue.name)
                log.warning("queue exists with other arguments: used as it is", queue=queue.name, broker=str(error))
        except BusRefused as refused:
            if isinstance(refused, Locked):
                raise
            if await self.depth(queue.name) is None:
                raise _not_there(f"queue {queue.name}", refused) from refused
            return False
        return True

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Channel]:
        async with self._one_at_a_time:
            if self._link is None:
                raise BrokerConnectError("not connected")
            if self._channel is None or self._channel.is_closed:
                self._channel = await self._link.channel()
            with amqp_errors():
                yield self._channel


def _not_there(what: str, refused: BusRefused) -> BusRefused:
    return BusRefused(f"{what} is not on the broker (start the agents that make it first), and {refused}")


def _is_queue_name(name: str) -> bool:
    """Return whether the name is a valid queue name. Parts of the name may come from a message."""
    try:
        commands.Queue.Delete(queue=name)
    except ValueError:
        return False
    return len(name.encode()) <= MAX_PROPERTY
