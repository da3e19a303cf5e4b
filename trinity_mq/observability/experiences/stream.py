"""Reads the experiences on a run's ``ready`` stream without consuming them: up to the current end, or as they
arrive.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trinity_agents.trainer.decisions import TicketDecider, TicketDecision
from trinity_agents.trainer.sources.last_batch import LastBatch
from trinity_mq.bus import Bus, BusUnavailable, Delivery, StreamCut, Topology
from trinity_mq.errors import CommandError
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, RunEnd
from trinity_mq.runtime.deliveries import new_mark
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable
from trinity_mq.transport.ready_stream import SILENCE_SECONDS, Chunk, ReadyStream, content_of, decode_in_thread

MARK_SECONDS = 10.0
"""Timeout in seconds for publishing our end mark. If it is not confirmed, a quiet stream is assumed to be at its
end.
"""
QUIET_SECONDS = 3.0
STORE_SECONDS = 5.0
REMEMBERED = 10_000
"""Number of decided batches that a following reader remembers to recognize redelivered sets, which arrive soon."""


@dataclass(frozen=True)
class ExperienceFilter:
    """A filter of experiences by id. None matches any id. Ids are compared as strings."""

    batch: str | None = None
    task: str | None = None
    run: str | None = None
    step: str | None = None

    def __str__(self) -> str:
        conditions = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in conditions.items())

    def of(self, experiences: ExperienceBatch) -> ExperienceBatch:
        """Return the matching experiences."""
        matches: set[int] = set(range(len(experiences)))
        for name, value in dataclasses.asdict(self).items():
            if value is not None:
                values = experiences.values(f"eid.{name}")
                matches = {index for index in matches if str(values[index]) == value}
        return experiences.select(sorted(matches))


@dataclass
class StreamSummary:
    """Summary of the content read from a stream."""

    batches: list[str] = field(default_factory=list)
    """Batches whose chunk set is complete, with or without experiences. A following reader keeps only the latest."""
    experiences: int = 0
    """Number of experiences in decoded batches."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user. Empty if the reader passes remarks to its ``note``."""
    foreign: int = 0
    """Number of messages from other runs of the same name. They are skipped if the bus knows the run's id."""
    incomplete: list[str] = field(default_factory=list)
    """Batches with only part of their chunks on the stream."""


class ReadyReader:
    """Reads the ``ready`` stream of a run, up to its current end or continuously.

    Args:
        bus: A connected bus.
        topology: The run's names.
        choice: The filter. Batches that it excludes by batch id are not decoded.
        store: The blob store of large bodies.
        take: Called in a thread with the matching experiences of each batch, in stream order. Reading stops when it
            returns True.
        since: First batch to read. Earlier batches are skipped. None: skip no batch.
        note: Called immediately with each remark. None: remarks are stored in the summary.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        choice: ExperienceFilter,
        store: BlobStore | None,
        take: Callable[[Sequence[ExperienceBatch]], bool],
        *,
        since: int | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._bus, self._run, self._choice, self._store, self._take = bus, topology.run, choice, store, take
        self._stream = ReadyStream(bus, topology)
        self._since = since
        self._decider = TicketDecider()
        self._mark, self._end_mark = new_mark(), new_mark()
        """Marks of the present end, and of the end of :meth:`follow`."""
        self._last = LastBatch()
        self._is_following = self._has_caught_up = False
        self._decided_tickets: collections.deque[str] = collections.deque()
        """The most recently decided tickets, at most ``REMEMBERED``."""
        self.summary = StreamSummary()
        self._note = note or self.summary.notes.append

    async def read(self) -> StreamSummary:
        """Read the stream from its beginning to its current end, or until ``take`` returns True. Return a summary.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        quiet = await self._put_mark()
        offset: int | None = 0
        while offset is not None:
            offset = await self._read_from(offset, quiet)
        self.summary.incomplete = list(dict.fromkeys(str(chunk.batch) for chunk in self._decider.incomplete))
        if self.summary.foreign:
            self._note(f"{self.summary.foreign} messages of earlier runs of this name are left out")
        return self.summary

    async def follow(self, offset: int | None) -> StreamSummary:
        """Read continuously, across reconnects, until all batches of the run have arrived, up to the mark of
        :meth:`end`, or until ``take`` returns True. Only incomplete batches are kept in memory.

        Args:
            offset: First stream offset. None: only messages published from now on.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        self._is_following = True
        if offset is None:
            self._has_caught_up = True
        else:
            await self._put_mark()
        while (further := await self._read_from(offset, None)) is not None:
            offset = further
            self._last.cut()
        return self.summary

    async def end(self) -> None:
        """Publish a mark at which :meth:`follow` stops, after all messages already on the stream.

        Raises:
            BusUnavailable: The broker does not accept messages.
        """
        await self._stream.put_mark(self._end_mark, timeout=MARK_SECONDS)

    async def _check(self) -> None:
        if not await self._stream.exists():
            raise CommandError(
                f"run {self._run!r} has no stream of experiences on this broker: was it ever started there, "
                "or was it cleaned away?"
            )

    async def _put_mark(self) -> float:
        """Mark the stream's end. Return the seconds of silence after which the end counts as reached."""
        try:
            if await self._stream.put_mark(self._mark, timeout=MARK_SECONDS):
                return SILENCE_SECONDS
        except BusUnavailable as error:
            self._note(f"the broker takes no messages now ({error}): the end of the stream is a guess")
        return QUIET_SECONDS

    async def _read_from(self, offset: int | None, quiet: float | None) -> int | None:
        """Read from ``offset`` to the last wanted delivery, or to ``quiet`` seconds of silence (None:
        without limit). If retention cut the stream, return the offset at which to resume, else None.
        """
        is_first = offset is not None
        async with contextlib.aclosing(self._stream.read(offset, silence=lambda: quiet)) as deliveries:
            try:
                async for delivery in deliveries:
                    if is_first and delivery.offset:
                        self._note(
                            f"the stream begins at offset {delivery.offset}: older messages were removed by its "
                            "retention (broker.ready_max_bytes)"
                        )
                    is_first = False
                    if self._bus.is_foreign(delivery):
                        self.summary.foreign += 1
                    elif await self._is_last(delivery):
                        return None
            except StreamCut as error:
                return error.got
        if quiet == SILENCE_SECONDS:
            self._note(f"the end of the stream was not reached: nothing came for {quiet:g} s")
        return None

    async def _is_last(self, delivery: Delivery) -> bool:
        """Process a delivery; return whether it is the last delivery to read."""
        assert delivery.offset is not None
        try:
            content = content_of(delivery)
        except DecodeError as error:
            self._note(f"offset {delivery.offset} holds a message that does not decode: {error}")
            return False
        if isinstance(content, Chunk):
            if self._is_wanted(content.batch):
                self._decider.chunk(content)
            return False
        if isinstance(content, BatchReady):
            if isinstance(content.batch, int):
                self._last.batch(content.batch)
            return await self._ready(content, delivery.offset) or self._all_batches_arrived
        if isinstance(content, RunEnd):
            self._last.set_batch_count(content.batches)
            return self._all_batches_arrived
        if delivery.message_id == self._mark.message_id:
            self._has_caught_up = True
            return self._all_batches_arrived or not self._is_following
        return delivery.message_id == self._end_mark.message_id

    def _is_wanted(self, batch: object) -> bool:
        if self._since is not None and isinstance(batch, int) and batch < self._since:
            return False
        return self._choice.batch is None or str(batch) == self._choice.batch

    @property
    def _all_batches_arrived(self) -> bool:
        """True if a following reader has caught up and every batch of the run has arrived. Catching up comes first
        because a run may be extended after an end that is already on its stream.
        """
        return self._is_following and self._has_caught_up and self._last.is_complete

    def _settle(self, ready: BatchReady) -> None:
        """Record a decided batch. A following reader remembers only the latest, so that its memory stays bounded."""
        batches, batch = self.summary.batches, str(ready.batch)
        if self._is_following:
            self._decided_tickets.append(ready.ticket)
            if len(self._decided_tickets) > REMEMBERED:
                self._decider.forget(self._decided_tickets.popleft())
            batches[:] = [batch]
        elif batch not in batches:
            batches.append(batch)

    async def _ready(self, ready: BatchReady, offset: int) -> bool:
        if not self._is_wanted(ready.batch):
            if ready.ticket not in self._decider.consumed:
                self._decider.consumed[ready.ticket] = 0
                self._settle(ready)
            return False
        decision = self._decider.ready(ready, offset)
        if decision is None:
            if ready.ticket not in self._decider.failed and ready.ticket not in self._decider.consumed:
                self._note(
                    f"a set of batch {ready.batch} is not whole: some of its {ready.chunks} chunks lie before the "
                    "beginning of the stream"
                )
            return False
        self._decider.consume(decision)
        self._settle(ready)
        if ready.state != "ready":
            reason = f": {ready.reason}" if ready.reason else ""
            self._note(f"batch {ready.batch} has no experiences, it is {ready.state}{reason}")
        chunks = [
            batch for n, chunk in enumerate(decision.chunks) if (batch := await self._decoded(decision, n, chunk))
        ]
        return await asyncio.to_thread(self._take, chunks)  # printing may block on a slow reader of our output

    async def _decoded(self, decision: TicketDecision, n: int, chunk: Chunk) -> ExperienceBatch | None:
        try:
            whole = await decode_in_thread([chunk], self._store, seconds=STORE_SECONDS)
        except (DecodeError, StoreUnavailable) as error:
            self._note(f"chunk {n} of batch {decision.batch} cannot be read: {error}")
            return None
        self.summary.experiences += len(whole)
        return self._choice.of(whole)
