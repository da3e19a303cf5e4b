"""Chooses the processed set that counts for each ticket, and the offset at which a restarted trainer begins to read.

Pure logic: stream events in, decisions out.
"""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trinity_mq.messages import BatchReady
from trinity_mq.transport.ready_stream import Chunk, OpenSets

NONE_SETTLED = -1
"""Value of :attr:`TicketDecider.settled` if no batch is settled: lower than any batch number."""
MAX_STARTS = 2
"""Number of crashed starts on a batch after which the next start skips the batch. If the batch had company, which may
be the cause of the crashes, the next start tries the batch alone, and the start after that skips it.
"""
MAX_STARTS_REPAIRED = 1
"""Number of crashed starts on a repaired batch after which the next start skips it. A repaired batch is trained on with
another batch, and either may be the cause of a crash; the other batch then gets a start without the repaired batch."""


def repaired_key(ticket: str, op: str) -> str:
    """Return the key for counting starts on a set that repairs a failed ticket; each replay is counted separately."""
    return f"{ticket}/{op}"


REPLAYED = "replayed/"
"""Prefix of the keys for counting starts on replayed groups."""


def replayed_key(tid: str) -> str:
    """Return the key for counting starts on a replayed group."""
    return f"{REPLAYED}{tid}"


@dataclass(frozen=True, slots=True)
class TicketDecision:
    """A complete set of a ticket that counts: the first set, or the set that repairs a failed ticket."""

    ready: BatchReady
    chunks: tuple[Chunk, ...]
    offset: int
    """Stream offset of its BatchReady."""

    @property
    def batch(self) -> int:
        """The batch's number."""
        return int(self.ready.batch)


class TicketDecider:
    """Decides tickets from the events of the ready stream, in stream order.

    The first complete set ``(ticket, op)``, in the order of the BatchReady messages, decides its ticket; other sets are
    dropped. A ticket that was decided as failed, or on which trainers crashed, counts as progress and may still be
    repaired: the next complete set of the ticket (``trinity-mq dead replay``) is returned once, with a later batch.

    Args:
        consumed: Consumed tickets with the number of each ticket's batch.
        next_offset: Offset to read from.
        failed: Tickets decided as failed.
        starts: Returns the number of crashed starts for a ticket or :func:`repaired_key`.
        settled: Number of the batch up to which all batches are consumed and their tickets forgotten.
        max_starts: Returns the number of crashed starts after which a batch is skipped.
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
        """Batch number of each ticket that was trained on or skipped for good, except tickets of batches up to
        :attr:`settled`."""
        self.settled = settled
        """Number of the batch up to which all batches are consumed and their tickets forgotten; later messages of these
        batches are ignored, also with an unknown ticket. :data:`NONE_SETTLED`: none."""
        self._max_starts = max_starts
        self._starts = starts
        """Returns the number of crashed starts for a ticket or :func:`repaired_key`."""
        self._failed: set[str] = set(failed)
        """Tickets decided as failed whose repaired set was not consumed yet."""
        self._repaired: dict[str, tuple[int, TicketDecision]] = {}
        """First offset and repaired set by failed ticket, in stream order."""
        self.next_offset = next_offset
        self.ended: int | None = None
        """Number of batches of the run, once known; None again after a later batch shows that the run was extended."""
        self._open: OpenSets[Chunk] = OpenSets()
        self._decided: dict[int, TicketDecision] = {}
        self._held: dict[str, int] = {}

    def chunk(self, chunk: Chunk) -> None:
        """Take in a chunk; repeats and chunks of decided tickets are ignored."""
        self.next_offset = chunk.offset + 1
        if not self.is_settled(chunk.ticket, chunk.batch if isinstance(chunk.batch, int) else None):
            self._open.add(chunk.ticket, chunk.op, chunk.n, chunk)

    def ready(self, message: BatchReady, offset: int) -> TicketDecision | None:
        """Take in the BatchReady of a set; return the decision if the set is complete and decides its ticket, or
        repairs its failed ticket.
        """
        self.next_offset = offset + 1
        if not isinstance(message.batch, int):
            return None
        if self.is_settled(message.ticket, message.batch):
            self._open.drop(message.ticket)
            return None
        again = message.ticket in self._failed
        if again and message.state not in {"ready", "empty"}:
            self._open.drop(message.ticket)
            return None  # the ticket has failed again
        chunks = self._open.join(message)
        if chunks is None:
            return None  # its chunks lie before our offset: another set, or a repeat of this set, decides
        first = self._open.first(message.ticket)
        first_offset = offset if first is None else first.offset
        self._open.drop(message.ticket)
        decision = TicketDecision(message, chunks, offset)
        if again:
            self._repaired[message.ticket] = first_offset, decision
            return decision
        self._held[message.ticket] = first_offset
        if message.state == "failed" or self._starts(message.ticket) >= self._max_starts():
            self._failed.add(message.ticket)
        self._decided[decision.batch] = decision
        if self.ended is not None and decision.batch > self.ended:
            self.ended = None  # the run was extended after its end
        return decision

    def other(self, offset: int) -> None:
        """Advance past a message of another kind."""
        self.next_offset = offset + 1

    def peek(self, batch: int) -> TicketDecision | None:
        """Return the decision of batch number ``batch``, None if the batch is not decided or already consumed."""
        return self._decided.get(batch)

    def is_settled(self, ticket: str, batch: int | None = None) -> bool:
        """Return whether further messages of ``ticket``, which belongs to this batch, are ignored."""
        if ticket in self._failed:
            return ticket in self._repaired
        return ticket in self.consumed or ticket in self._held or (batch is not None and batch <= self.settled)

    def settle(self, through: int, newest: int, pinned: Callable[[], Collection[str]]) -> None:
        """Forget the consumed tickets of the batches up to ``through``, so that memory and checkpoints do not grow with
        the run. All these batches must be consumed.

        Later messages of these batches are ignored, except messages of failed tickets, which may still be repaired. The
        tickets that ``pinned`` returns are kept as if they belonged to batch ``newest``.
        """
        self.settled = max(self.settled, through)
        while self.consumed and next(iter(self.consumed.values())) <= through:
            ticket, _ = self.consumed.popitem(last=False)
            if ticket in pinned():
                self.consumed[ticket] = newest

    def repaired(self, together: Sequence[TicketDecision]) -> list[TicketDecision]:
        """Return the repaired sets that are trained on with the batches ``together``. A repaired set is included if a
        batch in ``together`` has a higher batch number and its own set comes later on the stream.

        The choice depends only on the order of the stream, so that a restart makes the same choice.
        """
        return [
            decision
            for _, decision in self._repaired.values()
            if any(decision.offset < taken.offset and decision.batch < taken.batch for taken in together)
        ]

    def first(self, count: int) -> list[TicketDecision]:
        """Return the first ``count`` decisions that are not consumed, oldest first."""
        return list(itertools.islice(self._decided.values(), count))

    def consume(self, decision: TicketDecision) -> None:
        """Mark a batch, or a repaired batch, as consumed: trained on or skipped."""
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
        """Forget a consumed ticket, so that a further set of the ticket would count again. Readers that only show the
        stream call it to bound their memory.
        """
        self.consumed.pop(ticket, None)
        self._failed.discard(ticket)

    @property
    def failed(self) -> set[str]:
        """Tickets consumed as failed, which operators may still repair."""
        return self._failed - self._held.keys()

    @property
    def incomplete(self) -> list[Chunk]:
        """The first chunk of each undecided ticket."""
        return list(self._open.firsts())

    @property
    def unused(self) -> list[int]:
        """Numbers of repaired batches that were not trained on with a later batch yet."""
        return [decision.batch for _, decision in self._repaired.values()]

    @property
    def waiting(self) -> list[str]:
        """Tickets decided and not yet consumed. Failed tickets whose repaired set has arrived are not listed again."""
        return list(self._held)

    def resume_offset(self) -> int:
        """Return the lowest offset that a restart needs.

        This is the offset of the first chunk of undecided tickets and unconsumed batches, repaired batches included,
        or the next offset without such tickets.
        """
        firsts = [chunk.offset for chunk in self._open.firsts()]
        firsts += [first for first, _ in self._repaired.values()]
        return min([*firsts, *self._held.values()], default=self.next_offset)
