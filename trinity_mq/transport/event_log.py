"""Event logs: state that is derived from the events on a stream, in the order of the stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trinity_mq.bus import Bus, BusUnavailable, Delivery, Envelope, Queue, StreamCut
from trinity_mq.messages import DecodeError, Message, decode, decode_any
from trinity_mq.runtime.deliveries import check_readable, message_in_hand, new_mark
from trinity_mq.runtime.errors import is_content_error
from trinity_mq.runtime.notify import Notifier

Kinds = Mapping[str, Mapping[str, type[Message]]]
"""Allowed message classes by routing key and kind. Permissions on the broker restrict the routing keys of a user."""
Taken = Literal["new", "repeated", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class EventEffect:
    """Effect of an event on the state."""

    taken: Taken
    reason: str = ""
    """Reason why the event was refused, or why it waits for another event."""


class EventLog(ABC):
    """Reads all events of a stream, and tells a sender the effect of its event.

    Args:
        bus: A connected bus.
        stream: The stream. It is declared, unless ``redeclare`` is False.
        kinds: Allowed message classes.
        mark_key: Routing key of the mark by which a reader recognises the end of the events that were on the stream
            when it began.
    """

    def __init__(self, bus: Bus, stream: Queue, kinds: Kinds, mark_key: str) -> None:
        self.changed = Notifier()
        """Notified after each message that was read."""
        self.position = 0
        """Total bytes of all messages read so far."""
        self.next_offset = 0
        """Offset of the first message that was not read."""
        self._bus, self._stream, self._kinds, self._mark_key = bus, stream, kinds, mark_key
        self._ready = False
        self._waiting: dict[str, list[asyncio.Future[EventEffect]]] = {}
        """Futures of senders that wait for the effect of an event, by message id."""

    @abstractmethod
    def _apply(self, message: Message, delivery: Delivery) -> EventEffect | None:
        """Apply an event to the state. Return its effect for its sender, or None if the sender of such an event does
        not wait for an effect.
        """

    @abstractmethod
    def _set_aside(self, delivery: Delivery, error: Exception) -> None:
        """Handle a message that cannot be decoded, or whose content makes :meth:`_apply` raise; ``error`` is the
        exception.
        """

    @abstractmethod
    def _begin_after(self, cut: StreamCut) -> None:
        """Handle the removal of unread events by retention. The stream is then read from its first stored event."""

    def _finish_reading(self) -> None:
        """Make the log ready. Called once all initial events have been read. A subclass may override this method to
        complete its state first.
        """
        self._ready = True

    def is_ready(self) -> bool:
        """Return whether all events that were on the stream when reading began have been read. Reading begins again
        after a :class:`StreamCut`.
        """
        return self._ready

    async def follow(self) -> None:
        """Read the stream from its beginning until cancelled.

        Raises:
            QueueGone: The stream was deleted, or does not exist and is not declared here.
        """
        while True:
            if self._stream.redeclare:
                await self._bus.declare(self._stream)
            mark = new_mark()
            await self._bus.publish_declared(self._stream, self._mark_key, mark)
            try:
                async with await self._bus.consume(self._stream, offset=self.next_offset) as feed:
                    async for delivery in feed:
                        self._read(delivery, mark.message_id)
                    return
            except StreamCut as cut:
                self.next_offset, self._ready = cut.got, False
                self._begin_after(cut)
                self.changed.notify()

    def _read(self, delivery: Delivery, mark: str) -> None:
        self.next_offset = (delivery.offset or 0) + 1
        self.position += len(delivery.body)
        if not self._bus.is_foreign(delivery):
            self._take(delivery)
        if delivery.message_id == mark and not self._ready:
            self._finish_reading()
        self.changed.notify()

    def _take(self, delivery: Delivery) -> None:
        try:
            with message_in_hand(self._bus, delivery):
                effect = self._apply(_decode_event(delivery, self._kinds), delivery)
        except Exception as error:
            if not is_content_error(error):
                raise
            self._set_aside(delivery, error)
            return
        for waiting in self._waiting.get(delivery.message_id or "", ()):
            if effect is not None and not waiting.done():
                waiting.set_result(effect)

    async def _publish_and_read_back(self, key: str, message: Envelope, seconds: float) -> EventEffect:
        """Publish an event and return its effect after it was read back from the stream. Call it only while
        :meth:`follow` runs.

        Raises:
            BusUnavailable: The event was not read back within ``seconds``.
            MessageTooLarge: The event is too large.
            QueueGone: The stream was deleted and is not declared here.
        """
        effect: asyncio.Future[EventEffect] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(message.message_id, [])
        waiting.append(effect)
        try:
            async with asyncio.timeout(seconds):
                await self._bus.publish_declared(self._stream, key, message)
                return await effect
        except TimeoutError:
            trouble = self._bus.trouble or "no answer"
            raise BusUnavailable(f"the broker has not stored the event within {seconds:g} s: {trouble}") from None
        finally:
            waiting.remove(effect)
            if not waiting:
                del self._waiting[message.message_id]


def _decode_event(delivery: Delivery, kinds: Kinds) -> Message:
    """Return the event in a delivery. If its header or its routing key determines the kind, the body may omit it.

    Raises:
        DecodeError: The message is not an event, or its routing key does not allow its kind.
    """
    check_readable(delivery)
    allowed = kinds.get(delivery.routing_key, {})
    kind = next(iter(allowed.values())) if len(allowed) == 1 else allowed.get(delivery.kind or "")
    if kind is not None:
        return decode(delivery.body, kind, delivery.content_type)
    message = decode_any(delivery.body, delivery.content_type)
    if message.kind not in allowed:
        expected = ", ".join(sorted(allowed)) or "nothing"
        raise DecodeError(f"a {message.kind} with the routing key {delivery.routing_key!r}, which takes {expected}")
    return message
