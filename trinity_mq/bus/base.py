"""Interface of the message bus, and the code that its two implementations, RabbitBus and MemoryBus, share."""

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
    from trinity_mq.config.bus import BrokerConfig  # importing pydantic takes longer than importing this whole module

Answer = Literal["ack", "reject", "requeue"]

BLOCKED = "the broker blocks publishers: memory or disk alarm (free some, or see `rabbitmqctl status`)"
CLOSED = "the bus is closed"
NOT_CONNECTED = "not connected yet: call connect() first"


class BusError(Exception):
    """Base class of the errors that a Bus raises."""


class BusUnavailable(BusError):
    """The broker was not reached, or a publish was not confirmed, within the timeout; or the bus is closed."""


class BusRefused(BusError):
    """The broker refused permanently, for example because of a wrong password, a missing permission, a wrong virtual
    host or TLS. A retry does not help.
    """


class QueueGone(BusError):
    """A queue to consume, or to publish to, does not exist any more and must not be declared again."""


class StreamCut(BusError):
    """The first delivery of a stream is not at the requested offset, because retention removed earlier messages."""

    def __init__(self, queue: str, asked: int, got: int) -> None:
        super().__init__(f"stream {queue}: offset {asked} was requested, the first stored offset is {got}")
        self.queue, self.asked, self.got = queue, asked, got


class StaleDelivery(BusError):
    """The channel of the delivery is closed or the delivery was answered before. The broker redelivers an unanswered
    message by itself.
    """


class LockHeld(BusError):
    """Another connection, or this bus itself, holds the exclusive lock already."""


class MessageTooLarge(BusError):
    """The body exceeds ``max_message_bytes``. It is refused before it reaches the channel, because the broker would
    close the channel.
    """


@dataclass(slots=True, kw_only=True)
class Incoming:
    """A received message, without the methods to acknowledge it."""

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
    """``x-delivery-count``: number of earlier deliveries that were returned to the queue. It suggests a problem with
    the message but does not prove it.
    """
    offset: int | None = None
    """Offset on a stream. None on other queues."""
    unreadable: str | None = None
    """Reason why the message properties cannot be read. None: they can be read. An unreadable message is set aside."""

    @property
    def kind(self) -> str | None:
        """Value of the ``kind`` header. None: the publisher set no kind."""
        value = self.headers.get("kind")
        return value if isinstance(value, str) else None

    @property
    def run_id(self) -> str | None:
        """Id of the run that the message belongs to. None: the publisher did not know its run."""
        value = self.headers.get("run_id")
        return value if isinstance(value, str) and value else None


class Delivery(Incoming, ABC):
    """A received message, held by this consumer until it is acknowledged, rejected or requeued. On a stream these
    answers have no effect.

    Each answer raises StaleDelivery if the delivery's channel is closed or the delivery was answered before. A second
    answer would close the channel.
    """

    _answered = False

    async def ack(self) -> None:
        """Acknowledge the message: its processing is complete."""
        await self._answer_once("ack")

    async def reject(self) -> None:
        """Reject an unusable message. The broker moves it to the dead-letter exchange of the queue."""
        await self._answer_once("reject")

    async def requeue(self) -> None:
        """Return the message to the queue, for another consumer."""
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
        """Send the answer to the broker."""


class Consumer(ABC):
    """Deliveries of a queue, in order, across reconnects.

    Iteration waits for the next delivery. It ends after :meth:`stop` or :meth:`close`. It raises QueueGone if the queue
    was deleted and is not declared again, BusRefused if another connection owns an exclusive queue, and StreamCut if a
    stream no longer holds the requested offset. After a reconnect, unacknowledged messages are redelivered as new
    deliveries. A stream resumes after the last delivery that was handed over, because stream
    deliveries are acknowledged on hand-over.
    """

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    @abstractmethod
    async def __anext__(self) -> Delivery: ...

    @abstractmethod
    def get_nowait(self) -> Delivery | None:
        """Return a delivery that has already arrived. Return None if no delivery has arrived."""

    @abstractmethod
    async def stop(self) -> None:
        """Accept no new deliveries. Iteration ends after the deliveries that have arrived. They can still be
        acknowledged until :meth:`close`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop consuming. Unacknowledged messages return to the queue."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Lock:
    """An exclusive lock: an exclusive queue on the consuming connection, held as long as the connection lasts.

    After a reconnect the lock is retaken before any other step.
    """

    def __init__(self, queue: str, release: Callable[[Lock], Awaitable[None]]) -> None:
        self.queue = queue
        self.held = True
        """True while the lock is held. False while disconnected."""
        self._release = release
        self._lost = asyncio.Event()

    async def wait_lost(self) -> None:
        """Return once another connection has taken the lock during a disconnect. The holder must then stop acting."""
        await self._lost.wait()

    async def release(self) -> None:
        await self._release(self)
        self.held = False

    def reconnected(self, *, retaken: bool) -> None:
        """Record whether the lock was retaken or is lost to another connection."""
        self.held = retaken
        if not retaken:
            self._lost.set()


class HandNotes(Protocol):
    """Remembers, across crashes of the process, which messages were in progress."""

    def in_hand(self, incoming: Incoming) -> AbstractContextManager[int]:
        """Record a message as in progress until the ``with`` block ends. The block gets the number of earlier processes
        that died with the message in progress.
        """


class Bus(ABC):
    """Access of a single agent to the broker.

    All names come from :mod:`trinity_mq.bus.topology`. Operations wait through a lost connection up to their timeout. A
    single reconnect routine rebuilds the agent's own declarations, bindings, consumers and locks.

    Args:
        topology: Names of the run on the broker.
        config: Sizes and timeouts.
    """

    def __init__(self, topology: Topology, config: BrokerConfig) -> None:
        self.max_message_bytes = config.max_message_bytes
        self.run_id: str | None = None
        """Id of the agent's run, added to published messages. None: unknown. The name of a run does not identify it:
        the same name may be reused on the same broker.
        """
        self.foreign = 0
        """Number of messages from other runs with the same name that the agent dropped."""
        self.met: asyncio.Event | None = None
        """Set once the agent has listened long enough to have heard every live agent. None: it does not listen to
        heartbeats.
        """
        self.notes: HandNotes | None = None
        """Notes of the messages that the agent is processing. None: no notes are made."""
        self._topology, self._config = topology, config
        self._exchanges = frozenset(topology.exchanges)
        self._locks: dict[str, Lock] = {}
        self.trouble: str | None = NOT_CONNECTED
        """Reason why the bus is not usable. None while it is usable."""
        self._down: str | None = NOT_CONNECTED
        """Reason why the bus is not connected. None while it is connected."""
        self._blocked = self._closed = False
        self._usable_or_closed = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def usable(self) -> bool:
        """True if connected and the broker does not block publishers (memory or disk alarm)."""
        return self.trouble is None

    async def wait_usable(self) -> None:
        """Return once the bus is usable. Raises BusUnavailable once it is closed."""
        await self._usable_or_closed.wait()
        if self._closed:
            raise BusUnavailable(CLOSED)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on every change of :attr:`usable`."""
        self._callbacks.append(callback)

    def is_foreign(self, incoming: Incoming) -> bool:
        """Return whether a message belongs to another run with the same name. A message without a run id belongs to
        every run. While :attr:`run_id` is unknown, every message counts as the agent's own.
        """
        return self.run_id is not None and incoming.run_id not in {None, self.run_id}

    def _refresh(self) -> None:
        """Compute ``trouble`` from ``_down``, ``_blocked`` and ``_closed``, and report a change of :attr:`usable`."""
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
        """Open the connections. This also reopens a closed bus. Raises BusRefused and AddressError immediately, and
        BusUnavailable after the connect timeout.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all connections. The bus's exclusive queues and locks no longer exist afterwards."""

    @abstractmethod
    async def declare(self, *queues: Queue) -> None:
        """Declare queues and their bindings, idempotently. An existing queue with other arguments is used unchanged."""

    @abstractmethod
    async def unbind(self, queue: Queue) -> None:
        """Remove the bindings of the queue. From then on, publishers get their messages returned or dropped."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a queue. It is not an error if the queue does not exist."""

    @abstractmethod
    async def delete_exchanges(self) -> None:
        """Delete the exchanges of the run. No agent may publish to them afterwards. The next connect declares them
        again.
        """

    @abstractmethod
    async def depth(self, name: str) -> int | None:
        """Return the number of ready messages in a queue. Return None if the queue does not exist. It never creates the
        queue.
        """

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish a persistent message and wait for the broker's confirm.

        Return True if at least one queue took the message, and False if it was returned as unroutable. After a lost or
        negative confirm the publish is repeated under the same ``message_id`` until ``timeout`` seconds (default: the
        bus's publish timeout). Exchange ``""`` publishes to the queue named by ``routing_key``.

        Raises:
            MessageTooLarge: The body exceeds ``max_message_bytes``.
            PropertyError: AMQP cannot carry a header.
            ValueError: The exchange does not belong to the run.
            BusRefused: The user has no permission to publish this.
            BusUnavailable: The publish was not confirmed in time.
        """
        what = f"{envelope.kind} {envelope.message_id}"
        # the broker would close the channel with all other publishes on it
        if len(envelope.body) > self.max_message_bytes:
            raise MessageTooLarge(
                f"{what}: body of {len(envelope.body)} bytes is over broker.max_message_bytes "
                f"({self.max_message_bytes}): split it, or raise the limit (RabbitMQ 4 takes 16 MiB)"
            )
        if exchange and exchange not in self._exchanges:
            raise ValueError(
                f"exchange {exchange!r} is not an exchange of this run, which has: {', '.join(sorted(self._exchanges))}"
            )
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

    async def publish_declared(
        self, queue: Queue, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> None:
        """Publish a message to the exchange of a queue until a queue took it. A deleted queue is declared again.

        Raises the errors of :meth:`publish`, and QueueGone if the deleted queue must not be declared again.
        """
        while not await self.publish(queue.bindings[0].exchange, routing_key, envelope, timeout=timeout):
            if not queue.redeclare:
                raise QueueGone(f"{queue.name} does not exist any more")
            await self.declare(queue)

    @abstractmethod
    async def _publish(self, exchange: str, routing_key: str, envelope: Envelope) -> bool:
        """Publish until confirmed. Return whether a queue took the message."""

    @abstractmethod
    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Start consuming. ``prefetch`` 0 means unlimited, or a default window on streams. The largest limit is 65535.

        ``offset`` applies to streams only: it is the first wanted offset, 0 for the beginning, None for messages
            published from now on. The queue is declared first if ``queue.redeclare`` is set. Otherwise QueueGone is
            raised if it does not exist.
        """

    @abstractmethod
    async def lock(self, name: str) -> Lock:
        """Take an exclusive lock, with a name as for :meth:`Topology.lock`. Raises LockHeld if another connection holds
        it.
        """
