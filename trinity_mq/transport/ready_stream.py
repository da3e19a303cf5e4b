"""Reads the ``ready`` stream of processed batches. No other module reads the format of this stream.

A processed set is a number of chunks of experiences, each with the headers ``ticket``, ``op`` and ``n``, and a
BatchReady that closes the set. An operator that died leaves an incomplete set. A repeated processing makes a further
set of the ticket with another ``op``. Bodies stay encoded until a reader needs them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trinity_mq.bus import Bus, Delivery, Envelope, Incoming, Topology
from trinity_mq.bus.streams import next_or_quiet, read_at, read_up_to_now
from trinity_mq.messages import BatchReady, DecodeError, Message, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, new_mark
from trinity_mq.transport.blobs import STORE_PATIENCE, BlobStore, resolve_body, run_with_store_retries

if TYPE_CHECKING:
    from trinity_mq.experience import ExperienceBatch

T = TypeVar("T")

CHUNK_TYPES = frozenset({EXPERIENCES, REFERENCE})
"""Content types of the chunks; the other messages of the stream are JSON."""
SILENCE_SECONDS = 60.0
"""Seconds without a message, on a usable bus, after which a message that must be on the stream counts as missing."""


@dataclass(slots=True)
class Chunk:
    """One chunk of experiences as received, not decoded."""

    ticket: str
    op: str
    """Id of the processing that made the chunk."""
    n: int
    """Number of the chunk in its set."""
    body: bytes
    """Encoded experiences, or a reference to them; empty once released, and then read from the stream again when
    needed."""
    content_type: str | None = EXPERIENCES
    offset: int = 0
    """Stream offset."""
    batch: int | str | None = None
    """Batch of the ticket; None if the message does not name the batch."""


def has_experiences(incoming: Incoming) -> bool:
    """Return whether the body of a message holds experiences, and not a reference to them."""
    return incoming.content_type == EXPERIENCES


def chunk_of(incoming: Incoming) -> Chunk | None:
    """Return the chunk in a message; None if its headers are missing."""
    ticket, op, n, batch = (incoming.headers.get(name) for name in ("ticket", "op", "n", "batch"))
    if not (isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int)):
        return None
    batch = batch if isinstance(batch, int | str) else None
    return Chunk(ticket, op, n, incoming.body, incoming.content_type, incoming.offset or 0, batch)


def content_of(incoming: Incoming) -> Chunk | Message:
    """Return the chunk or the message in a received message.

    Raises:
        DecodeError: The message does not decode, or is a chunk without its headers.
    """
    if incoming.content_type not in CHUNK_TYPES:
        return decode_any(incoming.body, incoming.content_type)
    if (chunk := chunk_of(incoming)) is None:
        raise DecodeError("a chunk without the headers ticket, op and n")
    return chunk


def decode_chunks(chunks: Iterable[Chunk | Delivery], store: BlobStore | None) -> ExperienceBatch:
    """Return the experiences in chunks, in order.

    Raises:
        DecodeError: A chunk does not decode.
        StoreUnavailable: A chunk is in the blob store, and the store does not answer.
    """
    from trinity_mq.experience import ExperienceBatch  # imports torch, which the page does not need

    bodies = (resolve_body(store, chunk.body, chunk.content_type) for chunk in chunks)
    return ExperienceBatch.concat(ExperienceBatch.decode(body).settle() for body in bodies)


async def decode_in_thread(
    chunks: Collection[Chunk | Delivery], store: BlobStore | None, *, seconds: float = STORE_PATIENCE
) -> ExperienceBatch:
    """Return the experiences as :func:`decode_chunks` does; retry for ``seconds`` while the store does not answer."""
    if any(chunk.content_type == REFERENCE for chunk in chunks):
        return await run_with_store_retries(decode_chunks, chunks, store, seconds=seconds)
    return await asyncio.to_thread(decode_chunks, chunks, store)


class OpenSets(Generic[T]):
    """Holds the contents of chunks, by ticket and set, until they are dropped. The content of a repeated chunk is
    ignored.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[str, dict[str, dict[int, T]]] = {}

    def add(self, ticket: str, op: str, n: int, content: T) -> None:
        """Add the content of chunk ``n`` of the set ``op`` of a ticket."""
        self._by_ticket.setdefault(ticket, {}).setdefault(op, {}).setdefault(n, content)

    def join(self, ready: BatchReady) -> tuple[T, ...] | None:
        """Return the contents of the set that ``ready`` closes, in order; None if the set is incomplete. The set is not
        dropped.
        """
        chunks = self._by_ticket.get(ready.ticket, {}).get(ready.op, {})
        if any(n not in chunks for n in range(ready.chunks)):
            return None
        return tuple(chunks[n] for n in range(ready.chunks))

    def first(self, ticket: str) -> T | None:
        """Return the content of the first chunk of a ticket; None if the ticket has no chunk."""
        return next(
            (content for chunks in self._by_ticket.get(ticket, {}).values() for content in chunks.values()), None
        )

    def firsts(self) -> Iterator[T]:
        """Yield the content of the first chunk of each ticket."""
        return (content for ticket in self._by_ticket if (content := self.first(ticket)) is not None)

    def drop(self, ticket: str, op: str | None = None) -> None:
        """Forget the chunks of a ticket; with ``op`` only the chunks of this set."""
        if op is None:
            self._by_ticket.pop(ticket, None)
        else:
            self._by_ticket.get(ticket, {}).pop(op, None)


class ReadyStream:
    """Reads the ``ready`` stream of one run, and publishes marks on it.

    Args:
        bus: A connected bus.
        topology: The run's names.
        redeclare: Create the stream if it is missing. Only the run's own trainer does this.
    """

    def __init__(self, bus: Bus, topology: Topology, *, redeclare: bool = False) -> None:
        self._bus, self._topology = bus, topology
        self._queue = topology.ready if redeclare else dataclasses.replace(topology.ready, redeclare=False)

    async def exists(self) -> bool:
        """Return whether the broker has the stream."""
        return await self._bus.depth(self._queue.name) is not None

    async def put_mark(self, mark: Envelope, *, timeout: float | None = None) -> bool:
        """Publish a mark after all messages that are now on the stream; return whether the broker confirmed it.

        Raises:
            BusUnavailable: The broker does not accept messages.
        """
        return await self._bus.publish(self._topology.exchange("ready"), "mark", mark, timeout=timeout)

    async def read(
        self, offset: int | None, *, mark: Envelope | None = None, silence: Callable[[], float | None] = lambda: None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield the deliveries from ``offset`` on, including messages of other runs of the same name.

        Args:
            offset: First offset. None: only messages published from now on.
            mark: Published after the subscription.
            silence: Returns the seconds of silence on a usable bus after which the reader ends; None: it never ends.

        Raises:
            StreamCut: Retention has removed the message at ``offset``.
        """
        async with await self._bus.consume(self._queue, offset=offset) as feed:
            if mark is not None:
                await self.put_mark(mark)
            while True:
                seconds = silence()
                delivery = await (anext(feed, None) if seconds is None else next_or_quiet(self._bus, feed, seconds))
                if delivery is None:
                    return
                yield delivery

    def up_to_now(self) -> AsyncIterator[Delivery]:
        """Yield the deliveries from the beginning of the stream to its current end, including messages of other runs
        of the same name. Messages that retention has removed are skipped.

        Raises:
            BusUnavailable: The stream does not answer.
        """
        return read_up_to_now(self._bus, self._queue, new_mark(), offset=0)

    async def at(self, offsets: Collection[int]) -> dict[int, Delivery]:
        """Return the messages at ``offsets``; messages beyond the end of the stream are left out.

        Raises:
            StreamCut: Retention has removed the first of the messages.
        """
        return await read_at(self._bus, self._queue, offsets, SILENCE_SECONDS)
