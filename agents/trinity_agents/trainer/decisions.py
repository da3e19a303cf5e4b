"""Chooses the processed set of a ticket that counts, and the offset that a restarted trainer reads from. Pure: stream
events in, decisions out.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from trinity_mq.messages import BatchReady

NONE_SETTLED = -1
"""Below the number of any batch."""
MAX_STARTS = 2
"""Starts on one batch that crashed; the next start skips it. Where it had company, which may be what kills, the next
start is on the batch alone, and the one after that skips it."""
MAX_STARTS_REPAIRED = 1
"""The same for one that goes along with another: what kills may be either, and the other gets a start without it."""


def repaired_key(ticket: str, op: str) -> str:
    """Return under what the starts on a set that repairs a failed ticket are counted: each replay has a start."""
    return f"{ticket}/{op}"


REPLAYED = "replayed/"


def replayed_key(tid: str) -> str:
    """Return under what the starts on a group that is replayed are counted."""
    return f"{REPLAYED}{tid}"


@dataclass(slots=True)
class Chunk:
    """One chunk as it came, not looked into."""

    body: bytes
    """Empty once released: it is read from the stream again when it is needed."""
    content_type: str | None
    offset: int = 0
    """Stream offset."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The first complete set of a ticket."""

    ready: BatchReady
    chunks: tuple[Chunk, ...]
    offset: int
    """Stream offset of its BatchReady."""

    @property
    def batch(self) -> int:
        """The batch's number."""
        return int(self.ready.batch)


@dataclass(slots=True)
class _Sets:
    """Sets of chunks received for one ticket."""

    first_offset: int
    by_op: dict[str, dict[int, Chunk]] = field(default_factory=dict)


class Decider:
    """Reads the ready stream in order. The first complete ``(ticket, op)``, by its BatchReady, decides its ticket;
    other sets are freed. A ticket that was decided as failed, or that trainers did not survive, is progress, and may
    still be repaired: the first complete set that comes of it afterwards (``trinity-mq dead replay``) is handed out
    once, beside a later batch.

    Args:
        consumed: Consumed tickets, and the number of each one's batch.
        next_offset: Offset to read from.
        failed: Tickets decided as failed.
        starts: Returns the starts that crashed, by ticket or :func:`repaired_key`.
        settled: See :attr:`settled`.
        max_starts: Returns the starts that crashed after which a batch is skipped.
    """

    def __init__(
        self,
        consumed: Mapping[str, int] = MappingProxyType({}),
        next_offset: int = 0,
        failed: Iterable[str] = (),
        starts: Callable[[str], int] = lambda _: 0,
        settled: int = NONE_SETTLED,
        max_starts: Callable[[], int] = lambda: MAX_STARTS,
    ) -> None:
        self.consumed = OrderedDict(sorted(consumed.items(), key=operator.itemgetter(1)))
        """Tickets that are done with, trained on or skipped for good, with the numbers of their batches; without those
        that :attr:`settled` stands for."""
        self.settled = settled
        """Up to this batch all are consumed, and nothing that may still come of them counts, whatever its ticket."""
        self._max_starts = max_starts
        self._starts = starts
        """Starts that crashed, by ticket or :func:`repaired_key`."""
        self._failed: set[str] = set(failed)
        """Tickets decided as failed and not repaired yet, or not consumed since."""
        self._repaired: dict[str, tuple[int, Decision]] = {}
        """First offset and set of failed tickets, in stream order."""
        self.next_offset = next_offset
        self.ended: int | None = None
        """Batches of the run, once known; None again where a later batch shows that it was extended."""
        self._open: dict[str, _Sets] = {}
        self._decided: dict[int, Decision] = {}
        self._held: dict[str, int] = {}

    def chunk(self, ticket: str, op: str, n: int, chunk: Chunk, offset: int, batch: int | None = None) -> None:
        """A chunk has come; repeats and chunks of decided tickets are nothing new. ``batch``: number of its batch, None
        where it does not say.
        """
        self.next_offset = offset + 1
        if self.is_settled(ticket, batch):
            return
        sets = self._open.setdefault(ticket, _Sets(offset))
        sets.by_op.setdefault(op, {}).setdefault(n, chunk)

    def ready(self, message: BatchReady, offset: int) -> Decision | None:
        """A set is said to be complete; returns the decision if it is, and is the first."""
        self.next_offset = offset + 1
        if not isinstance(message.batch, int):
            return None
        if self.is_settled(message.ticket, message.batch):
            self._open.pop(message.ticket, None)
            return None
        again = message.ticket in self._failed
        if again and message.state not in {"ready", "empty"}:
            self._open.pop(message.ticket, None)
            return None  # it has failed once more
        sets = self._open.get(message.ticket) or _Sets(offset)
        chunks = sets.by_op.get(message.op, {})
        if any(n not in chunks for n in range(message.chunks)):
            return None  # its chunks lie before our offset: another set, or a repeat of this one, decides
        self._open.pop(message.ticket, None)
        decision = Decision(message, tuple(chunks[n] for n in range(message.chunks)), offset)
        if again:
            self._repaired[message.ticket] = sets.first_offset, decision
            return decision
        self._held[message.ticket] = sets.first_offset
        if message.state == "failed" or self._starts(message.ticket) >= self._max_starts():
            self._failed.add(message.ticket)
        self._decided[decision.batch] = decision
        if self.ended is not None and decision.batch > self.ended:
            self.ended = None  # the run was extended after its end
        return decision

    def other(self, offset: int) -> None:
        """Something else was read."""
        self.next_offset = offset + 1

    def peek(self, batch: int) -> Decision | None:
        """Return the decision of batch ``batch`` if it has been made."""
        return self._decided.get(batch)

    def is_settled(self, ticket: str, batch: int | None = None) -> bool:
        """Whether nothing that may still come of ``ticket``, which is of this batch, counts."""
        if ticket in self._failed:
            return ticket in self._repaired
        return ticket in self.consumed or ticket in self._held or (batch is not None and batch <= self.settled)

    def settle(self, through: int, newest: int, pinned: Callable[[], Collection[str]]) -> None:
        """Forget the tickets of batches up to ``through``, which are all consumed: memory and checkpoints would else
        grow with the run. Those that are ``pinned`` are remembered as if they were of batch ``newest``.
        """
        self.settled = max(self.settled, through)
        while self.consumed and next(iter(self.consumed.values())) <= through:
            ticket, _ = self.consumed.popitem(last=False)
            if ticket in pinned():
                self.consumed[ticket] = newest

    def repaired(self, before: Decision) -> list[Decision]:
        """Return the sets of failed tickets that go along with batch ``before``: those on the stream before its own,
        of batches before it. Only the stream's order has a part in this, so that a restart does the same.
        """
        found = (decision for _, decision in self._repaired.values())
        return [decision for decision in found if decision.offset < before.offset and decision.batch < before.batch]

    def first(self, count: int) -> list[Decision]:
        """Return up to so many of the decisions not consumed, those made first."""
        return list(itertools.islice(self._decided.values(), count))

    def consume(self, decision: Decision) -> None:
        """The batch was trained on or skipped, or a repaired one along with it."""
        ticket = decision.ready.ticket
        if self._repaired.get(ticket, (0, None))[1] is decision:
            del self._repaired[ticket]
            if self._starts(repaired_key(ticket, decision.ready.op)) < MAX_STARTS_REPAIRED:
                self._failed.discard(ticket)
                self.consumed[ticket] = decision.batch
            return
        self._decided.pop(decision.batch, None)
        self._held.pop(ticket, None)
        if ticket not in self._failed:
            self.consumed[ticket] = decision.batch

    def forget(self, ticket: str) -> None:
        """Forget a consumed ticket: a further set of it would count again."""
        self.consumed.pop(ticket, None)
        self._failed.discard(ticket)

    @property
    def failed(self) -> set[str]:
        """Tickets consumed as failed, of which operators may still make a set that counts."""
        return self._failed - self._held.keys()

    @property
    def unused(self) -> list[int]:
        """Batches that were repaired, and that no later one has taken along."""
        return [decision.batch for _, decision in self._repaired.values()]

    @property
    def waiting(self) -> list[str]:
        """Tickets decided and not yet consumed."""
        return list(self._held)

    def resume_offset(self) -> int:
        """Return the lowest offset that a restart needs: the first chunk of undecided tickets and unconsumed batches,
        repaired ones among them, else the next.
        """
        firsts = [sets.first_offset for sets in self._open.values()]
        firsts += [first for first, _ in self._repaired.values()]
        return min([*firsts, *self._held.values()], default=self.next_offset)
