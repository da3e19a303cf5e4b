"""Base class of the consumers of RabbitBus and MemoryBus. Deliveries wait in a buffer until they are handed over."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from typing import Generic, TypeVar

from trinity_mq.bus.base import BusError, Consumer, Delivery
from trinity_mq.bus.topology import Queue

STREAM_WINDOW = 32
"""Maximum unacknowledged deliveries of a stream. This is enough for continuous delivery, and limits memory to 32 bodies
of ``max_message_bytes``."""
MOST_PREFETCH = 65535
"""Maximum prefetch. AMQP sends it as an unsigned 16-bit number."""

Item = TypeVar("Item")


class BufferedConsumer(Consumer, Generic[Item]):
    """Consumer of a queue with a buffer.

    Args:
        queue: Queue to consume from.
        prefetch: Maximum number of unanswered deliveries, at most :data:`MOST_PREFETCH`, which replaces a larger
            number. 0: no limit, or the default window of a stream.
        offset: First offset of a stream. None: messages published from now on.
    """

    def __init__(self, queue: Queue, prefetch: int, offset: int | None) -> None:
        self.queue = queue
        self.over = False
        """True once the consumer was stopped, closed, or ended by an error. No new deliveries arrive."""
        self.error: BusError | None = None
        """Error that ended the consumer. None while it runs or after :meth:`close`."""
        self._stream = queue.kind == "stream"
        self._prefetch = min(prefetch, MOST_PREFETCH) or (STREAM_WINDOW if self._stream else 0)
        self._next = offset
        """Offset of the next delivery of a stream. None until it is known."""
        self._arrived: deque[Item] = deque()
        self._changed = asyncio.Event()

    @abstractmethod
    def _hand_over(self, item: Item) -> Delivery:
        """Create the delivery for an item that leaves the buffer."""

    def _put(self, item: Item) -> None:
        self._arrived.append(item)
        self._changed.set()

    def _finish(self) -> None:
        """Mark the consumer as over. Deliveries that have arrived may still be taken."""
        self.over = True
        self._changed.set()

    def _end(self, error: BusError | None) -> None:
        if not self.over:
            self.over, self.error = True, error
        self._arrived.clear()
        self._changed.set()

    def get_nowait(self) -> Delivery | None:
        return self._hand_over(self._arrived.popleft()) if self._arrived else None

    async def __anext__(self) -> Delivery:
        while True:
            delivery = self.get_nowait()
            if delivery is not None:
                return delivery
            if self.error is not None:
                raise self.error.with_traceback(None)
            if self.over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
