"""A consumer of the in-memory broker and its deliveries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trinity_mq.bus.base import Delivery, QueueGone, StaleDelivery, StreamCut
from trinity_mq.bus.checks import STREAM_WINDOW, AnsweredOnce, BufferedConsumer
from trinity_mq.bus.memory.queues import Stored, StreamQueue, WorkQueue
from trinity_mq.bus.topology import Queue

if TYPE_CHECKING:
    from trinity_mq.bus.memory.broker import MemoryBroker


class MemoryConsumer(BufferedConsumer[Stored]):
    """Attached to one queue, and attached again after each reconnect."""

    def __init__(
        self,
        broker: MemoryBroker,
        queue: Queue,
        prefetch: int,
        offset: int | None,
        on_close: Callable[[MemoryConsumer], None],
    ) -> None:
        super().__init__()
        self._broker, self.queue, self._on_close = broker, queue, on_close
        self._prefetch = prefetch or (STREAM_WINDOW if queue.kind == "stream" else 0)
        self._next = offset
        self._attached: WorkQueue | StreamQueue | None = None
        self._reading = False
        self._unanswered: dict[int, Stored] = {}
        self.session = 0
        """Rises with each attachment: answers from an earlier one are void."""

    @property
    def room(self) -> bool:
        """May another message be sent to it?"""
        under_way = len(self._arrived) if self.queue.kind == "stream" else len(self._unanswered)
        return not self._prefetch or under_way < self._prefetch

    def attach(self) -> None:
        """Start, or go on, consuming. A queue that does not exist ends the consumer."""
        queue = self._broker.queues.get(self.queue.name)
        self.session += 1
        self._reading = True
        if isinstance(queue, StreamQueue):
            self._next = queue.end if self._next is None else self._next
            self._attached = queue
            queue.attach(self, self._next)
        elif isinstance(queue, WorkQueue):
            self._attached = queue
            queue.attach(self)
        else:
            self._end(QueueGone(f"queue {self.queue.name} does not exist"))

    def detach(self) -> None:
        """Stop; what is unanswered goes back to the queue, one return more each."""
        queue, self._attached = self._attached, None
        self._arrived.clear()
        self.session += 1
        if queue is None:
            return
        self._stop_reading(queue)
        if isinstance(queue, WorkQueue):
            queue.take_back(self._unanswered.values())
        self._unanswered.clear()
        queue.dispatch()

    def _stop_reading(self, queue: WorkQueue | StreamQueue) -> None:
        if self._reading:
            self._reading = False
            queue.detach(self)

    def receive(self, message: Stored) -> None:
        """Take a message from the queue."""
        if message.offset is None:
            self._unanswered[message.order] = message
        self._put(message)

    def queue_deleted(self) -> None:
        """The queue is gone."""
        self._unanswered.clear()
        self.detach()
        self._end(QueueGone(f"queue {self.queue.name} was deleted"))

    def cut(self, kept: int) -> None:
        """Retention has cut what comes next."""
        asked = self._next or 0
        self.detach()
        self._end(StreamCut(self.queue.name, asked, kept))

    def answer(self, delivery: MemoryDelivery) -> tuple[WorkQueue, Stored]:
        """Return the queue and the message that a delivery stands for, which is now answered."""
        queue = self._attached
        if delivery.session != self.session or not isinstance(queue, WorkQueue):
            raise StaleDelivery(f"delivery {delivery.message_id} of {self.queue.name} is void: its consumer is gone")
        return queue, self._unanswered.pop(delivery.order)

    def dead_letter(self, queue: WorkQueue, message: Stored) -> None:
        """Pass a rejected message on."""
        self._broker.dead_letter(queue.declared, message)

    def _hand_over(self, item: Stored) -> Delivery:
        delivery = MemoryDelivery(self, item)
        if item.offset is not None and self._attached is not None:
            self._next = item.offset + 1
            self._attached.dispatch()
        return delivery

    async def stop(self) -> None:
        """Take no new deliveries; what has arrived stays ours to take and to answer."""
        if self._attached is not None:
            self._stop_reading(self._attached)
            self._attached.dispatch()
        self._finish()

    async def close(self) -> None:
        """Stop consuming."""
        self.detach()
        self._end(None)
        self._on_close(self)


class MemoryDelivery(AnsweredOnce):
    """A message handed over."""

    def __init__(self, consumer: MemoryConsumer, message: Stored) -> None:
        broker_headers: dict[str, object] = {}
        if message.returns:
            broker_headers["x-delivery-count"] = message.returns
        if message.offset is not None:
            broker_headers["x-stream-offset"] = message.offset
        super().__init__(
            body=message.body,
            exchange=message.exchange,
            routing_key=message.routing_key,
            queue=consumer.queue.name,
            message_id=message.message_id,
            content_type=message.content_type,
            headers={**message.headers, **broker_headers},
            correlation_id=message.correlation_id,
            reply_to=message.reply_to,
            deliveries_before=message.returns,
            offset=message.offset,
        )
        self._consumer = consumer
        self.session, self.order = consumer.session, message.order

    async def ack(self) -> None:
        """Done with it."""
        if self.offset is None:
            self._answer()
            queue, _ = self._consumer.answer(self)
            queue.dispatch()

    async def reject(self) -> None:
        """Unusable: to the dead-letter exchange."""
        if self.offset is None:
            self._answer()
            queue, message = self._consumer.answer(self)
            self._consumer.dead_letter(queue, message)
            queue.dispatch()

    async def requeue(self) -> None:
        """Give it back."""
        if self.offset is None:
            self._answer()
            queue, message = self._consumer.answer(self)
            queue.take_back([message])
            queue.dispatch()
