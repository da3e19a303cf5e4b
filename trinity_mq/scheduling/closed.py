"""Closed tickets on their way through operators and trainer: none may get lost between them. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from trinity_mq.messages import BatchClosed, SubmissionOutcome
from trinity_mq.scheduling.tickets import SubmissionRef

Remedy = Literal["publish again", "tombstone"]


class Promise(BaseModel):
    """What a submitter was told that waits for experiences."""

    submission: SubmissionRef
    outcome: SubmissionOutcome


class ClosedTicket(BaseModel):
    """A manifest that the trainer has not yet reported on."""

    manifest: BatchClosed
    promises: list[Promise] = Field(default_factory=list)
    idle: float = 0.0
    """Seconds in which nobody was seen to work on it."""
    tries: int = 1
    buried: bool = False


class ClosedTickets(BaseModel):
    """Follows manifests until their ``Progress`` arrives (learning.md section 1)."""

    tickets: dict[str, ClosedTicket] = Field(default_factory=dict)

    def add(self, manifest: BatchClosed, promises: Sequence[Promise] = ()) -> None:
        """A manifest was published."""
        self.tickets.setdefault(manifest.ticket, ClosedTicket(manifest=manifest, promises=list(promises)))

    def done(self, ticket: str) -> bool:
        """The trainer has consumed it; False when it was not expected (any more)."""
        return self.tickets.pop(ticket, None) is not None

    def tick(
        self, seconds: float, in_hand: Collection[str], *, deadline: float, max_tries: int
    ) -> list[tuple[Remedy, BatchClosed]]:
        """Let ``seconds`` pass and return what is to be done.

        ``in_hand``: tickets that a living operator works on or that the trainer already holds; their clocks start anew.
        """
        remedies: list[tuple[Remedy, BatchClosed]] = []
        for name, closed in self.tickets.items():
            if name in in_hand:
                closed.idle = 0.0
                continue
            closed.idle += seconds
            if closed.idle < deadline:
                continue
            closed.idle = 0.0
            if closed.tries < max_tries:
                closed.tries += 1
                remedies.append(("publish again", closed.manifest))
            else:
                closed.buried = True
                remedies.append(("tombstone", closed.manifest))
        return remedies
