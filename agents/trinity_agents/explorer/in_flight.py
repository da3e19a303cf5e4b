"""Closed batches that the trainer has not consumed yet, and the recovery of lost batches. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import BatchClosed, SubmissionOutcome, TaskBody

MANIFEST_LOST_AFTER = 15.0
"""Idle seconds after which the queue ``closed`` is checked for a manifest; longer than a heartbeat lease."""
RecoveryAction = Literal["publish again", "tombstone"]


class PendingTask(BaseModel):
    """A task that waits for the next batch: submitted from outside, or requeued because it was unfinished or stale."""

    task: TaskBody
    submission: SubmissionRef | None = None
    given_back: bool = False
    """True if the task was requeued from an earlier batch; a task is requeued only once."""


class SubmittedTask(BaseModel):
    """The outcome of a submitted task whose submitter waits for experiences."""

    submission: SubmissionRef
    outcome: SubmissionOutcome


class InFlightBatch(BaseModel):
    """A closed batch for which no progress of the trainer has arrived."""

    manifest: BatchClosed
    promises: list[SubmittedTask] = Field(default_factory=list)
    tasks: dict[int, TaskBody] = Field(default_factory=dict)
    """Tasks by id that are requeued if their groups are too old to train on."""
    idle: float = 0.0
    """Seconds since an operator or the trainer last worked on the batch."""
    tries: int = 1
    buried: bool = False
    looked: bool = Field(default=False, exclude=True)
    """True once the queue ``closed`` was checked after :data:`MANIFEST_LOST_AFTER`; not saved."""

    def returned(self, stale: Collection[int]) -> list[PendingTask]:
        """Return the tasks with ids in ``stale`` that are requeued, ordered by id."""
        return [PendingTask(task=self.tasks[n], given_back=True) for n in sorted(set(stale)) if n in self.tasks]


class InFlightBatches(BaseModel):
    """Follows manifests until their ``Progress`` arrives (docs/learning.md)."""

    tickets: dict[str, InFlightBatch] = Field(default_factory=dict)

    def add(
        self, manifest: BatchClosed, promises: Sequence[SubmittedTask] = (), tasks: Mapping[int, TaskBody] | None = None
    ) -> None:
        """Follow a manifest; ``tasks`` are requeued if their groups turn out too old."""
        closed = InFlightBatch(manifest=manifest, promises=list(promises), tasks=dict(tasks or {}))
        self.tickets.setdefault(manifest.ticket, closed)

    def tick(
        self, seconds: float, in_hand: Collection[str], *, deadline: float, max_tries: int
    ) -> list[tuple[RecoveryAction, BatchClosed]]:
        """Advance the idle clocks by ``seconds`` and return the due recovery actions.

        ``in_hand`` has the tickets of a living operator or of the trainer; their idle clocks restart at 0.
        """
        actions: list[tuple[RecoveryAction, BatchClosed]] = []
        for name, closed in self.tickets.items():
            if name in in_hand:
                closed.idle, closed.looked = 0.0, False
                continue
            closed.idle += seconds
            if closed.idle < deadline:
                continue
            closed.idle = 0.0
            if closed.tries < max_tries:
                closed.tries += 1
                actions.append(("publish again", closed.manifest))
            else:
                closed.buried = True
                actions.append(("tombstone", closed.manifest))
        return actions

    def unseen(self) -> list[BatchClosed]:
        """Return the manifests that have been idle for :data:`MANIFEST_LOST_AFTER` seconds, each once per idle period.

        These manifests are lost if the queue ``closed`` is empty.
        """
        unseen = [batch for batch in self.tickets.values() if batch.idle >= MANIFEST_LOST_AFTER and not batch.looked]
        for closed in unseen:
            closed.looked = True
        return [closed.manifest for closed in unseen]
