"""What a live broker tells over AMQP alone, asked without leaving anything behind on it."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trinity_mq.bus.base import BusRefused, QueueGone
from trinity_mq.bus.rabbit.connection import BrokerConnectError, BrokerConnection, Locked, amqp_errors, open_connection
from trinity_mq.bus.topology import Topology

if TYPE_CHECKING:
    from aiormq.channel import Channel

    from trinity_mq.config.bus import TlsConfig

T = TypeVar("T")

HEARTBEAT = 10.0
ANSWER = 10.0
"""Seconds within which a broker that is not blocked answers."""


@dataclass(slots=True, kw_only=True)
class Depth:
    """A queue of a run."""

    messages: int
    consumers: int


@dataclass(slots=True, kw_only=True)
class Examined:
    """What came out."""

    properties: Mapping[str, Any]
    """What the broker says of itself."""
    blocked: bool | None = None
    """It holds back what is published; None: that could not be tried."""
    queues: dict[str, Depth] = field(default_factory=dict)
    """Those of the run's durable queues that exist."""
    tried: list[str] = field(default_factory=list)
    """Permissions that were tried: configure, read, write."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those of them that were refused, and the broker's words."""


async def examine(urls: tuple[str, ...], tls: TlsConfig | None, topology: Topology | None) -> Examined:
    """Ask the broker, and about ``topology`` where one is given.

    An exclusive queue of the run's name shows what the user may do; it goes with the connection.

    Raises:
        BusRefused: The broker does not let us in.
        LinkError: It cannot be reached, or was lost.
        TimeoutError: It does not answer.
    """
    link = await open_connection(urls, tls, "doctor", HEARTBEAT, lambda _reason: None)
    try:
        found = Examined(properties=dict(link.server_properties))
        if topology is not None:
            await _look(_Asker(link), topology, found)
    finally:
        await link.close()
    return found


class _Asker:
    """One question at a time; a refusal costs the channel, and the next question has a new one."""

    def __init__(self, link: BrokerConnection) -> None:
        self._link = link
        self._channel: Channel | None = None

    async def ask(self, work: Callable[[Channel], Awaitable[T]]) -> T:
        async with asyncio.timeout(ANSWER):
            if self._channel is None or self._channel.is_closed:
                self._channel = await self._link.channel(confirms=True)
            with amqp_errors():
                return await work(self._channel)

    async def is_blocked(self) -> bool:
        """Say so now. Only after something was published does the broker tell."""
        try:
            async with asyncio.timeout(0):
                await self._link.unblocked()
        except TimeoutError:
            return True
        return False


async def _look(asker: _Asker, topology: Topology, found: Examined) -> None:
    for queue in topology.durable:
        try:
            seen = await asker.ask(functools.partial(_passive, queue.name))
        except QueueGone:
            continue
        except (BrokerConnectError, Locked, BusRefused) as error:
            found.refused.setdefault("look", str(error))
            continue
        found.queues[queue.name] = Depth(messages=seen.message_count or 0, consumers=seen.consumer_count or 0)
    await _try(asker, topology, found)


async def _passive(name: str, channel: Channel) -> Any:
    return await channel.queue_declare(name, passive=True)


async def _try(asker: _Asker, topology: Topology, found: Examined) -> None:
    """Try each permission on an exclusive queue and the exchange of telemetry, under a key that nobody listens to."""
    key = f"doctor.{secrets.token_hex(6)}"
    name = topology.listener("doctor", key.rpartition(".")[2], "telemetry").name
    exchange = topology.exchange("telemetry")
    if not await _permitted(asker, found, "configure", lambda channel: channel.queue_declare(name, exclusive=True)):
        return
    try:
        await asker.ask(lambda channel: channel.exchange_declare(exchange, passive=True))
    except (BrokerConnectError, BusRefused):
        await _permitted(asker, found, "read", lambda channel: channel.basic_get(name))
        return  # the run has not begun: there is no exchange of its own to publish to
    await _permitted(asker, found, "write", lambda channel: channel.queue_bind(name, exchange, key))
    await _permitted(asker, found, "read", lambda channel: channel.basic_get(name))
    try:
        await _permitted(
            asker, found, "write", lambda channel: channel.basic_publish(b"", exchange=exchange, routing_key=key)
        )
        found.blocked = await asker.is_blocked()
    except TimeoutError:
        found.blocked = True


async def _permitted(asker: _Asker, found: Examined, what: str, work: Callable[[Channel], Awaitable[Any]]) -> bool:
    if what not in found.tried:
        found.tried.append(what)
    try:
        await asker.ask(work)
    except BusRefused as error:
        found.refused[what] = str(error)
        return False
    return True
