"""Parts shared by RabbitBus and MemoryBus: health, checks before a publish, answers and consumer buffers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from trinity_mq.bus.base import BusError, BusUnavailable, Consumer, Delivery, Envelope, MessageTooLarge, StaleDelivery
from trinity_mq.bus.topology import Topology

STREAM_WINDOW = 32
"""Deliveries of a stream under way at once: enough to stream, at most 32 bodies of ``max_message_bytes`` in memory."""

BLOCKED = "the broker blocks publishers: memory or disk alarm (free some, or see `rabbitmqctl status`)"
CLOSED = "the bus is closed"
NOT_CONNECTED = "not connected yet: connect() comes first"

Item = TypeVar("Item")


class Health:
    """Health of a bus: the reason why it is not usable, and the callbacks for changes."""

    def __init__(self) -> None:
        self.trouble: str | None = NOT_CONNECTED
        self._closed = False
        self._usable_or_closed = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def usable(self) -> bool:
        """No trouble."""
        return self.trouble is None

    def set(self, trouble: str | None) -> None:
        """Set the reason, None for usable; callbacks are called only when :attr:`usable` changes."""
        if self._closed:
            return
        changed = (trouble is None) != self.usable
        self.trouble = trouble
        if not changed:
            return
        if trouble is None:
            self._usable_or_closed.set()
        else:
            self._usable_or_closed.clear()
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """Mark the bus closed and wake the tasks that wait for it."""
        self.set(CLOSED)
        self._closed = True
        self._usable_or_closed.set()

    async def wait_usable(self) -> None:
        """Return once usable. Raises BusUnavailable once closed."""
        await self._usable_or_closed.wait()
        if self._closed:
            raise BusUnavailable(CLOSED)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on each change."""
        self._callbacks.append(callback)


def check_outgoing(exchanges: Collection[str], exchange: str, envelope: Envelope, max_bytes: int) -> None:
    """Refuse what would close the channel under every other publish on it.

    Raises:
        MessageTooLarge: The body is over ``max_bytes``.
        ValueError: The exchange is not one of ``exchanges``.
    """
    if len(envelope.body) > max_bytes:
        raise MessageTooLarge(
            f"{envelope.kind} {envelope.message_id}: body of {len(envelope.body)} bytes is over "
            f"broker.max_message_bytes ({max_bytes}): split it, or raise the limit (RabbitMQ 4 takes 16 MiB)"
        )
    if exchange and exchange not in exchanges:
        raise ValueError(f"exchange {exchange!r} is none of this run's: {', '.join(sorted(exchanges))}")


def lock_queue(topology: Topology, name: str) -> str:
    """Return the queue of a lock, given as its full name or as the name :meth:`Topology.lock` takes."""
    return name if name.startswith(topology.prefix) else topology.lock(name)


class AnsweredOnce(Delivery):
    """A second answer to a delivery would close its channel, so it is refused here."""

    _answered = False

    def _answer(self) -> None:
        """Note the answer, or raise StaleDelivery."""
        if self._answered:
            raise StaleDelivery(f"delivery {self.message_id} of {self.queue} was already answered")
        self._answered = True


class BufferedConsumer(Consumer, Generic[Item]):
    """Arrived items wait here until they are handed over."""

    def __init__(self) -> None:
        self._arrived: deque[Item] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self._error: BusError | None = None

    @property
    def error(self) -> BusError | None:
        """Error that ended the consumer, None while it runs or after :meth:`close`."""
        return self._error

    @property
    def over(self) -> bool:
        """Stopped, closed, or ended by an error: nothing new arrives."""
        return self._over

    @abstractmethod
    def _hand_over(self, item: Item) -> Delivery:
        """Make the delivery of an item that leaves the buffer."""

    def _put(self, item: Item) -> None:
        self._arrived.append(item)
        self._changed.set()

    def _finish(self) -> None:
        """Nothing arrives any more; what has arrived may still be taken."""
        self._over = True
        self._changed.set()

    def _end(self, error: BusError | None) -> None:
        if not self._over:
            self._over, self._error = True, error
        self._arrived.clear()
        self._changed.set()

    def get_nowait(self) -> Delivery | None:
        """Return a delivery that has already arrived, or None."""
        return self._hand_over(self._arrived.popleft()) if self._arrived else None

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery."""
        while True:
            delivery = self.get_nowait()
            if delivery is not None:
                return delivery
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
