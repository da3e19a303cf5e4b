"""Declarations on the consuming connection, which are repeated after a reconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog
from aiormq.channel import Channel
from pamqp import commands

from trinity_mq.bus.base import BusRefused, QueueGone
from trinity_mq.bus.properties import MAX_PROPERTY
from trinity_mq.bus.rabbit.connection import (
    BrokerConnectError,
    BrokerConnection,
    InequivalentError,
    Locked,
    amqp_errors,
)
from trinity_mq.bus.retry import backoff, retrying
from trinity_mq.bus.topology import Queue, Topology

log = structlog.get_logger(__name__)


class Admin:
    """Channel for operations that may fail. A failure closes the channel, which is then reopened.

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
