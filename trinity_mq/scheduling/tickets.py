"""One schedule() call as state: which slices it was cut into, what became of each, and the manifest that closes it. No
I/O.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, Field

from trinity_mq.messages import Accepted, BatchClosed, BatchId, Deliver, Lane, TaskBody, TaskResult, Version, Wanted

COUNTS_AS_DONE = {"finished", "partial"}


class SubmissionRef(BaseModel):
    """Whom to tell what became of a task that came from outside."""

    submission_id: str
    task_id: int = -1
    reply_to: str | None = None
    correlation_id: str | None = None
    want_experiences: bool = False


class SliceState(BaseModel):
    """A slice and its first outcome."""

    task_id: int
    run_base: int
    repeat_times: int
    result: TaskResult | None = None


class Ticket(BaseModel):
    """What a :meth:`Scheduler.schedule` call became; saved with the explorer's state."""

    batch: BatchId
    ticket: str
    lane: Lane = "train"
    deliver: Deliver = "pipeline"
    tasks: list[TaskBody]
    slices: list[SliceState]
    seed: int = 0
    pinned: Version | None = None
    opened_beat: int = 0
    published: bool = False
    time_left: float
    """Seconds of the batch's own clock, which runs only while the batch can move."""
    submissions: list[SubmissionRef] = Field(default_factory=list)
    manifest: BatchClosed | None = None
    """Once saved it never changes."""
    duplicates: int = 0
    """Outcomes beyond the first of a slice."""

    @property
    def is_complete(self) -> bool:
        """Every slice has an outcome."""
        return all(piece.result is not None for piece in self.slices)

    @property
    def finished_tasks(self) -> list[int]:
        """Ids of the tasks all of whose slices have an outcome."""
        missing = {piece.task_id for piece in self.slices if piece.result is None}
        return [task_id for task_id in range(len(self.tasks)) if task_id not in missing]

    def record(self, result: TaskResult) -> bool:
        """Take in a result; True when it decides its slice. Later ones are counted only."""
        for piece in self.slices:
            if (piece.task_id, piece.run_base) == (result.task_id, result.run_base):
                if piece.result is not None:
                    self.duplicates += piece.result.attempt != result.attempt
                    return False
                piece.result = result
                return True
        return False

    def cancel_rest(self, reason: str) -> None:
        """Give every slice that has no outcome the outcome *cancelled*."""
        for piece in self.slices:
            if piece.result is None:
                piece.result = TaskResult(
                    batch=self.batch,
                    ticket=self.ticket,
                    task_id=piece.task_id,
                    run_base=piece.run_base,
                    repeat_times=piece.repeat_times,
                    attempt="",
                    outcome="cancelled",
                    message=reason,
                )

    def results_of(self, task_id: int) -> list[TaskResult]:
        """Return the outcomes of a task's slices, in order of their runs."""
        return [piece.result for piece in self.slices if piece.task_id == task_id and piece.result is not None]

    def make_manifest(self) -> BatchClosed:
        """Return the manifest of the outcomes so far."""
        results = [piece.result for piece in self.slices if piece.result is not None]
        return BatchClosed(
            batch=self.batch,
            ticket=self.ticket,
            accepted=[
                Accepted(task_id=r.task_id, run_base=r.run_base, attempt=r.attempt, runs=r.runs, parts=r.parts)
                for r in results
                if r.outcome in COUNTS_AS_DONE and r.parts
            ],
            outcomes=dict(Counter(r.outcome for r in results)),
            wanted=[
                Wanted(task_id=one.task_id, reply_to=one.reply_to, correlation_id=one.correlation_id)
                for one in self.submissions
                if one.want_experiences and one.reply_to
            ],
            repeat_times=max((task.repeat_times for task in self.tasks), default=1),
        )


def cut(tasks: Sequence[TaskBody], max_repeat_times: int | None, first_run: int = 0) -> list[SliceState]:
    """Cut tasks into slices of at most ``max_repeat_times`` runs, run ids from ``first_run`` on in each task."""
    slices = []
    for task_id, task in enumerate(tasks):
        size = max_repeat_times or task.repeat_times
        for base in range(0, task.repeat_times, size):
            runs = min(size, task.repeat_times - base)
            slices.append(SliceState(task_id=task_id, run_base=first_run + base, repeat_times=runs))
    return slices


def new_ticket(
    batch: BatchId,
    tasks: Sequence[TaskBody],
    *,
    deliver: Deliver,
    lane: Lane,
    time_left: float,
    seed: int = 0,
    max_repeat_times: int | None = None,
    first_run: int = 0,
    pinned: Version | None = None,
    submissions: Sequence[SubmissionRef] = (),
) -> Ticket:
    """Return a fresh ticket for ``tasks``; the same batch id scheduled again is another ticket."""
    return Ticket(
        batch=batch,
        ticket=uuid.uuid4().hex,
        lane=lane,
        deliver=deliver,
        tasks=list(tasks),
        slices=cut(tasks, max_repeat_times, first_run),
        seed=seed,
        pinned=pinned,
        time_left=time_left,
        submissions=list(submissions),
    )
