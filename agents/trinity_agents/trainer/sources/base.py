"""The train batch, and the interface of a source of train batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from trinity_agents.trainer.decisions import MAX_STARTS, MAX_STARTS_REPAIRED, repaired_key
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages.batches import BatchState, StepOutcome
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

OF_SOURCES = ("data/unfit_records", "data/too_long", "replay/", "tap/")
"""Name prefixes of the source metrics that the trainer reports; operators report the metrics of rollouts."""


class ExperiencesLost(Exception):
    """Experiences that were trained on cannot be read again."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcome of one batch."""

    outcome: StepOutcome
    reason: str | None = None
    stale_tasks: list[int] = field(default_factory=list)
    """Ids of the tasks whose groups were too old."""
    dropped: int = 0
    """Number of experiences in the groups that were too old."""
    kills: bool = False
    """True if the batch was skipped because trainers crashed on it; it is then dead-lettered for inspection."""


@dataclass(slots=True)
class TrainBatch:
    """A batch to train on. It is one unit of progress, however many experiences it holds. Together with its ``others``
    it makes up one train step.
    """

    batch: int
    ticket: str
    op: str
    state: BatchState
    """Processing state of the batch; only a ``ready`` batch is trained on."""
    experiences: ExperienceBatch = field(default_factory=lambda: ExperienceBatch.of([]))
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    filtered_groups: int = 0
    """Number of groups that the operators removed completely."""
    offsets: list[int] = field(default_factory=list)
    """Stream offsets of its chunks."""
    offset: int = 0
    """Stream offset of its BatchReady."""
    announced: int = 0
    """Number of experiences that the BatchReady announces."""
    others: list[TrainBatch] = field(default_factory=list)
    """The other batches of the same train step: first the further batches of ``trainer.batches_per_step`` in order,
    then repaired batches."""
    replayed: ExperienceBatch = field(default_factory=lambda: ExperienceBatch.of([]))
    """Experiences of earlier groups that are trained on with this batch; emptied if they were not trained on."""
    is_repaired: bool = False
    """True if the batch counted as failed progress and operators have processed it since. It is trained on with a later
    batch and does not count again, because an extra train step would make other batches older."""
    max_starts: int = MAX_STARTS
    """Number of crashed starts after which the batch is skipped."""
    is_alone: bool = False
    """True if trainers crashed at a step of this batch with company. The batch is then tried without other batches,
    replayed groups and experts, so that only the cause of the crash is skipped."""
    result: BatchResult | None = None
    """Result of its train step; None before that step."""

    @property
    def parts(self) -> list[TrainBatch]:
        """All batches of the train step."""
        return [self, *self.others]

    @property
    def starts_key(self) -> str:
        """Key for counting crashed starts on the batch."""
        return repaired_key(self.ticket, self.op) if self.is_repaired else self.ticket

    @property
    def trained(self) -> bool:
        """Whether a train step was made on the batch; a step that only trains the critic counts."""
        return self.result is not None and self.result.outcome == "trained"

    @property
    def source_metrics(self) -> dict[str, float]:
        """Metrics of records, replayed groups and a tapped run, from all batches of the train step except repaired
        batches.
        """
        return {
            name: value
            for part in self.parts
            if not part.is_repaired
            for name, value in part.metrics.items()
            if name.startswith(OF_SOURCES)
        }

    def unusable_result(self, starts: int) -> BatchResult | None:
        """Return the result of a batch that must not be trained on, None for a usable batch.

        Args:
            starts: Number of crashed starts on the batch.
        """
        max_starts = MAX_STARTS_REPAIRED if self.is_repaired else self.max_starts
        if self.state != "ready":
            log.warning("batch_skipped", batch=self.batch, state=self.state, reason=self.reason)
            return BatchResult(self.state, self.reason)
        if starts < max_starts:
            return None
        # The attempts stay recorded: a restart from an older checkpoint reads this batch again and must skip it again.
        counted = "1 start" if max_starts == 1 else f"{max_starts} starts"
        return BatchResult("skipped", f"the trainer did not survive {counted} on this batch", kills=True)


class Source(Protocol):
    """A source of train batches. Its state is part of the checkpoint, opaque to the trainer."""

    changed: Notifier
    """Notified when :meth:`available` may have become true."""
    bytes_since_save: int
    """Bytes read since the last checkpoint was committed."""
    has_company: bool
    """True if batches are trained on together with other batches, or with experiences of another source. A crash then
    does not show which of them caused it."""

    @property
    def ended(self) -> int | None:
        """Number of batches of the run, None while unknown."""

    @property
    def waiting(self) -> list[str]:
        """Tickets that have arrived and are not consumed."""

    @property
    def unused(self) -> list[int]:
        """Numbers of batches that were repaired too late to be trained on."""

    def available(self) -> bool:
        """Return whether :meth:`next` returns without waiting."""

    async def next(self) -> TrainBatch:
        """Return the next batch, with the other batches of its train step; wait until they have arrived. Return the
        same batch again until :meth:`consumed` is called.
        """

    def consumed(self) -> None:
        """Advance past the batches that :meth:`next` returned last."""

    def state(self) -> dict[str, Any]:
        """Return the position after the last consumed batch, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a ``state`` that :meth:`state` returned."""

    def run_begins(self, offset: int) -> None:
        """Skip all messages before this offset of the ``ready`` stream."""

    async def run(self) -> None:
        """Run the source's background work, until cancelled."""
