"""Closed batches that the trainer has not yet consumed, and the recovery of those that get lost. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field

from trinity_mq.dispatch.tickets import SubmissionRef
from trinity_mq.messages import BatchClosed, SubmissionOutcome, TaskBody

MANIFEST_LOST_AFTER = 15.0
"""Seconds after which a manifest that nobody works on is looked for in the queue ``closed``: longer than a lease."""
RecoveryAction = Literal["publish again", "tombstone"]


class PendingTask(BaseModel):
    """A task that waits for the next batch: submitted from outside, or given back unfinished or too old."""

    task: TaskBody
    submission: SubmissionRef | None = None
    given_back: bool = False
    """It was in a batch before; it is not given back twice."""


class SubmittedTask(BaseModel):
    """The outcome that was sent to a submitter which waits for experiences."""

    submission: SubmissionRef
    outcome: SubmissionOutcome


class InFlightBatch(BaseModel):
    """A manifest that the trainer has not yet reported on."""

    manifest: BatchClosed
    promises: list[SubmittedTask] = Field(default_factory=list)
    tasks: dict[int, TaskBody] = Field(default_factory=dict)
    """By id: tasks that are given back if their groups are too old to train on."""
    idle: float = 0.0
    """Seconds in which no operator or trainer worked on it."""
    tries: int = 1
    buried: bool = False
    looked: bool = Field(default=False, exclude=True)
    """It has been idle for :data:`MANIFEST_LOST_AFTER`, and ``closed`` was looked at; not saved."""

    def returned(self, stale: Collection[int]) -> list[PendingTask]:
        """Return the tasks among ``stale`` that are given back, in their order."""
        return [PendingTask(task=self.tasks[n], given_back=True) for n in sorted(set(stale)) if n in self.tasks]


class InFlightBatches(BaseModel):
    """Follows manifests until their ``Progress`` arrives (learning.md section 1)."""

    tickets: dict[str, InFlightBatch] = Field(default_factory=dict)

    def add(
        self, manifest: BatchClosed, promises: Sequence[SubmittedTask] = (), tasks: Mapping[int, TaskBody] | None = None
    ) -> None:
        """Follow a manifest; ``tasks`` are given back if their groups come out too old."""
        closed = InFlightBatch(manifest=manifest, promises=list(promises), tasks=dict(tasks or {}))
        self.tickets.setdefault(manifest.ticket, closed)

    def tick(
        self, seconds: float, in_hand: Collection[str], *, deadline: float, max_tries: int
    ) -> list[tuple[RecoveryAction, BatchClosed]]:
        """Let ``seconds`` pass and return the recovery actions that are due.

        ``in_hand``: tickets that a living operator works on or that the trainer already holds; their clocks start anew.
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
        """Return the manifests that nobody has worked on for :data:`MANIFEST_LOST_AFTER`, each once in that time: they
        are lost if the queue ``closed`` is empty.
        """
        unseen = [one for one in self.tickets.values() if one.idle >= MANIFEST_LOST_AFTER and not one.looked]
        for closed in unseen:
            closed.looked = True
        return [closed.manifest for closed in unseen]
