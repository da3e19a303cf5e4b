"""Interface of the message bus, implemented by RabbitBus and MemoryBus."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from trinity_mq.bus.topology import Queue

HeaderValue = str | int | float | bool


class BusError(Exception):
    """Base class of the errors that a Bus raises."""


class BusUnavailable(BusError):
    """The broker could not be reached, or a publish was not confirmed, within the time given."""


class BusRefused(BusError):
    """The broker refused for good: wrong password, no permission, wrong vhost. Trying again does not help."""


class QueueGone(BusError):
    """The queue that was consumed from does not exist any more."""


class StreamCut(BusError):
    """A stream's first delivery is not at the offset asked for: retention has cut what lay before."""

    def __init__(self, queue: str, asked: int, got: int) -> None:
        super().__init__(f"stream {queue}: offset {asked} was asked for, the first one kept is {got}")
        self.queue, self.asked, self.got = queue, asked, got


class StaleDelivery(BusError):
    """Acknowledgement of a delivery whose channel is gone; the broker delivers it again by itself."""


class LockHeld(BusError):
    """The exclusive lock is held by another connection."""


class MessageTooLarge(BusError):
    """A body over ``max_message_bytes``; refused before it reaches the channel, which it would close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """An outgoing message."""

    body: bytes
    kind: str
    """Also sent as header ``kind``."""
    message_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Deterministic where a repeat must be recognised (protocol.md section 1)."""
    content_type: str = "application/msgpack"
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)
    correlation_id: str | None = None
    reply_to: str | None = None


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A received message, without the means to answer for it."""

    body: bytes
    exchange: str
    routing_key: str
    queue: str
    message_id: str | None = None
    content_type: str | None = None
    headers: Mapping[str, object] = field(default_factory=dict)
    correlation_id: str | None = None
    reply_to: str | None = None
    deliveries_before: int = 0
    """``x-delivery-count``: how often it was delivered before and came back. A suspicion, not a verdict."""
    offset: int | None = None
    """Position on a stream, None on other queues."""

    @property
    def kind(self) -> str | None:
        """The ``kind`` header, None where the publisher set none."""
        value = self.headers.get("kind")
        return value if isinstance(value, str) else None


class Delivery(Incoming, ABC):
    """A received message that is ours until acknowledged, rejected or given back."""

    @abstractmethod
    async def ack(self) -> None:
        """Done with it. Raises StaleDelivery when its channel is gone."""

    @abstractmethod
    async def reject(self) -> None:
        """The body cannot be used: the broker moves it to the queue's dead-letter exchange. Raises StaleDelivery."""

    @abstractmethod
    async def requeue(self) -> None:
        """Give it back for another consumer. Raises StaleDelivery."""


class Consumer(ABC):
    """Deliveries of one queue, in order, over reconnects.

    Iterating waits for the next delivery. It ends when :meth:`close` was called, raises QueueGone when the queue was
    deleted, and
    StreamCut when a stream no longer holds the offset asked for. After a reconnect what was unacknowledged comes again,
    as new deliveries;
    a stream goes on behind the last one handed over (stream deliveries are acknowledged on hand-over; ``ack`` on them
    does nothing).
    """

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Return itself."""
        return self

    @abstractmethod
    async def __anext__(self) -> Delivery: ...

    @abstractmethod
    def get_nowait(self) -> Delivery | None:
        """Return a delivery that has already arrived, or None."""

    @abstractmethod
    async def stop(self) -> None:
        """Take no new deliveries: iterating ends after those that have arrived. They stay ours to acknowledge until
        :meth:`close`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop consuming; what is unacknowledged goes back to the queue."""

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()


class Bus(ABC):
    """One agent's access to the broker.

    All names come from :mod:`trinity_mq.bus.topology`. Operations wait through a lost connection up to their timeout;
    the agent's own
    declarations, bindings, consumers and locks are rebuilt by one reconnect routine.
    """

    max_message_bytes: int

    @abstractmethod
    async def connect(self) -> None:
        """Open the connections. Raises BusRefused at once, BusUnavailable after the connect timeout."""

    @abstractmethod
    async def close(self) -> None:
        """Close everything; exclusive queues and locks of this bus are gone afterwards."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Connected, and the broker does not block publishers (memory or disk alarm)."""

    @property
    @abstractmethod
    def trouble(self) -> str | None:
        """Reason why the bus is not usable, None while it is."""

    @abstractmethod
    async def wait_usable(self) -> None:
        """Return once usable."""

    @abstractmethod
    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever :attr:`usable` changes."""

    @abstractmethod
    async def declare(self, *queues: Queue) -> None:
        """Declare exchanges, queues and their bindings, idempotently. A queue that exists with other arguments is used
        as it is.
        """

    @abstractmethod
    async def unbind(self, queue: Queue) -> None:
        """Remove the queue's bindings; publishers get their message returned (or ignored) from then on."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a queue; none of that name is fine."""

    @abstractmethod
    async def depth(self, name: str) -> int | None:
        """Messages ready in a queue, None when there is no such queue. Never creates it."""

    @abstractmethod
    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish persistently and wait for the broker's confirm.

        Returns True when at least one queue took it, False when it came back as unroutable.

        A lost or negative confirm is repeated under the same ``message_id`` until ``timeout`` (default: the bus's
        publish timeout). Exchange
        ``""`` publishes to the queue named by ``routing_key``.

        Raises:
            MessageTooLarge: The body is over ``max_message_bytes``.
            BusUnavailable: Not confirmed in time.
        """

    @abstractmethod
    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming. ``prefetch`` 0 means unlimited (streams: a sensible window).

        ``offset`` is for streams only: the first position wanted, 0 for the beginning, None for "what is published from
        now on". The queue
        is declared first if ``queue.redeclare``; else QueueGone is raised when it does not exist.
        """

    @abstractmethod
    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock (a queue on the consuming connection). Raises LockHeld."""


class Lock(ABC):
    """An exclusive right that lasts as long as the consuming connection. It is retaken on reconnect, before anything
    else.
    """

    @property
    @abstractmethod
    def held(self) -> bool:
        """Held now. False while disconnected."""

    @abstractmethod
    async def wait_lost(self) -> None:
        """Return when another took it while we were disconnected: the holder must stop acting."""

    @abstractmethod
    async def release(self) -> None:
        """Give it up."""
