"""Source of train batches from the stream of processed batches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_agents.trainer.decisions import MAX_STARTS, NONE_SETTLED, TicketDecider, TicketDecision
from trinity_agents.trainer.sources.base import ExperiencesLost, TrainBatch
from trinity_mq.bus import Bus, Delivery, StreamCut, Topology
from trinity_mq.experience import DecodeError, ExperienceBatch
from trinity_mq.messages import BatchReady, RunEnd
from trinity_mq.runtime.deliveries import (
    acknowledge_foreign,
    dead_letter,
    decode_or_dead_letter,
    handle_or_set_aside,
    new_mark,
)
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.trace import record, span
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable
from trinity_mq.transport.ready_stream import (
    CHUNK_TYPES,
    SILENCE_SECONDS,
    Chunk,
    ReadyStream,
    chunk_of,
    decode_in_thread,
)


@dataclass(frozen=True)
class TapRules:
    """Rules for reading the stream of another run: that run is not changed, and unreadable messages only fail their
    batches.
    """

    bus: Bus
    """Bus of the run that reads, which gets the dead letters for bodies that do not decode."""
    topology: Topology
    """Names of the queues and exchanges of the run that reads."""
    came: Callable[[BatchReady, int], bool]
    """Called with each BatchReady and its offset; returns False for a batch that must be skipped."""
    ends: Callable[[RunEnd], None]
    """Called with the other run's RunEnd."""
    cut: Callable[[StreamCut], None]
    """Called when retention has removed the next messages; the reader continues after the gap."""


REMEMBERED = 1000
"""Number of latest batches whose tickets are remembered individually; earlier batches are known as consumed by their
number."""


class StreamSource:
    """Processed batches from the ``ready`` stream: in batch order (style ``fixed``), or in the order of decisions.

    The stream is read without delay, so that all decisions are known. The bodies of batches beyond the next two train
    steps are released, and read from the stream again when they are needed.
    """

    def __init__(
        self,
        bus: Bus,
        topology: Topology,
        by: str,
        store: BlobStore | None = None,
        *,
        in_batch_order: bool = True,
        batches_per_step: int = 1,
        starts: Callable[[str], int] = lambda _: 0,
        tapped: TapRules | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        self._remembered = remembered
        self.pinned: Callable[[], Collection[str]] = tuple
        """Returns consumed tickets that are remembered at any age."""
        self._bus, self._topology, self._by, self._store = bus, topology, by, store
        self._tapped = tapped
        self._stream = ReadyStream(bus, topology, redeclare=tapped is None)
        self._mark = new_mark()
        self._in_batch_order, self._batches_per_step = in_batch_order, batches_per_step
        self.starts = starts
        """Returns the number of crashed starts for a key of :mod:`trinity_agents.trainer.decisions`."""
        self.has_company = batches_per_step > 1
        """True if a train step combines several batches, or batches with experiences of other sources. A crash then
        does not show which of them caused it.
        """
        self._decider = TicketDecider(starts=starts, max_starts=self._max_starts)
        self._handed_out: list[TicketDecision] = []
        """Decisions of the batches that the last call of :meth:`next` returned."""
        self._consumed_batches = 0
        """Number of the batch up to which all batches are consumed."""
        self._ahead: set[int] = set()
        """Numbers of later batches that are consumed."""
        self._marked = False
        """True once our own mark was read: this is the stream of the checkpoint, and all its messages up to our start
        were read."""
        self._begins = 0
        """Offset at which the run begins, 0 until the explorer has reported it."""
        self.changed = Notifier()
        self.bytes_since_save = 0

    @property
    def run_id(self) -> str | None:
        """Id of the run that owns the stream, None while unknown."""
        return self._bus.run_id

    @property
    def ended(self) -> int | None:
        """Number of batches of the run, None until its RunEnd was read, and again once a later batch shows that the run
        was extended.
        """
        return self._decider.ended

    @property
    def waiting(self) -> list[str]:
        """Tickets that have arrived and are not consumed."""
        return self._decider.waiting

    @property
    def unused(self) -> list[int]:
        """Numbers of batches that were repaired too late: no later batch was left to train on with them."""
        return self._decider.unused

    def available(self) -> bool:
        """Return whether all batches of the next train step have arrived, and our own mark was read."""
        return self._marked and bool(self._next_decisions())

    def _next_decisions(self) -> list[TicketDecision]:
        """Return the decisions of the next train step, an empty list while a decision is missing.

        The last step of a run takes the remaining batches. A batch that is tried alone splits its step.
        """
        done = self._consumed_batches + len(self._ahead)
        count = self._batches_per_step - done % self._batches_per_step
        if self._decider.ended is not None:
            # at least 1, because a missing batch that was counted as consumed may have arrived
            count = min(count, max(1, self._decider.ended - done))
        if not self._in_batch_order:
            arrived = self._decider.first(count)
        else:
            candidates = (self._decider.peek(self._consumed_batches + 1 + number) for number in range(count))
            arrived = list(itertools.takewhile(lambda decision: decision is not None, candidates))  # type: ignore[arg-type]
        together = list(itertools.takewhile(lambda decision: not self._is_alone(decision), arrived))
        if len(together) < len(arrived):
            return together or arrived[:1]
        return arrived if len(arrived) == count else []

    def _max_starts(self) -> int:
        return MAX_STARTS + self.has_company

    def _is_alone(self, decision: TicketDecision) -> bool:
        return self.has_company and self.starts(decision.ready.ticket) >= MAX_STARTS

    async def next(self) -> TrainBatch:
        """Wait for all batches of the next train step and return the first batch. Its field ``others`` holds the other
        batches of the step and the repaired batches.

        Chunks are decoded on a thread; an undecodable chunk fails its batch.

        Raises:
            RestartRequested: A chunk is in the blob store, and the store does not answer; a restart keeps the batch.
        """
        await self.changed.until(self.available)
        self._handed_out = decisions = self._next_decisions()
        batch, *others = [await self._read(decision) for decision in decisions]
        for decision in self._decider.repaired(decisions):
            others.append(repaired := await self._read(decision))
            repaired.is_repaired = True
        batch.others = others
        return batch

    async def _read(self, decision: TicketDecision) -> TrainBatch:
        ready = decision.ready
        batch = TrainBatch(
            decision.batch,
            ready.ticket,
            ready.op,
            ready.state,
            metrics=dict(ready.metrics),
            reason=ready.reason,
            filtered_groups=ready.filtered_groups,
            offsets=[chunk.offset for chunk in decision.chunks],
            offset=decision.offset,
            announced=ready.experiences,
            max_starts=self._max_starts(),
            is_alone=self._is_alone(decision),
        )
        try:
            await self._fetch([chunk for chunk in decision.chunks if not chunk.body])
        except FatalError as error:
            if self._tapped is None:
                raise
            batch.state, batch.reason = "gone", str(error)
            return batch
        try:
            with span("decode chunks", decision.batch, threads=True):
                batch.experiences = await decode_in_thread(decision.chunks, self._store)
        except DecodeError as error:
            batch.state, batch.reason = "failed", f"a chunk does not decode: {error}"
        except StoreUnavailable as error:
            raise RestartRequested(f"batch {decision.batch} cannot be read now: {error}") from error
        if batch.state == "ready" and not batch.experiences:
            batch.state = "empty"
        return batch

    def _is_near(self, decision: TicketDecision) -> bool:
        """Return whether a batch belongs to one of the next two train steps."""
        count = 2 * self._batches_per_step
        if self._in_batch_order:
            return decision.batch <= self._consumed_batches + count
        return decision in self._decider.first(count)

    async def _fetch(self, released: Sequence[Chunk]) -> None:
        """Read the bodies of released chunks from the stream again.

        Raises:
            FatalError: The stream does not hold the chunks any more.
        """
        try:
            messages = await self._stream.at([chunk.offset for chunk in released])
        except StreamCut as error:
            raise _cut_off(error) from error
        for chunk in released:
            if chunk.offset not in messages:
                raise FatalError(
                    f"the ready stream held a message at offset {chunk.offset} that is missing now: the data of the "
                    "stream was lost. Restore it, or start over with --fresh"
                )
            chunk.body = messages[chunk.offset].body

    async def read_again(self, offsets: Sequence[int]) -> ExperienceBatch:
        """Return the experiences of a consumed batch, whose chunks lie at ``offsets``.

        Raises:
            ExperiencesLost: The chunks cannot be read any more.
            RestartRequested: The chunks are in the blob store, and the store does not answer.
        """
        try:
            messages = await self._stream.at(offsets)
            if missing := set(offsets) - set(messages):
                raise ExperiencesLost(f"nothing is at offset {min(missing)} of the ready stream")
            return await decode_in_thread([messages[offset] for offset in offsets], self._store)
        except StreamCut as error:
            raise ExperiencesLost(
                f"the ready stream begins at offset {error.got}, and {error.asked} is needed"
            ) from error
        except DecodeError as error:
            raise ExperiencesLost(f"a chunk does not decode: {error}") from error
        except StoreUnavailable as error:
            raise RestartRequested(f"a batch that is replayed cannot be read now: {error}") from error

    def consumed(self) -> None:
        """Advance past the batches that :meth:`next` returned last, including repaired batches."""
        decisions, self._handed_out = self._handed_out, []
        for decision in (*self._decider.repaired(decisions), *decisions):
            self._decider.consume(decision)
        self._advance({decision.batch for decision in decisions})

    def _advance(self, consumed: set[int]) -> None:
        self._ahead |= {batch for batch in consumed if batch > self._consumed_batches}
        if self._tapped is not None and len(self._ahead) > self._remembered:
            # Missing earlier batches will not arrive: the reader began after them, or retention has removed them.
            self._consumed_batches = min(self._ahead) - 1
        while self._consumed_batches + 1 in self._ahead:
            self._consumed_batches += 1
            self._ahead.discard(self._consumed_batches)
        if (through := self._consumed_batches - self._remembered) > 0:
            self._decider.settle(through, self._consumed_batches, self.pinned)

    @property
    def has_caught_up(self) -> bool:
        """Whether all messages that were on the stream at our start were read."""
        return self._marked

    def state(self) -> dict[str, Any]:
        """Return the consumed tickets and the offset from which to resume."""
        return {
            "consumed": dict(self._decider.consumed),
            "failed": sorted(self._decider.failed),
            "batches": self._consumed_batches,
            "offset": self._decider.resume_offset(),
            "ended": self._decider.ended,
            **({"ahead": sorted(self._ahead)} if self._ahead else {}),
            **({"settled": self._decider.settled} if self._decider.settled != NONE_SETTLED else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a ``state`` that :meth:`state` returned."""
        consumed = state["consumed"]
        if not isinstance(consumed, dict):  # format of release 0.1.0: a list of all tickets without batch numbers
            consumed = dict.fromkeys(consumed, max(state["batches"], *state.get("ahead", ()), 0))
        settled = state.get("settled", NONE_SETTLED)
        failed = state.get("failed", ())
        self._decider = TicketDecider(consumed, state["offset"], failed, self.starts, settled, self._max_starts)
        self._decider.ended = state.get("ended")
        self._consumed_batches, self._ahead = state["batches"], set()
        self._advance(set(state.get("ahead", ())))

    def run_begins(self, offset: int) -> None:
        """Skip all messages before ``offset``, which belong to an earlier run of the same name."""
        self._begins = offset

    async def run(self) -> None:
        """Read the stream until cancelled.

        Raises:
            FatalError: The stream does not hold what the checkpoint needs.
        """
        while True:
            offset = max(self._decider.next_offset, self._begins)
            self._decider.other(offset - 1)
            try:
                await self._read_from(offset)
            except StreamCut as error:
                if self._tapped is not None:
                    self._tapped.cut(error)
                    self._decider.other(error.got - 1)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SILENCE_SECONDS):
                        await self._know_run()
                if self._begins <= offset:
                    raise _cut_off(error) from error

    async def _read_from(self, offset: int) -> None:
        """Read the stream from ``offset``; return if the run turns out to begin at a later offset.

        Raises:
            FatalError: The stream is shorter than ``offset``.
            StreamCut: Retention has removed the message at ``offset``.
        """
        messages = self._stream.read(offset, mark=self._mark, silence=lambda: None if self._marked else SILENCE_SECONDS)
        async with contextlib.aclosing(messages):
            async for delivery in messages:
                await self._take(delivery)
                if self._begins > self._decider.next_offset:
                    return
        if self._marked:
            raise RuntimeError(
                "the consumer of the ready stream was closed while the trainer reads; restart the trainer"
            )
        raise FatalError(
            f"nothing was found on the ready stream from offset {offset} on, not even our own mark: the stream is "
            "shorter than the checkpoint says, so this is not the broker (or not the data) it was made with. Restore "
            "it, or start over with --fresh"
        )

    async def _know_run(self) -> None:
        """Wait until this trainer's run is known, from its checkpoint or from the explorer's heartbeats."""
        await self.changed.until(lambda: self._bus.run_id is not None)

    async def _take(self, delivery: Delivery) -> None:
        """Process one delivery, or dead-letter it if that fails."""
        offset = delivery.offset
        assert offset is not None

        async def pass_over(_: str) -> None:
            self._decider.other(offset)

        if delivery.run_id is not None:
            if self._tapped is not None and self._bus.run_id is None:
                self._bus.run_id = delivery.run_id
            await self._know_run()
        work = functools.partial(self._take_in, delivery, offset)
        await handle_or_set_aside(*self._dead_letters, delivery, self._by, work, decide=pass_over)
        self.changed.notify()

    async def _take_in(self, delivery: Delivery, offset: int) -> None:
        if offset < self._begins or await acknowledge_foreign(self._bus, delivery):
            self._decider.other(offset)
        elif delivery.content_type in CHUNK_TYPES:
            self.bytes_since_save += len(delivery.body)
            if (chunk := chunk_of(delivery)) is not None:
                self._decider.chunk(chunk)
            else:
                self._decider.other(offset)
                reason = "a chunk needs the headers ticket, op and n"
                await dead_letter(*self._dead_letters, delivery, reason, self._by)
        else:
            message = await decode_or_dead_letter(*self._dead_letters, delivery, self._by)
            if isinstance(message, BatchReady):
                now = time.monotonic()
                record("batch is here", now, now, batch=message.batch, wait=True)
                decision = self._decider.ready(message, offset)
                if self._tapped is not None and not self._tapped.came(message, offset) and decision is not None:
                    self._decider.consume(decision)
                elif decision is not None and not self._is_near(decision):
                    for chunk in decision.chunks:
                        chunk.body = b""
            else:
                self._decider.other(offset)
                if delivery.message_id == self._mark.message_id:
                    self._marked = True
                if isinstance(message, RunEnd):
                    self._decider.ended = message.batches
                    if self._tapped is not None:
                        self._tapped.ends(message)

    @property
    def _dead_letters(self) -> tuple[Bus, Topology]:
        tapped = self._tapped
        return (self._bus, self._topology) if tapped is None else (tapped.bus, tapped.topology)


def _cut_off(error: StreamCut) -> FatalError:
    return FatalError(
        f"the checkpoint needs the ready stream from offset {error.asked}, but retention has cut it: it begins at "
        f"{error.got}. Raise broker.ready_max_bytes, or start over with --fresh"
    )
