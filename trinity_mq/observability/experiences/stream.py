"""Reads the experiences on a run's ``ready`` stream without consuming them: up to the current end, or as they
arrive.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trinity_agents.trainer.decisions import Chunk, TicketDecider, TicketDecision
from trinity_agents.trainer.sources.last_batch import LastBatch
from trinity_mq.bus import Bus, BusUnavailable, Consumer, Delivery, StreamCut, Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.errors import CommandError
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, Mark, RunEnd, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, envelope
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, resolve_body, run_with_store_retries

MARK_SECONDS = 10.0
"""Timeout in seconds for publishing our end mark. If it is not confirmed, a quiet stream is assumed to be at its
end.
"""
QUIET_SECONDS = 3.0
STUCK_SECONDS = 60.0
"""Seconds without a message, on a usable bus, after which waiting for our end mark stops."""
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
    """Remarks for the user."""
    foreign: int = 0
    """Number of messages from other runs of the same name. They are skipped if the bus knows the run's id."""
    incomplete: list[str] = field(default_factory=list)
    """Batches with only part of their chunks on the stream."""


class ReadyReader:
    """Reads the stream, up to its current end or continuously.

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
        self._bus, self._topology, self._choice, self._store, self._take = bus, topology, choice, store, take
        self._since = since
        self._decider = TicketDecider()
        self._open: dict[str, str] = {}
        """Batch by ticket, for batches with chunks but no decision yet."""
        self._nonce = self._end_nonce = uuid.uuid4().hex
        self._last = LastBatch()
        self._is_following = self._has_caught_up = False
        self._decided_tickets: collections.deque[str] = collections.deque()
        """The most recently decided tickets, at most ``REMEMBERED``."""
        self.summary = StreamSummary()
        self._note = note or self.summary.notes.append

    async def read(self) -> StreamSummary:
        """Read from the beginning to the current end and return a summary.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        quiet = await self._mark()
        offset: int | None = 0
        while offset is not None:
            offset = await self._read_from(offset, quiet)
        self.summary.incomplete = list(dict.fromkeys(self._open.values()))
        if self.summary.foreign:
            self._note(f"{self.summary.foreign} messages of earlier runs of this name are left out")
        return self.summary

    async def follow(self, offset: int | None) -> StreamSummary:
        """Read continuously, across reconnects, until all batches of the run have arrived, or up to the mark of
        :meth:`end`. Only incomplete batches are kept in memory.

        Args:
            offset: First stream offset. None: only messages published from now on.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        self._is_following, self._end_nonce = True, uuid.uuid4().hex
        if offset is None:
            self._has_caught_up = True
        else:
            await self._mark()
        while (further := await self._read_from(offset, None)) is not None:
            offset = further
            self._last.cut()
        return self.summary

    async def end(self) -> None:
        """Publish a mark at which :meth:`follow` stops, after all messages already on the stream.

        Raises:
            BusUnavailable: The broker does not accept messages.
        """
        mark = envelope(Mark(nonce=self._end_nonce), message_id=f"mark-{self._end_nonce}")
        await self._bus.publish(self._topology.exchange("ready"), "mark", mark, timeout=MARK_SECONDS)

    async def _check(self) -> None:
        if await self._bus.depth(self._topology.ready.name) is None:
            raise CommandError(
                f"run {self._topology.run!r} has no stream of experiences on this broker: was it ever started there, "
                "or was it cleaned away?"
            )

    async def _mark(self) -> float:
        """Mark the stream's end. Return the seconds of silence after which the end counts as reached."""
        mark = envelope(Mark(nonce=self._nonce), message_id=f"mark-{self._nonce}")
        try:
            if await self._bus.publish(self._topology.exchange("ready"), "mark", mark, timeout=MARK_SECONDS):
                return STUCK_SECONDS
        except BusUnavailable as error:
            self._note(f"the broker takes no messages now ({error}): the end of the stream is a guess")
        return QUIET_SECONDS

    async def _read_from(self, offset: int | None, quiet: float | None) -> int | None:
        """Read from ``offset`` to the mark or to ``quiet`` seconds of silence. If retention cut the stream, return the
        offset at which to resume, else None.
        """
        stream = dataclasses.replace(self._topology.ready, redeclare=False)  # reading must not create the stream
        is_first = offset is not None
        async with await self._bus.consume(stream, offset=offset) as subscription:
            try:
                while (delivery := await self._next(subscription, quiet)) is not None:
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
        if quiet == STUCK_SECONDS:
            self._note(f"the end of the stream was not reached: nothing came for {quiet:g} s")
        return None

    async def _next(self, subscription: Consumer, quiet: float | None) -> Delivery | None:
        return await (anext(subscription, None) if quiet is None else next_or_quiet(self._bus, subscription, quiet))

    async def _is_last(self, delivery: Delivery) -> bool:
        assert delivery.offset is not None
        if delivery.content_type in {EXPERIENCES, REFERENCE}:
            self._chunk(delivery, delivery.offset)
            return False
        try:
            message = decode_any(delivery.body, delivery.content_type)
        except DecodeError as error:
            self._note(f"offset {delivery.offset} holds a message that does not decode: {error}")
            return False
        if isinstance(message, BatchReady):
            if isinstance(message.batch, int):
                self._last.batch(message.batch)
            return await self._ready(message, delivery.offset) or self._all_batches_arrived
        if isinstance(message, RunEnd):
            self._last.set_batch_count(message.batches)
            return self._all_batches_arrived
        if isinstance(message, Mark) and message.nonce == self._nonce:
            self._has_caught_up = True
            return self._all_batches_arrived or not self._is_following
        return isinstance(message, Mark) and message.nonce == self._end_nonce

    def _chunk(self, delivery: Delivery, offset: int) -> None:
        ticket, op, n, batch = (delivery.headers.get(name) for name in ("ticket", "op", "n", "batch"))
        if not (isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int)):
            self._note(f"offset {offset} holds a chunk without the headers ticket, op and n")
        elif self._is_wanted(batch):
            if not self._decider.is_settled(ticket):
                self._open.setdefault(ticket, str(batch))
            self._decider.chunk(ticket, op, n, Chunk(delivery.body, delivery.content_type), offset)

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
            if ready.ticket in self._decider.failed:
                self._open.pop(ready.ticket, None)  # the retried batch failed again
            elif ready.ticket not in self._decider.consumed:
                self._note(
                    f"a set of batch {ready.batch} is not whole: some of its {ready.chunks} chunks lie before the "
                    "beginning of the stream"
                )
            return False
        self._decider.consume(decision)
        self._open.pop(ready.ticket, None)
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
            if chunk.content_type == REFERENCE:
                body = await run_with_store_retries(
                    resolve_body, self._store, chunk.body, chunk.content_type, seconds=STORE_SECONDS
                )
            else:
                body = chunk.body
            whole = await asyncio.to_thread(lambda: ExperienceBatch.decode(body).settle())
        except (DecodeError, StoreUnavailable) as error:
            self._note(f"chunk {n} of batch {decision.batch} cannot be read: {error}")
            return None
        self.summary.experiences += len(whole)
        return self._choice.of(whole)
