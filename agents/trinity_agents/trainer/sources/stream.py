"""The source of train batches: the stream of processed batches."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from trinity_agents.trainer.decisions import MAX_STARTS, NONE_SETTLED, Chunk, Decider, Decision
from trinity_agents.trainer.sources.base import LostError, TrainBatch
from trinity_mq.bus import Bus, Delivery, StreamCut, Topology
from trinity_mq.bus.streams import next_or_quiet, read_at
from trinity_mq.experience import DecodeError, ExperienceBatch
from trinity_mq.messages import BatchReady, Mark, RunEnd
from trinity_mq.runtime.deliveries import (
    EXPERIENCES,
    REFERENCE,
    dead_letter,
    decode_or_dead_letter,
    drop_foreign,
    envelope,
    handle_or_set_aside,
)
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.trace import record, span
from trinity_mq.transport.blobs import BlobStore, StoreUnavailable, patiently, resolve

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Tapped:
    """Rules for reading the stream of another run: nothing of that run is changed, and what cannot be read costs only
    its batches.
    """

    bus: Bus
    """Bus of the run that reads: bodies that do not decode go to its dead letters."""
    topology: Topology
    """Names of the run that reads."""
    came: Callable[[BatchReady, int], bool]
    """Called with each BatchReady and its offset; False: the batch is not wanted."""
    ends: Callable[[RunEnd], None]
    """Called when the other run says that it ends."""
    cut: Callable[[StreamCut], None]
    """Called when retention has cut what comes next; the reading goes on behind."""


REMEMBERED = 1000
"""Latest batches whose tickets are remembered one by one; of those before, their numbers say that they are consumed."""
MARK_TIMEOUT = 60.0
"""Seconds on a usable bus without anything new until a missing own mark means: not the stream the checkpoint knows."""


class StreamSource:
    """Processed batches from the ``ready`` stream: in batch order (style fixed), or in the order in which the stream
    decides them.

    The stream is read as fast as it comes, so that all that is on it is known; the bodies of batches beyond the next
    two train steps are released, and read from the stream again when their turn comes.
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
        tapped: Tapped | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        self._remembered = remembered
        self.pinned: Callable[[], Collection[str]] = tuple
        """Returns consumed tickets that are remembered however old they are."""
        self._bus, self._topology, self._by, self._store = bus, topology, by, store
        self._tapped = tapped
        self._stream = topology.ready if tapped is None else replace(topology.ready, redeclare=False)
        self._in_batch_order, self._batches_per_step = in_batch_order, batches_per_step
        self.starts = starts
        """Returns the starts that crashed, by what :mod:`trinity_agents.trainer.decisions` counts them under."""
        self.has_company = batches_per_step > 1
        """Batches are trained on with others, or with what other sources add; it may be those that kill."""
        self._decider = Decider(starts=starts, max_starts=self._max_starts)
        self._handed_out: list[Decision] = []
        """Decisions of the batches that :meth:`next` returned last."""
        self._consumed_batches = 0
        """All batches up to this one are consumed."""
        self._ahead: set[int] = set()
        """Batches beyond that are consumed."""
        self._marked = False
        """Our own mark was read: the stream is the one we know, and we have seen all that was on it at our start."""
        self._begins = 0
        """Offset at which the run begins, once the explorer has told it."""
        self.changed = Notifier()
        self.bytes_since_save = 0

    @property
    def run_id(self) -> str | None:
        """Id of the run whose stream it is, None until it is known."""
        return self._bus.run_id

    @property
    def ended(self) -> int | None:
        """Batches of the run, once the explorer has said so."""
        return self._decider.ended

    @property
    def waiting(self) -> list[str]:
        """Tickets that are here and not consumed."""
        return self._decider.waiting

    @property
    def unused(self) -> list[int]:
        """Batches repaired so late that none came after them to be trained with."""
        return self._decider.unused

    def available(self) -> bool:
        """All batches of the next train step have arrived, and the stream is known to be ours."""
        return self._marked and bool(self._next_decisions())

    def _next_decisions(self) -> list[Decision]:
        """Return the decisions of the next train step, none as long as one of them is missing. The last step of a run
        takes what is left. A batch that is tried alone divides the step that it was part of.
        """
        done = self._consumed_batches + len(self._ahead)
        count = self._batches_per_step - done % self._batches_per_step
        if self._decider.ended is not None:
            count = min(count, max(1, self._decider.ended - done))  # one taken for missing may have come all the same
        if not self._in_batch_order:
            there = self._decider.first(count)
        else:
            found = (self._decider.peek(self._consumed_batches + 1 + number) for number in range(count))
            there = list(itertools.takewhile(lambda decision: decision is not None, found))  # type: ignore[arg-type]
        together = list(itertools.takewhile(lambda decision: not self._is_alone(decision), there))
        if len(together) < len(there):
            return together or there[:1]
        return there if len(there) == count else []

    def _max_starts(self) -> int:
        return MAX_STARTS + self.has_company

    def _is_alone(self, decision: Decision) -> bool:
        return self.has_company and self.starts(decision.ready.ticket) >= MAX_STARTS

    def _repaired(self, decisions: Sequence[Decision]) -> list[Decision]:
        found = {one.ready.ticket: one for decision in decisions for one in self._decider.repaired(decision)}
        return list(found.values())

    async def next(self) -> TrainBatch:
        """Return the next batch with all that belongs to its train step once it is there, decoded on a thread; an
        undecodable chunk fails its batch.

        Raises:
            RestartMe: A chunk lies in the blob store, and that does not answer: no reason to lose the batch.
        """
        await self.changed.until(self.available)
        self._handed_out = decisions = self._next_decisions()
        batch, *co_batched = [await self._read(one) for one in decisions]
        batch.co_batched = co_batched
        batch.repaired = [await self._read(one) for one in self._repaired(decisions)]
        return batch

    async def _read(self, decision: Decision) -> TrainBatch:
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
            is_stored = any(chunk.content_type == REFERENCE for chunk in decision.chunks)
            with span("decode chunks", decision.batch, threads=True):
                batch.experiences = await (patiently if is_stored else asyncio.to_thread)(
                    _decode, decision.chunks, self._store
                )
        except DecodeError as error:
            batch.state, batch.reason = "failed", f"a chunk does not decode: {error}"
        except StoreUnavailable as error:
            raise RestartMe(f"batch {decision.batch} cannot be read now: {error}") from error
        if batch.state == "ready" and not batch.experiences:
            batch.state = "empty"
        return batch

    def _is_near(self, decision: Decision) -> bool:
        """Whether a batch is one of the next two train steps."""
        count = 2 * self._batches_per_step
        if self._in_batch_order:
            return decision.batch <= self._consumed_batches + count
        return decision in self._decider.first(count)

    async def _fetch(self, released: Sequence[Chunk]) -> None:
        """Read the bodies of released chunks from the stream again.

        Raises:
            FatalError: The stream does not hold them any more.
        """
        try:
            found = await read_at(self._bus, self._stream, [chunk.offset for chunk in released], MARK_TIMEOUT)
        except StreamCut as error:
            raise _cut_off(error) from error
        for chunk in released:
            if chunk.offset not in found:
                raise FatalError(
                    f"the ready stream has held a message at offset {chunk.offset}, which is not found again: its data "
                    "was lost. Bring that back, or train anew with --fresh"
                )
            chunk.body = found[chunk.offset].body

    async def read_again(self, offsets: Sequence[int]) -> ExperienceBatch:
        """Return the experiences of a consumed batch, whose chunks lie at ``offsets``.

        Raises:
            LostError: They are not there any more.
            RestartMe: They lie in the blob store, and that does not answer.
        """
        try:
            found = await read_at(self._bus, self._stream, offsets, MARK_TIMEOUT)
            if missing := set(offsets) - set(found):
                raise LostError(f"nothing is at offset {min(missing)} of the ready stream")
            chunks = [Chunk(found[one].body, found[one].content_type, one) for one in offsets]
            return await patiently(_decode, chunks, self._store)
        except StreamCut as error:
            raise LostError(f"the ready stream begins at offset {error.got}, and {error.asked} is needed") from error
        except DecodeError as error:
            raise LostError(f"a chunk does not decode: {error}") from error
        except StoreUnavailable as error:
            raise RestartMe(f"a batch that is replayed cannot be read now: {error}") from error

    def consumed(self) -> None:
        """The batches that :meth:`next` returned last are done with, repaired ones among them."""
        decisions, self._handed_out = self._handed_out, []
        for one in (*self._repaired(decisions), *decisions):
            self._decider.consume(one)
        self._advance({one.batch for one in decisions})

    def _advance(self, consumed: set[int]) -> None:
        self._ahead |= {batch for batch in consumed if batch > self._consumed_batches}
        if self._tapped is not None and len(self._ahead) > self._remembered:
            # what is missing before these does not come: the reading began in the middle, or retention has cut it
            self._consumed_batches = min(self._ahead) - 1
        while self._consumed_batches + 1 in self._ahead:
            self._consumed_batches += 1
            self._ahead.discard(self._consumed_batches)
        if (through := self._consumed_batches - self._remembered) > 0:
            self._decider.settle(through, self._consumed_batches, self.pinned)

    @property
    def has_caught_up(self) -> bool:
        """All that was on the stream at our start was read."""
        return self._marked

    def state(self) -> dict[str, Any]:
        """Return consumed tickets and the offset to read on from."""
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
        """Go on where ``state`` was taken."""
        consumed = state["consumed"]
        if not isinstance(consumed, dict):  # of release 0.1.0: all tickets, without the numbers of their batches
            consumed = dict.fromkeys(consumed, max(state["batches"], *state.get("ahead", ()), 0))
        settled = state.get("settled", NONE_SETTLED)
        failed = state.get("failed", ())
        self._decider = Decider(consumed, state["offset"], failed, self.starts, settled, self._max_starts)
        self._decider.ended = state.get("ended")
        self._consumed_batches, self._ahead = state["batches"], set()
        self._advance(set(state.get("ahead", ())))

    def run_begins(self, offset: int) -> None:
        """Pass over what lies before ``offset``: it is of an earlier run of the same name."""
        self._begins = offset

    async def run(self) -> None:
        """Read the stream until cancelled.

        Raises:
            FatalError: The stream does not hold what the checkpoint needs.
        """
        nonce = uuid.uuid4().hex
        while True:
            offset = self._decider.next_offset
            try:
                await self._read_from(offset, nonce)
            except StreamCut as error:
                if self._tapped is not None:
                    self._tapped.cut(error)
                    self._decider.other(error.got - 1)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(MARK_TIMEOUT):
                        await self._know_run()
                if self._begins <= offset:
                    raise _cut_off(error) from error
            self._decider.other(self._begins - 1)

    async def _read_from(self, offset: int, nonce: str) -> None:
        """Read from ``offset`` on; return when it turns out that the run begins further on.

        Raises:
            FatalError: The stream is shorter than ``offset``.
            StreamCut: Retention has cut what is at ``offset``.
        """
        async with await self._bus.consume(self._stream, offset=offset) as feed:
            await self._bus.publish(
                self._topology.exchange("ready"), "mark", envelope(Mark(nonce=nonce), message_id=f"mark-{nonce}")
            )
            while self._begins <= self._decider.next_offset:
                delivery = await (anext(feed) if self._marked else next_or_quiet(self._bus, feed, MARK_TIMEOUT))
                if delivery is None:
                    raise FatalError(
                        f"nothing was found on the ready stream from offset {offset} on, not even our own mark: "
                        "the stream is shorter than the checkpoint says, so this is not the broker (or not the "
                        "data) it was made with. Bring that back, or train anew with --fresh"
                    )
                await self._take(delivery, nonce)

    async def _know_run(self) -> None:
        """Return once this trainer's run is known: by its checkpoint, or by the explorer's heartbeats."""
        await self.changed.until(lambda: self._bus.run_id is not None)

    async def _take(self, delivery: Delivery, nonce: str) -> None:
        """Take in one delivery, or set it aside."""
        offset = delivery.offset
        assert offset is not None

        async def pass_over(_: str) -> None:
            self._decider.other(offset)

        if delivery.run_id is not None:
            if self._tapped is not None and self._bus.run_id is None:
                self._bus.run_id = delivery.run_id
            await self._know_run()
        work = functools.partial(self._take_in, delivery, offset, nonce)
        await handle_or_set_aside(*self._dead_letters, delivery, self._by, work, decide=pass_over)
        self.changed.notify()

    async def _take_in(self, delivery: Delivery, offset: int, nonce: str) -> None:
        if offset < self._begins or await drop_foreign(self._bus, delivery):
            self._decider.other(offset)
        elif delivery.content_type in {EXPERIENCES, REFERENCE}:
            await self._take_chunk(delivery, offset)
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
                if isinstance(message, Mark) and message.nonce == nonce:
                    self._marked = True
                if isinstance(message, RunEnd):
                    self._decider.ended = message.batches
                    if self._tapped is not None:
                        self._tapped.ends(message)

    @property
    def _dead_letters(self) -> tuple[Bus, Topology]:
        tapped = self._tapped
        return (self._bus, self._topology) if tapped is None else (tapped.bus, tapped.topology)

    async def _take_chunk(self, delivery: Delivery, offset: int) -> None:
        ticket, op, n = (delivery.headers.get(name) for name in ("ticket", "op", "n"))
        self.bytes_since_save += len(delivery.body)
        if isinstance(ticket, str) and isinstance(op, str) and isinstance(n, int):
            batch = delivery.headers.get("batch")
            chunk = Chunk(delivery.body, delivery.content_type, offset)
            self._decider.chunk(ticket, op, n, chunk, offset, batch if isinstance(batch, int) else None)
        else:
            self._decider.other(offset)
            await dead_letter(*self._dead_letters, delivery, "a chunk needs the headers ticket, op and n", self._by)


def _cut_off(error: StreamCut) -> FatalError:
    return FatalError(
        f"the checkpoint needs the ready stream from offset {error.asked}, but retention has cut it: it begins at "
        f"{error.got}. Raise broker.ready_max_bytes, or train anew with --fresh"
    )


def _decode(chunks: Sequence[Chunk], store: BlobStore | None) -> ExperienceBatch:
    bodies = (resolve(store, chunk.body, chunk.content_type) for chunk in chunks)
    return ExperienceBatch.concat(ExperienceBatch.decode(body).settle() for body in bodies)
