"""Record of a run, read as an external observer: results, processed batches, the trainer's progress.

The source may be the streams of a broker, or the messages of a simulated bus.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from trinity_mq.bus import Bus, Incoming, Topology
from trinity_mq.bus.streams import read_up_to_now
from trinity_mq.bus.topology import Queue
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, Message, Progress, TaskResult, TaskResults, Version
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable
from trinity_mq.transport.ready_stream import Chunk, OpenSets, content_of, decode_chunks

SAMPLES = 32
"""Maximum sampled experiences for each version, for the check of their tokens."""


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
    experiences: ExperienceBatch | None = None
    """Experiences of the set, if the recorder keeps them."""


@dataclass(frozen=True, slots=True)
class VersionSeen:
    """A weight version that was announced, committed or served at a time."""

    at: float
    """Time in seconds of the observer's clock."""
    who: str
    """The sender of the commit, ``committed`` for a trainer's heartbeat, or an engine's life."""
    version: Version


@dataclass
class Record:
    """The content of a run's streams."""

    results: list[TaskResult] = field(default_factory=list)
    """Results in stream order, without repeated message ids."""
    sets: list[ProcessedSet] = field(default_factory=list)
    """Complete sets of processed chunks, in stream order."""
    progress: list[Progress] = field(default_factory=list)
    """Progress messages of the trainer, in stream order, without repeated message ids."""
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

    @property
    def by_processing(self) -> dict[tuple[str, str], ProcessedSet]:
        """The sets by (ticket, processing)."""
        return {(processed.ready.ticket, processed.ready.op): processed for processed in self.sets}


async def read_record(
    bus: Bus, topology: Topology, store: BlobStore | None = None, versions: Collection[Version] = ()
) -> Record:
    """Read the results stream and the ready stream of a run from their beginnings to their current ends, without
    removing messages.

    Args:
        bus: A connected bus.
        topology: The run's topology.
        store: Blob store of large bodies.
        versions: Weight versions whose experiences are sampled; see :attr:`Record.samples`.

    Raises:
        BusUnavailable: A stream does not answer.
    """
    recorder = Recorder(store, frozenset(versions))
    record = recorder.record
    record.results_begin, end = await _read(bus, topology.results, 0, recorder.take_result)
    record.settled = len(record.progress)
    record.ready_begin, _ = await _read(bus, topology.ready, 0, recorder.take_ready)
    # a running run may have published results of the sets read last only after the results were read
    await _read(bus, topology.results, end, recorder.take_result)
    return record


async def read_sets(bus: Bus, topology: Topology, store: BlobStore | None = None) -> Record:
    """Read the ready stream of a run as :func:`read_record` does, without the results stream.

    Raises:
        BusUnavailable: The stream does not answer.
    """
    recorder = Recorder(store)
    recorder.record.ready_begin, _ = await _read(bus, topology.ready, 0, recorder.take_ready)
    return recorder.record


async def _read(bus: Bus, queue: Queue, offset: int, take: Callable[[Incoming], None]) -> tuple[int, int]:
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
            await asyncio.to_thread(take, delivery)
    return first, last


class Recorder:
    """Builds the record of a run, message by message.

    Args:
        store: Blob store of large bodies.
        versions: Weight versions whose experiences are sampled; see :attr:`Record.samples`.
        keeps_experiences: Keep the experiences of each set.
    """

    def __init__(
        self,
        store: BlobStore | None = None,
        versions: frozenset[Version] = frozenset(),
        *,
        keeps_experiences: bool = False,
    ) -> None:
        self.record = Record()
        self._store, self._versions, self._keeps_experiences = store, versions, keeps_experiences
        self._ids: set[str] = set()
        self._open: OpenSets[ExperienceBatch | None] = OpenSets()
        """Sets that are not complete yet, with the experiences of each chunk; None: the chunk cannot be read."""
        self._complete: set[tuple[str, str]] = set()
        self._decided: set[str] = set()

    def take_result(self, incoming: Incoming) -> None:
        """Process a message of the results stream."""
        if incoming.message_id is not None:
            if incoming.message_id in self._ids:
                return
            self._ids.add(incoming.message_id)
        match self._content(incoming):
            case TaskResult() as result:
                self.record.results.append(result)
            case TaskResults() as several:
                self.record.results += several.results
            case Progress() as progress:
                self.record.progress.append(progress)

    def take_ready(self, incoming: Incoming) -> None:
        """Process a message of the ready stream."""
        match self._content(incoming):
            case Chunk() as chunk if (chunk.ticket, chunk.op) not in self._complete:
                self._open.add(chunk.ticket, chunk.op, chunk.n, self._experiences(chunk))
            case BatchReady() as ready:
                self._close(ready, incoming.offset or 0)

    def _close(self, ready: BatchReady, offset: int) -> None:
        key = ready.ticket, ready.op
        chunks = self._open.join(ready)
        if key in self._complete or chunks is None:
            return
        self._complete.add(key)
        self._open.drop(*key)
        batch = ExperienceBatch.concat([chunk for chunk in chunks if chunk is not None])
        columns = [batch.values(f"eid.{name}") for name in ("batch", "task", "run", "step")]
        versions = [{(int(row[1]), int(row[2])) for row in rows or ()} for rows in batch.values("versions")]
        for place, named in enumerate(versions):
            self._keep(batch, place, named)
        processed = ProcessedSet(
            ready,
            offset,
            ready.ticket not in self._decided,
            tuple(batch.ids("uid")),
            tuple((str(b), str(t), int(r), int(s)) for b, t, r, s in zip(*columns, strict=True)),
            frozenset().union(*versions),
            chunks.count(None),
            _sessions_of(batch),
            batch if self._keeps_experiences else None,
        )
        self._decided.add(ready.ticket)
        self.record.sets.append(processed)

    def _keep(self, batch: ExperienceBatch, place: int, named: set[Version]) -> None:
        """Keep an experience as a sample if all its tokens name the same requested version, and this version does not
        have enough samples yet.
        """
        if len(named) != 1 or not named <= self._versions:
            return
        samples = self.record.samples.setdefault(next(iter(named)), [])
        if len(samples) < SAMPLES:
            samples.append(batch[place])

    def _experiences(self, chunk: Chunk) -> ExperienceBatch | None:
        try:
            return decode_chunks([chunk], self._store)
        except (DecodeError, StoreUnavailable) as error:
            self.record.undecodable.append(f"ready stream, offset {chunk.offset}: {error}")
            return None

    def _content(self, incoming: Incoming) -> Chunk | Message | None:
        try:
            return content_of(incoming)
        except DecodeError as error:
            self.record.undecodable.append(f"{incoming.queue}, offset {incoming.offset}: {error}")
            return None


def _sessions_of(batch: ExperienceBatch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    named = [(place, (info or {}).get("session")) for place, info in enumerate(batch.values("info"))]
    return tuple((name, tuple(batch[place].tokens.tolist())) for place, name in named if isinstance(name, str))
