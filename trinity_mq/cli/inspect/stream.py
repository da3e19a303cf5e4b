"""Reads the experiences on a run's ``ready`` stream without consuming them: up to its present end, or as they come."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trinity_agents.trainer.decisions import Chunk, Decider, Decision
from trinity_agents.trainer.sources.last_batch import LastBatch
from trinity_mq.bus import Bus, BusUnavailable, Consumer, Delivery, StreamCut, Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.cli.errors import CommandError
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import BatchReady, DecodeError, Mark, RunEnd, decode_any
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, envelope
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, patiently, resolve

MARK_SECONDS = 10.0
"""Seconds until our mark is confirmed; without it the end of the stream is assumed where it is quiet."""
QUIET_SECONDS = 3.0
STUCK_SECONDS = 60.0
"""Seconds without a message before our mark, on a usable bus."""
STORE_SECONDS = 5.0
REMEMBERED = 10_000
"""Batches of which a reader that follows a stream knows that they have come: a set that comes again comes soon."""


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
    """Reads the stream, from its beginning to its present end or on and on.

    Args:
        bus: A connected bus.
        topology: The run's names.
        choice: The filter; other batches are not even decoded.
        store: Holds large bodies.
        take: Called in a thread with the matching experiences of each batch, in the order of the stream; True ends the
            reading.
        since: Batches before this one are left out. None: none.
        note: Called with each remark at once. None: they are kept in the summary.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        choice: Choice,
        store: BlobStore | None,
        take: Callable[[Sequence[ExperienceBatch]], bool],
        *,
        since: int | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._bus, self._topology, self._choice, self._store, self._take = bus, topology, choice, store, take
        self._since = since
        self._decider = Decider()
        self._open: dict[str, str] = {}
        """Batches by ticket, of which chunks have come and no decision."""
        self._nonce = self._end_nonce = uuid.uuid4().hex
        self._last = LastBatch()
        self._is_following = self._has_caught_up = False
        self._come: collections.deque[str] = collections.deque()
        """Tickets that were decided, as far as they are remembered."""
        self.summary = StreamSummary()
        self._note = note or self.summary.notes.append

    async def read(self) -> StreamSummary:
        """Read from the beginning to the present end, and return what was seen.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        quiet = await self._mark()
        offset: int | None = 0
        while offset is not None:
            offset = await self._from(offset, quiet)
        self.summary.incomplete = list(dict.fromkeys(self._open.values()))
        if self.summary.foreign:
            self._note(f"{self.summary.foreign} messages of earlier runs of this name are left out")
        return self.summary

    async def follow(self, offset: int | None) -> StreamSummary:
        """Read on and on, over reconnects, until all batches of the run have come, or up to the mark of :meth:`end`.
        Memory is that of the batches that are incomplete.

        Args:
            offset: First position. None: what is published from now on.

        Raises:
            CommandError: The run has no such stream on this broker.
        """
        await self._check()
        self._is_following, self._end_nonce = True, uuid.uuid4().hex
        if offset is None:
            self._has_caught_up = True
        else:
            await self._mark()
        while (further := await self._from(offset, None)) is not None:
            offset = further
            self._last.cut()
        return self.summary

    async def end(self) -> None:
        """Have :meth:`follow` end behind what is on the stream now.

        Raises:
            BusUnavailable: The broker takes no messages.
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
        """Mark the stream's end; return the seconds of silence after which it can be no further."""
        mark = envelope(Mark(nonce=self._nonce), message_id=f"mark-{self._nonce}")
        try:
            if await self._bus.publish(self._topology.exchange("ready"), "mark", mark, timeout=MARK_SECONDS):
                return STUCK_SECONDS
        except BusUnavailable as error:
            self._note(f"the broker takes no messages now ({error}): the end of the stream is a guess")
        return QUIET_SECONDS

    async def _from(self, offset: int | None, quiet: float | None) -> int | None:
        """Read from ``offset`` on, up to the mark, or ``quiet`` seconds of silence; return where to go on if the stream
        begins later than that.
        """
        stream = dataclasses.replace(self._topology.ready, redeclare=False)  # looking must not make it
        first = offset is not None
        async with await self._bus.consume(stream, offset=offset) as subscription:
            try:
                while (delivery := await self._next(subscription, quiet)) is not None:
                    if first and delivery.offset:
                        self._note(
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
            return await self._ready(message, delivery.offset) or self._all_have_come
        if isinstance(message, RunEnd):
            self._last.run_ends(message.batches)
            return self._all_have_come
        if isinstance(message, Mark) and message.nonce == self._nonce:
            self._has_caught_up = True
            return self._all_have_come or not self._is_following
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
    def _all_have_come(self) -> bool:
        """Note that the run has ended. A run may have been extended after an end that is on its stream."""
        return self._is_following and self._has_caught_up and self._last.has_come

    def _settle(self, ready: BatchReady) -> None:
        """Note a batch that was decided; who follows a stream does not remember all of it."""
        batches, batch = self.summary.batches, str(ready.batch)
        if self._is_following:
            self._come.append(ready.ticket)
            if len(self._come) > REMEMBERED:
                self._decider.forget(self._come.popleft())
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
                self._open.pop(ready.ticket, None)  # run again, it has failed again
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
            why = f": {ready.reason}" if ready.reason else ""
            self._note(f"batch {ready.batch} has no experiences, it is {ready.state}{why}")
        found = [batch for n, chunk in enumerate(decision.chunks) if (batch := await self._decoded(decision, n, chunk))]
        return await asyncio.to_thread(self._take, found)  # it prints, and whoever reads that may be slow

    async def _decoded(self, decision: Decision, n: int, chunk: Chunk) -> ExperienceBatch | None:
        try:
            if chunk.content_type == REFERENCE:
                body = await patiently(resolve, self._store, chunk.body, chunk.content_type, seconds=STORE_SECONDS)
            else:
                body = chunk.body
            whole = await asyncio.to_thread(lambda: ExperienceBatch.decode(body).settle())
        except (DecodeError, StoreUnavailable) as error:
            self._note(f"chunk {n} of batch {decision.batch} cannot be read: {error}")
            return None
        self.summary.experiences += len(whole)
        return self._choice.of(whole)
