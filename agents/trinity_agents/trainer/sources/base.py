"""The interface of a source of train batches, and the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from trinity_agents.trainer.decisions import MAX_STARTS
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages.batches import BatchState, StepOutcome
from trinity_mq.runtime.notify import Notifier


class LostError(Exception):
    """Experiences that were trained on cannot be read again."""


@dataclass(slots=True)
class TrainBatch:
    """One unit of progress, however many experiences are left in it; with those co-batched, a train step's worth."""

    batch: int
    ticket: str
    op: str
    state: BatchState
    """ready, empty, failed, gone."""
    experiences: ExperienceBatch = field(default_factory=lambda: ExperienceBatch.of([]))
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    filtered_groups: int = 0
    """Groups of which the operators kept nothing."""
    offsets: list[int] = field(default_factory=list)
    """Offsets of its chunks on the stream."""
    offset: int = 0
    """Offset of its BatchReady."""
    announced: int = 0
    """Experiences that the BatchReady says there are."""
    co_batched: list[TrainBatch] = field(default_factory=list)
    """The other batches of its train step, in order (``trainer.batches_per_step``)."""
    replayed: ExperienceBatch = field(default_factory=lambda: ExperienceBatch.of([]))
    """Groups of earlier batches to be trained on with this one; empty once it turned out that they were not."""
    repaired: list[TrainBatch] = field(default_factory=list)
    """Earlier batches that were progress as failed, and that operators could process since: to be trained on with this
    one, so that a step more does not make other batches older."""
    max_starts: int = MAX_STARTS
    """Starts on it that crashed after which it is skipped."""
    is_alone: bool = False
    """Trainers died at a step with it and with company; it is tried without other batches, replayed groups and experts,
    so that only what kills is skipped."""
    outcome: StepOutcome | None = None
    """Outcome of its train step; None before that step."""


class Source(Protocol):
    """A source of train batches. Its state is part of the checkpoint, opaque to the trainer."""

    changed: Notifier
    """Notified when :meth:`available` may have become true."""
    bytes_since_save: int
    """Bytes read since the last checkpoint was committed."""
    has_company: bool
    """Its batches are trained on with others, or with what another source adds."""

    @property
    def ended(self) -> int | None:
        """Batches of the run, None as long as that is unknown."""

    @property
    def waiting(self) -> list[str]:
        """Tickets that are here and not consumed."""

    @property
    def unused(self) -> list[int]:
        """Batches that were repaired too late to be trained on."""

    def available(self) -> bool:
        """Return whether :meth:`next` returns without waiting."""

    async def next(self) -> TrainBatch:
        """Return the next batch; the same one again until :meth:`consumed` is called."""

    def consumed(self) -> None:
        """Move on: the batch that :meth:`next` returned last is done with."""

    def state(self) -> dict[str, Any]:
        """Return the position behind the last consumed batch, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""

    def run_begins(self, offset: int) -> None:
        """Pass over what lies before this offset of the ``ready`` stream."""

    async def run(self) -> None:
        """Do what the source has to do meanwhile, until cancelled."""
