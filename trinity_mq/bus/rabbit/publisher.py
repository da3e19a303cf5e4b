"""Publishing with confirms: pipelined on a single channel, repeated under the same message id until confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiormq import spec
from aiormq.channel import Channel
from aiormq.exceptions import ChannelAccessRefused, DeliveryError, PublishError

from trinity_mq.bus.base import CLOSED, BusUnavailable
from trinity_mq.bus.properties import Envelope
from trinity_mq.bus.rabbit.connection import BrokerConnectError, BrokerConnection, amqp_errors
from trinity_mq.bus.rabbit.content_headers import Properties
from trinity_mq.bus.retry import retrying

PERSISTENT = 2
DEFAULT_EXCHANGE = "amq.default"
"""Name of the default exchange in permission errors."""
DRAIN_ABOVE = 64 * 1024
"""Body size in bytes above which a publish holds the channel until the socket has accepted it. Smaller bodies are
pipelined.
"""
OVERDUE = 0.25
"""Seconds without a confirm after which the publisher checks whether the broker blocks it."""
PATIENCE = 20.0
"""Seconds without a confirm, while not blocked, after which a message is published again. Later attempts wait longer,
up to six times as long. A cluster that loses the leader of a queue may never confirm messages that were on their way to
it (seen on 3.10.8), even if the channel stays open.
"""


class Publisher:
    """Publisher on the only channel of the publishing connection.

    Args:
        on_blocked: Called with True when the broker starts to block publishers, and with False when it stops.
    """

    def __init__(self, on_blocked: Callable[[bool], None]) -> None:
        self._on_blocked = on_blocked
        self._channel: Channel | None = None
        self._clear = asyncio.Event()  # set while a channel is open and no alarm is raised, or once the bus is closed
        self._closed = False
        self._under_way: dict[asyncio.Timeout, float] = {}
        """Deadline of each publish that waits for its confirm, in loop time (seconds)."""
        self._overdue = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._same_id: dict[str, asyncio.Future[None]] = {}

    @property
    def ready(self) -> bool:
        return self._channel is not None and not self._channel.is_closed

    async def open(self, link: BrokerConnection, on_lost: Callable[[], None]) -> None:
        """Publish on this connection from now on. ``on_lost`` is called when the channel closes."""
        channel = await link.channel(confirms=True)
        channel.closing.add_done_callback(lambda closing: on_lost())
        self._channel = channel
        self._clear.set()

    def close(self) -> None:
        """Raise BusUnavailable in all waiting publishers."""
        self._closed, self._channel = True, None
        self._clear.set()
        if self._timer is not None:
            self._timer.cancel()

    async def watch(self, link: BrokerConnection) -> None:
        """Report when the broker starts and stops blocking this connection, until cancelled."""
        while True:
            await self._overdue.wait()
            self._overdue.clear()
            try:
                async with asyncio.timeout(OVERDUE):
                    await link.unblocked()
            except TimeoutError:
                self._set_blocked(True)
                try:
                    await link.unblocked()
                finally:
                    self._set_blocked(False)

    async def publish(self, exchange: str, routing_key: str, envelope: Envelope) -> bool:
        """Publish until confirmed. Return whether a queue took the message."""
        while envelope.message_id in self._same_id:
            # the client identifies a returned message by its id, so two messages with the same id would be confused
            await asyncio.wait([self._same_id[envelope.message_id]])
        done = self._same_id[envelope.message_id] = asyncio.get_running_loop().create_future()
        try:
            try:
                return await self._once(exchange, routing_key, envelope, PATIENCE)
            except BrokerConnectError:
                patience = iter([2 * PATIENCE, 4 * PATIENCE])

                async def again() -> bool:
                    return await self._once(exchange, routing_key, envelope, next(patience, 6 * PATIENCE))

                return await retrying(BrokerConnectError)(again)
        finally:
            del self._same_id[envelope.message_id]
            done.set_result(None)

    async def _once(self, exchange: str, routing_key: str, envelope: Envelope, patience: float) -> bool:
        channel = await self._usable_channel()
        confirmed = asyncio.timeout(None)
        self._begin(confirmed, patience)
        try:
            async with confirmed:
                with amqp_errors():
                    try:
                        await channel.basic_publish(
                            envelope.body,
                            exchange=exchange,
                            routing_key=routing_key,
                            properties=_properties(envelope),
                            mandatory=True,
                            wait=len(envelope.body) > DRAIN_ABOVE,
                        )
                    except PublishError:
                        return False
                    except DeliveryError as error:
                        raise BrokerConnectError(f"the broker did not store it: {error}") from error
                    except ChannelAccessRefused as error:
                        if _is_of(str(error), exchange, routing_key):
                            raise
                        raise BrokerConnectError(
                            f"the channel was closed because another message was refused: {error}"
                        ) from error
            return True
        except TimeoutError as error:
            raise BrokerConnectError(f"not confirmed in {patience:g} s") from error
        finally:
            del self._under_way[confirmed]

    async def _usable_channel(self) -> Channel:
        while True:
            if self._closed:
                raise BusUnavailable(CLOSED)
            channel = self._channel
            if channel is None or channel.is_closed:
                self._clear.clear()
            elif self._clear.is_set():
                return channel
            await self._clear.wait()

    def _begin(self, confirmed: asyncio.Timeout, patience: float) -> None:
        loop = asyncio.get_running_loop()
        self._under_way[confirmed] = loop.time() + patience
        if self._timer is None:
            self._timer = loop.call_later(OVERDUE, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._under_way:
            return
        loop = asyncio.get_running_loop()
        self._overdue.set()
        self._timer = loop.call_later(OVERDUE, self._check)
        for confirmed, until in self._under_way.items():
            if not self._clear.is_set():
                # while blocked the broker reads nothing, so the time does not count
                self._under_way[confirmed] = until + OVERDUE
            elif until <= loop.time() and not confirmed.expired():
                confirmed.reschedule(loop.time())

    def _set_blocked(self, blocked: bool) -> None:
        if blocked:
            self._clear.clear()
        elif self.ready:
            self._clear.set()
        self._on_blocked(blocked)


def _is_of(refusal: str, exchange: str, routing_key: str) -> bool:
    """Return whether a refusal concerns this publish. A refusal fails every unconfirmed publish on the channel."""
    topic = f" topic '{routing_key}' " in refusal or " topic '" not in refusal
    return topic and f"exchange '{exchange or DEFAULT_EXCHANGE}'" in refusal


def _properties(envelope: Envelope) -> spec.Basic.Properties:
    return Properties(
        content_type=envelope.content_type,
        headers={**envelope.headers, "kind": envelope.kind},
        delivery_mode=PERSISTENT,
        correlation_id=envelope.correlation_id,
        reply_to=envelope.reply_to,
        message_id=envelope.message_id,
    )
