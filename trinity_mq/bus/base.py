"""Interface of the message bus and what its two implementations, RabbitBus and MemoryBus, have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from trinity_mq.bus.properties import Envelope, publishable, short_property
from trinity_mq.bus.topology import Queue, Topology
from trinity_mq.telemetry.trace import record

if TYPE_CHECKING:
    from trinity_mq.config.bus import BrokerConfig  # pydantic takes longer to import than all of this

Answer = Literal["ack", "reject", "requeue"]

BLOCKED = "the broker blocks publishers: memory or disk alarm (free some, or see `rabbitmqctl status`)"
CLOSED = "the bus is closed"
NOT_CONNECTED = "not connected yet: connect() comes first"


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
    unreadable: str | None = None
    """Reason why its properties cannot be read; None if they can. An unreadable message is set aside."""

    @property
    def kind(self) -> str | None:
        """The ``kind`` header, None where the publisher set none."""
        value = self.headers.get("kind")
        return value if isinstance(value, str) else None

    @property
    def run_id(self) -> str | None:
        """The id of the run that it belongs to, None where the publisher knew of none."""
        value = self.headers.get("run_id")
        return value if isinstance(value, str) and value else None


class Delivery(Incoming, ABC):
    """A received message that is ours until acknowledged, rejected or given back. On a stream the answers do nothing.

    Each answer raises StaleDelivery when the delivery's channel is gone or it was answered before: a second answer
    would close the channel.
    """

    _answered = False

    async def ack(self) -> None:
        """Done with it."""
        await self._answer_once("ack")

    async def reject(self) -> None:
        """The body cannot be used: the broker moves it to the queue's dead-letter exchange."""
        await self._answer_once("reject")

    async def requeue(self) -> None:
        """Give it back for another consumer."""
        await self._answer_once("requeue")

    async def _answer_once(self, answer: Answer) -> None:
        if self.offset is not None:
            return
        if self._answered:
            raise StaleDelivery(f"delivery {self.message_id} of {self.queue} was already answered")
        self._answered = True
        await self._settle(answer)

    @abstractmethod
    async def _settle(self, answer: Answer) -> None:
        """Pass the answer to the broker."""


class Consumer(ABC):
    """Deliveries of one queue, in order, over reconnects.

    Iterating waits for the next delivery. It ends when :meth:`close` was called, raises QueueGone when the queue was
    deleted, and StreamCut when a stream no longer holds the offset asked for. After a reconnect what was unacknowledged
    comes again, as new deliveries; a stream goes on behind the last one handed over (its deliveries are acknowledged on
    hand-over).
    """

    def __aiter__(self) -> AsyncIterator[Delivery]:
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
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Lock:
    """An exclusive right, a queue on the consuming connection, that lasts as long as the connection.

    It is retaken on reconnect, before anything else.
    """

    def __init__(self, queue: str, release: Callable[[Lock], Awaitable[None]]) -> None:
        self.queue = queue
        self.held = True
        """Held now. False while disconnected."""
        self._release = release
        self._lost = asyncio.Event()

    async def wait_lost(self) -> None:
        """Return when another took it while we were disconnected: the holder must stop acting."""
        await self._lost.wait()

    async def release(self) -> None:
        await self._release(self)
        self.held = False

    def reconnected(self, *, retaken: bool) -> None:
        """Record whether it was retaken or is lost to another connection."""
        self.held = retaken
        if not retaken:
            self._lost.set()


class HandNotes(Protocol):
    """Remembers over deaths of the process which messages it had in hand."""

    def in_hand(self, incoming: Incoming) -> AbstractContextManager[int]:
        """Note a message in hand, and return the deaths of earlier processes with it in hand."""


class Bus(ABC):
    """One agent's access to the broker.

    All names come from :mod:`trinity_mq.bus.topology`. Operations wait through a lost connection up to their timeout;
    the agent's own declarations, bindings, consumers and locks are rebuilt by one reconnect routine.

    Args:
        topology: Names of the run.
        config: Sizes and timeouts.
    """

    def __init__(self, topology: Topology, config: BrokerConfig) -> None:
        self.max_message_bytes = config.max_message_bytes
        self.run_id: str | None = None
        """Id of the run that its agent belongs to, added to what is published; None: not known. A run's name is no
        identity: the same name may be used again on the same broker."""
        self.foreign = 0
        """Messages of other runs of the same name that the agent dropped."""
        self.met: asyncio.Event | None = None
        """Set once the agent has heard the heartbeats of all others; None: it does not listen to them."""
        self.notes: HandNotes | None = None
        """Notes of the messages that the agent has in hand; None: none are made."""
        self._topology, self._config = topology, config
        self._exchanges = frozenset(topology.exchanges)
        self._locks: dict[str, Lock] = {}
        self.trouble: str | None = NOT_CONNECTED
        """Reason why the bus is not usable, None while it is."""
        self._down: str | None = NOT_CONNECTED
        """Reason why there is no connection."""
        self._blocked = self._closed = False
        self._usable_or_closed = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def usable(self) -> bool:
        """Connected, and the broker does not block publishers (memory or disk alarm)."""
        return self.trouble is None

    async def wait_usable(self) -> None:
        """Return once usable. Raises BusUnavailable once closed."""
        await self._usable_or_closed.wait()
        if self._closed:
            raise BusUnavailable(CLOSED)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever :attr:`usable` changes."""
        self._callbacks.append(callback)

    def is_foreign(self, incoming: Incoming) -> bool:
        """Return whether a message belongs to another run of the same name. One without a run id belongs to any."""
        return self.run_id is not None and incoming.run_id not in {None, self.run_id}

    def _refresh(self) -> None:
        """Work out what the trouble is, if any, from ``_down``, ``_blocked`` and ``_closed``."""
        was_usable = self.usable
        self.trouble = CLOSED if self._closed else self._down or (BLOCKED if self._blocked else None)
        if self.usable or self._closed:
            self._usable_or_closed.set()
        else:
            self._usable_or_closed.clear()
        if self.usable != was_usable:
            for callback in self._callbacks:
                callback()

    @abstractmethod
    async def connect(self) -> None:
        """Open the connections, also of a bus that was closed. Raises BusRefused at once, BusUnavailable after the
        connect timeout.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close everything; exclusive queues and locks of this bus are gone afterwards."""

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
    async def delete_exchanges(self) -> None:
        """Delete the run's exchanges. Nobody publishes to them afterwards; the next connect declares them again."""

    @abstractmethod
    async def depth(self, name: str) -> int | None:
        """Messages ready in a queue, None when there is no such queue. Never creates it."""

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish persistently and wait for the broker's confirm.

        Returns True when at least one queue took it, False when it came back as unroutable. A lost or negative confirm
        is repeated under the same ``message_id`` until ``timeout`` (default: the bus's publish timeout). Exchange
        ``""`` publishes to the queue named by ``routing_key``.

        Raises:
            MessageTooLarge: The body is over ``max_message_bytes``.
            PropertyError: A header that AMQP cannot carry.
            ValueError: The exchange is not one of the run's.
            BusUnavailable: Not confirmed in time.
        """
        what = f"{envelope.kind} {envelope.message_id}"
        if len(envelope.body) > self.max_message_bytes:  # would close the channel under every other publish on it
            raise MessageTooLarge(
                f"{what}: body of {len(envelope.body)} bytes is over broker.max_message_bytes "
                f"({self.max_message_bytes}): split it, or raise the limit (RabbitMQ 4 takes 16 MiB)"
            )
        if exchange and exchange not in self._exchanges:
            raise ValueError(f"exchange {exchange!r} is none of this run's: {', '.join(sorted(self._exchanges))}")
        message = publishable(envelope.of_run(self.run_id))
        seconds = self._config.publish_timeout if timeout is None else timeout
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                taken = await self._publish(exchange, short_property(routing_key), message)
        except TimeoutError:
            raise BusUnavailable(f"{what} was not confirmed in {seconds:g} s: {self.trouble or 'no reply'}") from None
        if isinstance(batch := envelope.headers.get("batch"), int | str):
            size = len(envelope.body)
            record(f"confirm {envelope.kind}", started, time.monotonic(), batch=batch, wait=True, size=size)
        return taken

    @abstractmethod
    async def _publish(self, exchange: str, routing_key: str, envelope: Envelope) -> bool:
        """Publish until confirmed; return whether a queue took it."""

    @abstractmethod
    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming. ``prefetch`` 0 means unlimited (streams: a sensible window).

        ``offset`` is for streams only: the first position wanted, 0 for the beginning, None for "what is published from
        now on". The queue is declared first if ``queue.redeclare``; else QueueGone is raised when it does not exist.
        """

    @abstractmethod
    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock, named as for :meth:`Topology.lock`. Raises LockHeld."""
