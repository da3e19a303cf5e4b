"""Consuming from RabbitMQ: each consumer has its own channel and is attached again when the channel is lost."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from aiormq.abc import DeliveredMessage
from aiormq.channel import Channel
from aiormq.exceptions import ChannelPreconditionFailed

from trinity_mq.bus.base import Answer, BusRefused, Delivery, QueueGone, StaleDelivery, StreamCut
from trinity_mq.bus.buffered_consumer import BufferedConsumer
from trinity_mq.bus.properties import clamped
from trinity_mq.bus.rabbit.connection import (
    CLOSE_TIMEOUT,
    BrokerConnectError,
    BrokerConnection,
    Locked,
    OwnQueueLost,
    amqp_errors,
)
from trinity_mq.bus.routing import routing_problem
from trinity_mq.bus.topology import Queue

log = structlog.get_logger(__name__)

HELD_TOO_LONG = (
    "the broker redelivers messages that are held for longer than its consumer_timeout, and their work is repeated; "
    "`trinity-mq doctor` shows the line that its configuration needs. A queue keeps the timeout of its declaration"
)
SEGMENT_ENTRIES = 1
"""Number of offsets that the broker's own entry at the start of a stream segment takes. The entry is never
delivered.
"""
CLOCK_MARGIN = datetime.timedelta(seconds=5)
STREAM_IDLE = 10.0
"""Seconds without a delivery after which a stream is consumed again from its next offset. A cluster that lost the
leader of the stream may never serve a reader that arrived during the restart of its replicas (seen on 3.10.8).
"""


class _Arrived(NamedTuple):
    channel: Channel
    message: DeliveredMessage
    offset: int | None
    settled: bool = False
    """True if the broker expects no answer."""
    next_offset: int = 0
    """Offset from which a stream is read after this message: refused messages that follow it are passed over."""


class RabbitConsumer(BufferedConsumer[_Arrived]):
    """Consumer of a queue, attached again after each reconnect.

    Args:
        queue: Queue to consume from; ``prefetch`` and ``offset`` as in :class:`BufferedConsumer`.
        on_lost: Called when the consumer needs :meth:`attach` again.
        on_close: Called when the consumer is closed.
    """

    def __init__(
        self,
        queue: Queue,
        prefetch: int,
        offset: int | None,
        on_lost: Callable[[], None],
        on_close: Callable[[RabbitConsumer], None],
    ) -> None:
        super().__init__(queue, prefetch, offset)
        self._on_lost, self._on_close = on_lost, on_close
        # an exclusive queue ends with its connection, so acknowledgements would only cost a frame per message
        self._unanswered = queue.kind == "exclusive" and not prefetch
        self._requested: int | None = None
        self._began: datetime.datetime | None = None
        self._channel: Channel | None = None
        self._tag = ""
        self._cancelled: list[Channel] = []
        self._attaching = asyncio.Lock()
        self._to_ack = 0
        self._acking: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> bool:
        """True if the consumer is consuming or has ended."""
        return self.over or (self._channel is not None and not self._channel.is_closed)

    async def attach(self, link: BrokerConnection) -> None:
        """Start or resume consuming. The consumer ends if the queue does not exist and is not declared again, or if it
        is exclusive to another connection.

        Raises:
            BrokerConnectError: A retry may succeed.
            OwnQueueLost: The queue must be declared again before the next attach.
        """
        async with self._attaching:
            await self._close_cancelled()
            if self.attached:
                return
            channel = await link.channel()
            try:
                await self._consume(channel)
            except QueueGone:
                if self.queue.comes_back:
                    self._channel = None
                    log.warning("queue_declared_again", queue=self.queue.name, reason="it was deleted")
                    raise OwnQueueLost(f"queue {self.queue.name} is gone") from None
                self._end(QueueGone(f"queue {self.queue.name} does not exist"))
            except Locked:
                self._end(BusRefused(f"queue {self.queue.name} is exclusive to another connection"))
            except BaseException:
                self._channel = None
                await _close(channel)
                raise

    async def _consume(self, channel: Channel) -> None:
        arguments: dict[str, Any] = {}
        if self._stream:
            arguments["x-stream-offset"] = self._stream_offset()
            self._requested = self._next
        channel.on_consumer_cancel_callbacks.add(lambda cancel: self._cancel(channel))
        channel.closing.add_done_callback(lambda closing: self._channel_closed(channel, closing))
        self._forget_arrived()
        self._to_ack = 0
        self._channel = channel

        async def receive(message: DeliveredMessage) -> None:
            problem = _problem(self.queue, message)
            self._receive(channel, message, passed_over=problem is not None)
            if problem is not None:
                await self._refuse(channel, message, problem)

        with amqp_errors():
            if not self._unanswered:
                await channel.basic_qos(prefetch_count=self._prefetch)
            reply = await channel.basic_consume(self.queue.name, receive, no_ack=self._unanswered, arguments=arguments)
        self._tag = reply.consumer_tag or ""
        if self._stream:
            self._watch(channel, self._next)

    def _watch(self, channel: Channel, position: int | None) -> None:
        """Restart consuming after ``STREAM_IDLE`` seconds without progress from ``position``; None: no offset is known
        yet, so wait for the first.
        """
        loop = asyncio.get_running_loop()

        def look() -> None:
            if channel is not self._channel or self.over:
                return
            if position is not None and position == self._next and not self._arrived:
                self._cancel(channel)
            else:
                self._watch(channel, self._next)

        self._idle = loop.call_later(STREAM_IDLE, look)

    def _stream_offset(self) -> int | str | datetime.datetime:
        if self._next is not None:
            return self._next
        if self._began is None:
            self._began = datetime.datetime.now(datetime.UTC)
            return "next"
        # Lost before the first delivery: messages published since then must not be missed, so start slightly earlier.
        return self._began - CLOCK_MARGIN

    def _receive(self, channel: Channel, message: DeliveredMessage, *, passed_over: bool) -> None:
        if channel is not self._channel or self.over:
            return
        offset = (message.header.properties.headers or {}).get("x-stream-offset") if self._stream else None
        if type(offset) is not int:
            if not passed_over:
                self._put(_Arrived(channel, message, None, self._unanswered))
            return
        if self._next is None:
            self._next = offset
        requested, self._requested = self._requested, None
        if requested is not None and offset > requested + SEGMENT_ENTRIES:
            self._end(StreamCut(self.queue.name, requested, offset))
        elif not passed_over:
            self._put(_Arrived(channel, message, offset, next_offset=offset + 1))
        elif self._arrived:  # messages before it are not handed over yet, and are read again after a reconnect
            self._arrived[-1] = self._arrived[-1]._replace(next_offset=offset + 1)
        else:
            self._next = offset + 1

    async def _refuse(self, channel: Channel, message: DeliveredMessage, problem: str) -> None:
        """Skip a message that its sender routed here from elsewhere. The broker moves it from a work queue to
        ``dead``.
        """
        log.warning("not_for_this_queue", queue=self.queue.name, reason=problem)
        tag = message.delivery_tag or 0
        # if the channel is lost, the message is redelivered
        with contextlib.suppress(BrokerConnectError), amqp_errors():
            if self._stream:
                await channel.basic_ack(tag, wait=False)
            elif not self._unanswered:
                await channel.basic_reject(tag, requeue=False, wait=False)

    def _channel_closed(self, channel: Channel, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        if isinstance(error, ChannelPreconditionFailed) and "acknowledgement" in str(error):
            log.error("message_held_too_long", queue=self.queue.name, broker=str(error), do=HELD_TOO_LONG)
        self._lost(channel)

    def _cancel(self, channel: Channel) -> None:
        """Attach again after a cancel. The broker cancels because the queue was deleted or moved; the next attach shows
        which. :meth:`_watch` cancels an idle stream.
        """
        self._cancelled.append(channel)
        self._lost(channel)

    def detach(self) -> None:
        """Attach again, because the queue is gone."""
        if self._channel is not None:
            self._cancel(self._channel)

    def _lost(self, channel: Channel) -> None:
        if channel is not self._channel:
            return
        self._channel = None
        self._forget_arrived()
        if self.over:
            self._changed.set()
        else:
            self._on_lost()

    def _forget_arrived(self) -> None:
        """Forget buffered messages that the broker will redeliver."""
        if not self._unanswered:
            self._arrived.clear()

    def _hand_over(self, item: _Arrived) -> Delivery:
        if item.offset is not None:
            self._next = item.next_offset
            self._to_ack = item.message.delivery_tag or 0
            if self._channel is not None and (self._acking is None or self._acking.done()):
                self._acking = asyncio.get_running_loop().create_task(self._acknowledge(self._channel))
        return RabbitDelivery(self.queue.name, item)

    async def _acknowledge(self, channel: Channel) -> None:
        """Acknowledge all stream deliveries so far in a single frame. On a stream, acknowledgements only grant
        credit.
        """
        with contextlib.suppress(BrokerConnectError), amqp_errors():
            while channel is self._channel and self._to_ack:
                tag, self._to_ack = self._to_ack, 0
                await channel.basic_ack(tag, multiple=True, wait=False)

    async def stop(self) -> None:
        async with self._attaching:
            channel = self._channel
            if channel is not None and not self.over:
                with contextlib.suppress(BrokerConnectError), amqp_errors():
                    await channel.basic_cancel(self._tag)
            self._finish()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if self._idle is not None:
            self._idle.cancel()
        self._end(None)
        self._on_close(self)
        if self._acking is not None:
            await self._acking
        if channel is not None:
            await _close(channel)
        await self._close_cancelled()

    async def _close_cancelled(self) -> None:
        while self._cancelled:
            await _close(self._cancelled.pop())


class RabbitDelivery(Delivery):
    """A delivered message. Its answer is sent on the channel that delivered it."""

    def __init__(self, queue: str, arrived: _Arrived) -> None:
        message = arrived.message
        properties = message.header.properties
        headers = properties.headers or {}
        super().__init__(
            body=message.body,
            exchange=message.exchange or "",
            routing_key=message.routing_key or "",
            queue=queue,
            message_id=properties.message_id,
            content_type=properties.content_type,
            headers=headers,
            correlation_id=properties.correlation_id,
            reply_to=properties.reply_to,
            deliveries_before=clamped(headers.get("x-delivery-count")),
            offset=arrived.offset,
            unreadable=getattr(message.header, "unreadable", None),
        )
        self._channel, self._tag, self._settled = arrived.channel, message.delivery_tag or 0, arrived.settled

    async def _settle(self, answer: Answer) -> None:
        if self._settled:
            return
        try:
            with amqp_errors():
                if answer == "ack":  # not multiple: another answer of the channel may still be unwritten
                    await self._channel.basic_ack(self._tag, wait=False)
                elif answer == "reject":
                    await self._channel.basic_reject(self._tag, requeue=False, wait=False)
                else:
                    await self._channel.basic_nack(self._tag, requeue=True, wait=False)
        except BrokerConnectError as error:
            raise StaleDelivery(f"delivery {self.message_id} of {self.queue} is void: {error}") from error


def _problem(queue: Queue, message: DeliveredMessage) -> str | None:
    """Return the reason why a message does not belong in its queue. Return None if it belongs there."""
    properties = message.header.properties
    headers, content_type = properties.headers or {}, properties.content_type
    exchange, key = message.exchange or "", message.routing_key or ""
    return routing_problem(queue, exchange, key, headers, message.body, content_type)


async def _close(channel: Channel) -> None:
    with contextlib.suppress(BrokerConnectError), amqp_errors():
        await channel.close(timeout=CLOSE_TIMEOUT)
