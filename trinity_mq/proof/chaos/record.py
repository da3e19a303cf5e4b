"""The content of a run's streams, read as an external observer: results, processed batches, the trainer's progress."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from trinity_mq.bus import Bus, Delivery, Topology
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.bus.topology import Queue
from trinity_mq.experience import DecodeError as BodyError
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, Progress, TaskResult, TaskResults, Version, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, new_mark
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, resolve_body

SAMPLES = 32
"""Maximum sampled experiences for each version, for the check of their tokens."""

RunKey = tuple[str, str, int]
"""Batch, task and run of an experience."""


@dataclass(frozen=True)
class ProcessedSet:
    """A complete set of chunks with its closing message. The first set of a ticket decides the ticket."""

    ready: BatchReady
    offset: int
    is_first: bool
    """True if it is the first complete set of its ticket."""
    uids: tuple[str, ...] = ()
    runs: tuple[tuple[str, str, int, int], ...] = ()
    """Batch, task, run and step of each experience."""
    versions: frozenset[Version] = frozenset()
    """Weight versions named by its tokens."""
    unread: int = 0
    """Number of unreadable chunks."""
    sessions: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Session and tokens of each experience that came from a gateway's session."""


@dataclass
class Record:
    """The content of a run's streams."""

    results: list[TaskResult] = field(default_factory=list)
    """Results in stream order, without repeated message ids."""
    sets: list[ProcessedSet] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    settled: int | None = None
    """Number of messages in ``progress`` that were published before the sets were read; None: all. In a running run,
    later messages may refer to later sets."""
    results_begin: int = 0
    ready_begin: int = 0
    """First offsets that retention has kept: of the results stream and the ready stream."""
    undecodable: list[str] = field(default_factory=list)
    samples: dict[Version, list[Experience]] = field(default_factory=dict)
    """Some experiences by requested version; the version sampled all their tokens."""

    @property
    def deciding(self) -> dict[str, ProcessedSet]:
        """The deciding set by ticket."""
        return {processed.ready.ticket: processed for processed in self.sets if processed.is_first}


async def read_record(
    bus: Bus, topology: Topology, store: BlobStore | None = None, versions: Collection[Version] = ()
) -> Record:
    """Read both streams of a run from their beginnings to their current ends, without removing messages.

    Args:
        bus: A connected bus.
        topology: The run's topology.
        store: Blob store of large bodies.
        versions: Versions to sample experiences of.

    Raises:
        BusUnavailable: A stream does not answer.
    """
    reader = _Reader(store, frozenset(versions))
    record = reader.record
    record.results_begin, end = await _read(bus, topology.results, 0, reader.take_result)
    record.settled = len(record.progress)
    record.ready_begin, _ = await _read(bus, topology.ready, 0, reader.take_ready)
    # a running run may have published results of the sets read last only after the results were read
    await _read(bus, topology.results, end, reader.take_result)
    return record


async def _read(bus: Bus, queue: Queue, offset: int, take: Callable[[Delivery], Awaitable[None]]) -> tuple[int, int]:
    """Read a stream from ``offset`` to its current end. Return its first offset and the offset after its last
    message.
    """
    stream = dataclasses.replace(queue, redeclare=False)  # an observer must not create the stream
    first, last = offset, offset
    async for delivery in read_up_to_now(bus, stream, new_mark(), offset=offset):
        assert delivery.offset is not None
        first = delivery.offset if last == offset else first
        last = delivery.offset + 1
        if not bus.is_foreign(delivery):
            await take(delivery)
    return first, last


class _Reader:
    def __init__(self, store: BlobStore | None, versions: frozenset[Version]) -> None:
        self.record = Record()
        self._store, self._versions = store, versions
        self._ids: set[str] = set()
        self._chunks: defaultdict[tuple[str, str], dict[int, ExperienceBatch | None]] = defaultdict(dict)
        self._complete: set[tuple[str, str]] = set()
        self._decided: set[str] = set()

    async def take_result(self, delivery: Delivery) -> None:
        """Process a delivery of the results stream."""
        if delivery.message_id is not None:
            if delivery.message_id in self._ids:
                return
            self._ids.add(delivery.message_id)
        match self._decoded(delivery):
            case TaskResult() as result:
                self.record.results.append(result)
            case TaskResults() as several:
                self.record.results += several.results
            case Progress() as progress:
                self.record.progress.append(progress)

    async def take_ready(self, delivery: Delivery) -> None:
        """Process a delivery of the ready stream."""
        assert delivery.offset is not None
        if delivery.content_type in {EXPERIENCES, REFERENCE}:
            ticket, op, n = (delivery.headers.get(name) for name in ("ticket", "op", "n"))
            if isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int):
                chunks = self._chunks[ticket, op]
                if n not in chunks and (ticket, op) not in self._complete:
                    chunks[n] = await asyncio.to_thread(self._body, delivery)
            else:
                self.record.undecodable.append(f"ready stream, offset {delivery.offset}: a chunk without its headers")
            return
        message = self._decoded(delivery)
        if isinstance(message, BatchReady):
            self._close(message, delivery.offset)

    def _close(self, ready: BatchReady, offset: int) -> None:
        key = ready.ticket, ready.op
        chunks = self._chunks.get(key, {})
        if key in self._complete or any(n not in chunks for n in range(ready.chunks)):
            return
        self._complete.add(key)
        self._chunks.pop(key, None)
        uids: list[str] = []
        runs: list[tuple[str, str, int, int]] = []
        versions: set[Version] = set()
        unread = 0
        sessions: list[tuple[str, tuple[int, ...]]] = []
        for n in range(ready.chunks):
            batch = chunks[n]
            if batch is None:
                unread += 1
                continue
            uids += batch.ids("uid")
            sessions += _sessions_of(batch)
            columns = [batch.values(f"eid.{name}") for name in ("batch", "task", "run", "step")]
            runs += [(str(b), str(t), int(r), int(s)) for b, t, r, s in zip(*columns, strict=True)]
            for place, rows in enumerate(batch.values("versions")):
                named = {(int(generation), int(step)) for _, generation, step in rows or ()}
                versions |= named
                self._keep(batch, place, named)
        processed = ProcessedSet(
            ready,
            offset,
            ready.ticket not in self._decided,
            tuple(uids),
            tuple(runs),
            frozenset(versions),
            unread,
            tuple(sessions),
        )
        self._decided.add(ready.ticket)
        self.record.sets.append(processed)

    def _keep(self, batch: ExperienceBatch, place: int, named: set[Version]) -> None:
        """Keep an experience of a requested version until it has enough samples."""
        if len(named) != 1 or not named <= self._versions:
            return
        samples = self.record.samples.setdefault(next(iter(named)), [])
        if len(samples) < SAMPLES:
            samples.append(batch[place])

    def _body(self, delivery: Delivery) -> ExperienceBatch | None:
        try:
            return ExperienceBatch.decode(resolve_body(self._store, delivery.body, delivery.content_type)).settle()
        except (BodyError, StoreUnavailable) as error:
            self.record.undecodable.append(f"ready stream, offset {delivery.offset}: {error}")
            return None

    def _decoded(self, delivery: Delivery) -> object:
        try:
            return decode_any(delivery.body, delivery.content_type)
        except DecodeError as error:
            self.record.undecodable.append(f"{delivery.queue}, offset {delivery.offset}: {error}")
            return None


def _sessions_of(batch: ExperienceBatch) -> list[tuple[str, tuple[int, ...]]]:
    named = [(place, (info or {}).get("session")) for place, info in enumerate(batch.values("info"))]
    return [(name, tuple(batch[place].tokens.tolist())) for place, name in named if isinstance(name, str)]
