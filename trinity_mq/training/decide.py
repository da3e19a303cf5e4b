"""Which processed set of a ticket counts, and from where a restarted trainer must read. Pure: stream events in,
decisions out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from trinity_mq.messages import BatchReady


class Chunk(NamedTuple):
    """One chunk as it came, not looked into."""

    body: bytes
    content_type: str | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The first complete set of a ticket."""

    ready: BatchReady
    chunks: tuple[Chunk, ...]

    @property
    def batch(self) -> int:
        """The batch's number."""
        return int(self.ready.batch)


@dataclass(slots=True)
class _Sets:
    """What has come of one ticket."""

    first_offset: int
    by_op: dict[str, dict[int, Chunk]] = field(default_factory=dict)


class Decider:
    """Reads the ready stream in order. The first complete ``(ticket, op)``, by its BatchReady, decides its ticket;
    other sets are freed.
    """

    def __init__(self, consumed: Iterable[str] = (), next_offset: int = 0) -> None:
        self.consumed: set[str] = set(consumed)
        """Tickets that were trained on or skipped."""
        self.next_offset = next_offset
        self.ended: int | None = None
        """Batches of the run, once known."""
        self._open: dict[str, _Sets] = {}
        self._decided: dict[int, Decision] = {}
        self._held: dict[str, int] = {}

    def chunk(self, ticket: str, op: str, n: int, chunk: Chunk, offset: int) -> None:
        """A chunk has come; repeats and chunks of decided tickets are nothing new."""
        self.next_offset = offset + 1
        if ticket in self.consumed or ticket in self._held:
            return
        sets = self._open.setdefault(ticket, _Sets(offset))
        sets.by_op.setdefault(op, {}).setdefault(n, chunk)

    def ready(self, message: BatchReady, offset: int) -> Decision | None:
        """A set is said to be complete; returns the decision if it is, and is the first."""
        self.next_offset = offset + 1
        if message.ticket in self.consumed or message.ticket in self._held or not isinstance(message.batch, int):
            return None
        sets = self._open.get(message.ticket) or _Sets(offset)
        chunks = sets.by_op.get(message.op, {})
        if any(n not in chunks for n in range(message.chunks)):
            return None  # its chunks lie before our offset: another set, or a repeat of this one, decides
        self._open.pop(message.ticket, None)
        self._held[message.ticket] = sets.first_offset
        decision = Decision(message, tuple(chunks[n] for n in range(message.chunks)))
        self._decided[decision.batch] = decision
        return decision

    def other(self, offset: int) -> None:
        """Something else was read."""
        self.next_offset = offset + 1

    def peek(self, batch: int) -> Decision | None:
        """Return the decision of batch ``batch`` if it has been made."""
        return self._decided.get(batch)

    def consume(self, decision: Decision) -> None:
        """The batch was trained on or skipped."""
        self._decided.pop(decision.batch, None)
        self._held.pop(decision.ready.ticket, None)
        self.consumed.add(decision.ready.ticket)

    @property
    def waiting(self) -> list[str]:
        """Tickets decided and not yet consumed."""
        return list(self._held)

    def resume_offset(self) -> int:
        """Return the lowest offset that a restart needs: the first chunk of undecided tickets and unconsumed batches,
        else the next.
        """
        firsts = [sets.first_offset for sets in self._open.values()]
        return min([*firsts, *self._held.values()], default=self.next_offset)
