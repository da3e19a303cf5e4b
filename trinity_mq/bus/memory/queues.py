"""Queues of the in-memory broker and their consumers. Work queues deliver until a message is acknowledged, streams by
offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from trinity_mq.bus.base import Answer, Delivery, Incoming, QueueGone, StaleDelivery, StreamCut
from trinity_mq.bus.buffered_consumer import BufferedConsumer
from trinity_mq.bus.topology import Queue


@dataclass(slots=True, kw_only=True)
class Stored(Incoming):
    """A message stored in a queue."""

    order: int = 0
    """Sequence number in its queue. A requeued message returns to the position of this number."""


class MemoryQueue(ABC):
    """Base class of work queues and streams."""

    def __init__(self, declared: Queue, owner: object | None = None) -> None:
        self.declared, self.owner = declared, owner
        self._consumers: list[MemoryConsumer] = []

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of ready messages. For a stream, the number of retained messages."""

    @abstractmethod
    def put(self, message: Stored) -> None:
        """Store a message and deliver it."""

    @abstractmethod
    def dispatch(self) -> None:
        """Deliver while the queue has a message and a consumer with capacity."""

    @abstractmethod
    def take_back(self, messages: Iterable[Stored]) -> None:
        """Requeue unacknowledged messages at their old positions, and count another return for each. It delivers
        nothing by itself.
        """

    def attach(self, consumer: MemoryConsumer) -> None:
        self._consumers.append(consumer)
        self.dispatch()

    def detach(self, consumer: MemoryConsumer) -> None:
        """Remove a consumer. Its unanswered messages are requeued by the consumer itself."""
        if consumer in self._consumers:
            self._consumers.remove(consumer)

    def delete(self) -> list[MemoryConsumer]:
        """End the consumers. Return the consumers that declare the queue again."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            consumer.queue_deleted()
        return [consumer for consumer in consumers if not consumer.over]


class WorkQueue(MemoryQueue):
    """A quorum queue or an exclusive queue. An exclusive queue does not count returns."""

    def __init__(self, declared: Queue, owner: object | None = None) -> None:
        super().__init__(declared, owner)
        self._ready: deque[Stored] = deque()
        self._last_order = 0

    @property
    def depth(self) -> int:
        return len(self._ready)

    @property
    def messages(self) -> list[Stored]:
        """Messages that are neither delivered nor waiting for an answer, in order."""
        return list(self._ready)

    def purge(self) -> list[Stored]:
        """Remove all ready messages and return them, in order."""
        purged = self.messages
        self._ready.clear()
        return purged

    def put(self, message: Stored) -> None:
        self._last_order += 1
        self._ready.append(replace(message, queue=self.declared.name, order=self._last_order))
        self.dispatch()

    def take_back(self, messages: Iterable[Stored]) -> None:
        for message in messages:
            if self.declared.kind == "quorum":
                message.deliveries_before += 1
            self._ready.append(message)
        self._ready = deque(sorted(self._ready, key=lambda message: message.order))

    def dispatch(self) -> None:
        """Deliver to the consumers in rotation, or to the single active consumer."""
        single = self.declared.single_active_consumer
        while self._ready:
            consumer = next(
                (candidate for candidate in self._consumers[: 1 if single else None] if candidate.has_room), None
            )
            if consumer is None:
                return
            if not single:
                self._consumers.remove(consumer)
                self._consumers.append(consumer)
            consumer.receive(self._ready.popleft())


class StreamQueue(MemoryQueue):
    """A stream. Retention removes single messages, whereas a broker removes whole segments."""

    def __init__(self, declared: Queue, owner: object | None = None) -> None:
        super().__init__(declared, owner)
        self._first = 0
        self._messages: deque[Stored] = deque()
        self._bytes = 0

    @property
    def depth(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> list[Stored]:
        """Retained messages, in order."""
        return list(self._messages)

    @property
    def end(self) -> int:
        """Offset of the next published message."""
        return self._first + len(self._messages)

    def put(self, message: Stored) -> None:
        """Append a message, apply retention, and deliver."""
        limit = self.declared.max_length_bytes
        self._messages.append(replace(message, queue=self.declared.name, offset=self.end))
        self._bytes += len(message.body)
        while limit is not None and self._bytes > limit and len(self._messages) > 1:
            self.trim(1)
        self.dispatch()

    def trim(self, count: int) -> None:
        """Remove the oldest ``count`` messages, as retention does."""
        for _ in range(count):
            self._bytes -= len(self._messages.popleft().body)
            self._first += 1

    def take_back(self, messages: Iterable[Stored]) -> None:
        """Do nothing, because a stream keeps delivered messages."""

    def dispatch(self) -> None:
        """Deliver to each consumer up to its capacity. A consumer with an offset beyond the end keeps waiting."""
        for consumer in tuple(self._consumers):
            if consumer.position < self._first:
                consumer.cut(self._first)
            while consumer.position < self.end and consumer.has_room:
                consumer.position += 1
                consumer.receive(self._messages[consumer.position - 1 - self._first])


class MemoryConsumer(BufferedConsumer[Stored]):
    """Consumer that is attached to a queue, and again after each reconnect.

    Args:
        queue: Queue to consume from; ``prefetch`` and ``offset`` as in :class:`BufferedConsumer`.
        dead_letter: Called to dead-letter a rejected message.
        on_close: Called when the consumer is closed.
    """

    def __init__(
        self,
        queue: Queue,
        prefetch: int,
        offset: int | None,
        dead_letter: Callable[[Queue, Stored], None],
        on_close: Callable[[MemoryConsumer], None],
    ) -> None:
        super().__init__(queue, prefetch, offset)
        self._dead_letter, self._on_close = dead_letter, on_close
        self._attached: MemoryQueue | None = None
        self._unanswered: dict[int, Stored] = {}
        self.position = 0
        """Offset of the next message that the stream puts into the buffer."""
        self.session = 0
        """Number of the current attachment. Answers from an earlier attachment are void."""

    @property
    def has_room(self) -> bool:
        """True if another message may be delivered to the consumer."""
        under_way = len(self._arrived) if self._stream else len(self._unanswered)
        return self._attached is not None and (not self._prefetch or under_way < self._prefetch)

    def attach(self, queue: MemoryQueue | None) -> None:
        self.session += 1
        self._attached = queue
        if queue is None:
            self._end(QueueGone(f"queue {self.queue.name} does not exist"))
            return
        if isinstance(queue, StreamQueue):
            self._next = self.position = queue.end if self._next is None else self._next
        queue.attach(self)

    def detach(self) -> None:
        """Stop. Unanswered messages return to the queue, each with another return counted."""
        queue, self._attached = self._attached, None
        self._arrived.clear()
        self.session += 1
        if queue is not None:
            queue.detach(self)
            queue.take_back(self._unanswered.values())
            self._unanswered.clear()
            queue.dispatch()

    def receive(self, message: Stored) -> None:
        if not self._stream:
            self._unanswered[message.order] = message
        self._put(message)

    def queue_deleted(self) -> None:
        """Forget the delivered messages, which are lost with the queue. End, unless the queue is declared again."""
        self._unanswered.clear()
        self._attached = None
        self.detach()
        if self.queue.kind == "exclusive" or not self.queue.comes_back:
            self._end(QueueGone(f"queue {self.queue.name} was deleted"))

    def cut(self, first_offset: int) -> None:
        """End with StreamCut, because retention removed the next messages. ``first_offset`` is the first offset
        that the stream holds.
        """
        requested = self._next or 0
        self.detach()
        self._end(StreamCut(self.queue.name, requested, first_offset))

    def settle(self, delivery: MemoryDelivery, answer: Answer) -> None:
        queue = self._attached
        if delivery.session != self.session or queue is None:
            raise StaleDelivery(f"delivery {delivery.message_id} of {self.queue.name} is void: its consumer is gone")
        message = self._unanswered.pop(delivery.order)
        if answer == "requeue":
            queue.take_back([message])
        elif answer == "reject":
            self._dead_letter(self.queue, message)
        queue.dispatch()

    def _hand_over(self, item: Stored) -> Delivery:
        delivery = MemoryDelivery(self, item)
        if item.offset is not None and self._attached is not None:
            self._next = item.offset + 1
            self._attached.dispatch()
        return delivery

    async def stop(self) -> None:
        if self._attached is not None:
            self._attached.detach(self)
            self._attached.dispatch()
        self._finish()

    async def close(self) -> None:
        self.detach()
        self._end(None)
        self._on_close(self)


class MemoryDelivery(Delivery):
    """A message that was handed over."""

    def __init__(self, consumer: MemoryConsumer, message: Stored) -> None:
        stored: dict[str, Any] = {
            property_field.name: getattr(message, property_field.name) for property_field in fields(Incoming)
        }
        counted = {"x-delivery-count": message.deliveries_before or None, "x-stream-offset": message.offset}
        broker_headers = {name: value for name, value in counted.items() if value is not None}
        super().__init__(**stored | {"headers": {**message.headers, **broker_headers}})
        self._consumer = consumer
        self.session, self.order = consumer.session, message.order

    async def _settle(self, answer: Answer) -> None:
        self._consumer.settle(self, answer)
