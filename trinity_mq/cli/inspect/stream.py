"""Reads the experiences on a run's ``ready`` stream without consuming them."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trinity_agents.trainer.decisions import Chunk, Decider, Decision
from trinity_mq.bus import Bus, BusUnavailable, Delivery, StreamCut, Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.cli.errors import CommandError
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, Mark, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, envelope
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, patiently, resolve

MARK_SECONDS = 10.0
"""Seconds until our mark is confirmed; without it the end of the stream is assumed where it is quiet."""
QUIET_SECONDS = 3.0
STUCK_SECONDS = 60.0
"""Seconds without a message before our mark, on a usable bus."""
STORE_SECONDS = 5.0


@dataclass(frozen=True)
class Choice:
    """A filter of experiences; None: any. Ids are compared as texts."""

    batch: str | None = None
    task: str | None = None
    run: str | None = None
    step: str | None = None

    def __str__(self) -> str:
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in given.items())

    def of(self, experiences: ExperienceBatch) -> ExperienceBatch:
        """Return the matching experiences."""
        left: set[int] = set(range(len(experiences)))
        for name, wanted in dataclasses.asdict(self).items():
            if wanted is not None:
                values = experiences.values(f"eid.{name}")
                left = {place for place in left if str(values[place]) == wanted}
        return experiences.select(sorted(left))


@dataclass
class StreamSummary:
    """Summary of a stream's content."""

    batches: list[str] = field(default_factory=list)
    """Batches whose chunk set is complete, with or without experiences."""
    experiences: int = 0
    """Number of experiences in batches that were decoded."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user."""
    foreign: int = 0
    """Messages of other runs of this name, which are left out where the bus knows the run's id."""
    incomplete: list[str] = field(default_factory=list)
    """Batches of which only some chunks are on the stream."""


class ReadyReader:
    """Reads the stream from its beginning to its present end.

    Args:
        bus: A connected bus.
        topology: The run's names.
        choice: The filter; other batches are not even decoded.
        store: Holds large bodies.
        take: Called with the matching experiences of each batch, in the order of the stream; True ends the reading.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        choice: Choice,
        store: BlobStore | None,
        take: Callable[[Sequence[ExperienceBatch]], bool],
    ) -> None:
        self._bus, self._topology, self._choice, self._store, self._take = bus, topology, choice, store, take
        self._decider = Decider()
        self._open: dict[str, str] = {}
        """Batches by ticket, of which chunks have come and no decision."""
        self._nonce = uuid.uuid4().hex
        self.summary = StreamSummary()

    async def read(self) -> StreamSummary:
        """Read, and return what was seen.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        if await self._bus.depth(self._topology.ready.name) is None:
            raise CommandError(
                f"run {self._topology.run!r} has no stream of experiences on this broker: was it ever started there, "
                "or was it cleaned away?"
            )
        quiet = await self._mark()
        offset: int | None = 0
        while offset is not None:
            offset = await self._from(offset, quiet)
        self.summary.incomplete = list(dict.fromkeys(self._open.values()))
        if self.summary.foreign:
            self.summary.notes.append(f"{self.summary.foreign} messages of earlier runs of this name are left out")
        return self.summary

    async def _mark(self) -> float:
        """Mark the stream's end; return the seconds of silence after which it can be no further."""
        mark = envelope(Mark(nonce=self._nonce), message_id=f"mark-{self._nonce}")
        try:
            if await self._bus.publish(self._topology.exchange("ready"), "mark", mark, timeout=MARK_SECONDS):
                return STUCK_SECONDS
        except BusUnavailable as error:
            self.summary.notes.append(f"the broker takes no messages now ({error}): the end of the stream is a guess")
        return QUIET_SECONDS

    async def _from(self, offset: int, quiet: float) -> int | None:
        """Read from ``offset`` on; return where to go on if the stream begins later than that."""
        stream = dataclasses.replace(self._topology.ready, redeclare=False)  # looking must not make it
        first = True
        async with await self._bus.consume(stream, offset=offset) as subscription:
            try:
                while (delivery := await next_or_quiet(self._bus, subscription, quiet)) is not None:
                    if first and delivery.offset:
                        self.summary.notes.append(
                            f"the stream begins at offset {delivery.offset}: what came before was cut by its retention "
                            "(broker.ready_max_bytes)"
                        )
                    first = False
                    if self._bus.is_foreign(delivery):
                        self.summary.foreign += 1
                    elif await self._is_last(delivery):
                        return None
            except StreamCut as error:
                return error.got
        if quiet == STUCK_SECONDS:
            self.summary.notes.append(f"the end of the stream was not reached: nothing came for {quiet:g} s")
        return None

    async def _is_last(self, delivery: Delivery) -> bool:
        assert delivery.offset is not None
        if delivery.content_type in {EXPERIENCES, REFERENCE}:
            self._chunk(delivery, delivery.offset)
            return False
        try:
            message = decode_any(delivery.body, delivery.content_type)
        except DecodeError as error:
            self.summary.notes.append(f"offset {delivery.offset} holds a message that does not decode: {error}")
            return False
        if isinstance(message, BatchReady):
            return await self._ready(message, delivery.offset)
        return isinstance(message, Mark) and message.nonce == self._nonce

    def _chunk(self, delivery: Delivery, offset: int) -> None:
        ticket, op, n, batch = (delivery.headers.get(name) for name in ("ticket", "op", "n", "batch"))
        if not (isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int)):
            self.summary.notes.append(f"offset {offset} holds a chunk without the headers ticket, op and n")
        elif self._is_wanted(batch):
            if not self._decider.is_settled(ticket):
                self._open.setdefault(ticket, str(batch))
            self._decider.chunk(ticket, op, n, Chunk(delivery.body, delivery.content_type), offset)

    def _is_wanted(self, batch: object) -> bool:
        return self._choice.batch is None or str(batch) == self._choice.batch

    async def _ready(self, ready: BatchReady, offset: int) -> bool:
        if not self._is_wanted(ready.batch):
            if ready.ticket not in self._decider.consumed:
                self._decider.consumed.add(ready.ticket)
                self.summary.batches.append(str(ready.batch))
            return False
        decision = self._decider.ready(ready, offset)
        if decision is None:
            if ready.ticket in self._decider.failed:
                self._open.pop(ready.ticket, None)  # run again, it has failed again
            elif ready.ticket not in self._decider.consumed:
                self.summary.notes.append(
                    f"a set of batch {ready.batch} is not whole: some of its {ready.chunks} chunks lie before the "
                    "beginning of the stream"
                )
            return False
        self._decider.consume(decision)
        self._open.pop(ready.ticket, None)
        if str(ready.batch) not in self.summary.batches:
            self.summary.batches.append(str(ready.batch))
        if ready.state != "ready":
            why = f": {ready.reason}" if ready.reason else ""
            self.summary.notes.append(f"batch {ready.batch} has no experiences, it is {ready.state}{why}")
        found = [batch for n, chunk in enumerate(decision.chunks) if (batch := await self._decoded(decision, n, chunk))]
        return self._take(found)

    async def _decoded(self, decision: Decision, n: int, chunk: Chunk) -> ExperienceBatch | None:
        try:
            if chunk.content_type == REFERENCE:
                body = await patiently(resolve, self._store, chunk.body, chunk.content_type, seconds=STORE_SECONDS)
            else:
                body = chunk.body
            whole = await asyncio.to_thread(lambda: ExperienceBatch.decode(body).settle())
        except (DecodeError, StoreUnavailable) as error:
            self.summary.notes.append(f"chunk {n} of batch {decision.batch} cannot be read: {error}")
            return None
        self.summary.experiences += len(whole)
        return self._choice.of(whole)
