"""Tickets: scheduled tasks with their slices, outcomes and closing manifest. No I/O."""

from __future__ import annotations

import math
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from trinity_mq.config.run import MANIFEST_RESERVE_BYTES, manifest_bytes
from trinity_mq.messages import (
    Accepted,
    BatchClosed,
    BatchId,
    Deliver,
    Lane,
    Outcome,
    TaskBody,
    TaskResult,
    Version,
    Wanted,
)

CAN_HAVE_RUNS = {"finished", "partial", "cancelled"}
"""Outcomes whose experiences go into the batch. A cancelled slice has experiences if its runner was asked to keep
them.
"""

GROUPED = 16
"""Maximum number of slices in a message."""
WANTED_BYTES = 600
"""Upper bound in bytes of the manifest entry of a submitter that wants experiences."""
UNLISTED = "lower buffer.batch_size, raise explorer.max_repeat_times_per_runner, or raise broker.max_message_bytes"


class SubmissionRef(BaseModel):
    """Submitter of an outside task, and the address for the outcome."""

    submission_id: str
    task_id: int = -1
    reply_to: str | None = None
    correlation_id: str | None = None
    want_experiences: bool = False
    traceparent: str | None = None
    """Trace header of the submission message: the submitter's trace that this task belongs to."""
    by_gateway: bool = False
    """True if the run's own gateway submitted the task. Its outcome then goes to the stream of sessions."""


class SliceState(BaseModel):
    """A slice and its first outcome."""

    task_id: int
    run_base: int
    repeat_times: int
    result: TaskResult | None = None


class Ticket(BaseModel):
    """Tasks that were scheduled together, and the outcomes of their slices. An explorer saves its tickets with its
    state, a Scheduler saves none.

    Task ids count from 0 here. On the wire, ``first_task`` is added, so that tickets that are open under the same batch
    id at the same time have distinct task ids.
    """

    batch: BatchId
    ticket: str
    lane: Lane = "train"
    deliver: Deliver = "pipeline"
    tasks: list[TaskBody]
    slices: list[SliceState]
    first_task: int = 0
    """Id on the wire of the first task."""
    seed: int = 0
    pinned: Version | None = None
    opened_beat: int = 0
    published: bool = False
    time_left: float
    """Seconds left on the batch's own clock, which runs only while the batch can make progress."""
    wait_left: float | None = None
    """Over-rollout: seconds left on the batch's clock until the unfinished slices are cut off. None: too few tasks are
    done.
    """
    keep_partial: bool = False
    """True if runners publish the finished runs of slices that they drop on a cut-off."""
    grace: float | None = None
    """Seconds left after a cut-off for finished runs that still count. None: the ticket is not cut off. A ticket that
    is cut off is no longer listed as open.
    """
    whole_tasks_only: bool = False
    """True if finished runs of tasks that were cut off do not count."""
    submissions: list[SubmissionRef] = Field(default_factory=list)
    manifest: BatchClosed | None = None
    """Closing manifest. Once saved it never changes."""
    duplicates: int = 0
    """Number of results that came after their slice had an outcome of another attempt, or was cut off."""
    grouped: int = Field(default=GROUPED, exclude=True)
    """Maximum number of slices per message, as published by this process. Not saved."""
    resent: int = Field(default=0, exclude=True)
    """Number of lost slices that this process republished. Not saved."""
    _decisions: list[SliceState] = PrivateAttr(default_factory=list)
    _slices: dict[tuple[int, int], SliceState] = PrivateAttr(default_factory=dict)
    _by_task: dict[int, list[SliceState]] = PrivateAttr(default_factory=dict)
    _missing: dict[int, int] = PrivateAttr(default_factory=dict)
    """Number of slices without an outcome, by task. Tasks whose slices all have outcomes are not in it."""

    def model_post_init(self, context: Any, /) -> None:
        """Index the slices, so that a result is looked up in constant time."""
        for task_slice in self.slices:
            self._slices[task_slice.task_id, task_slice.run_base] = task_slice
            self._by_task.setdefault(task_slice.task_id, []).append(task_slice)
            if task_slice.result is None:
                self._missing[task_slice.task_id] = self._missing.get(task_slice.task_id, 0) + 1
            else:
                self._decisions.append(task_slice)

    @property
    def is_complete(self) -> bool:
        """True if every slice has an outcome."""
        return not self._missing

    @property
    def is_open(self) -> bool:
        """True if the ticket still has slices to execute. Open tickets are listed in the heartbeats of their owner."""
        return bool(self._missing) and self.grace is None and self.manifest is None

    @property
    def finished_count(self) -> int:
        """Number of tasks whose slices all have an outcome."""
        return len(self.tasks) - len(self._missing)

    @property
    def decisions(self) -> Sequence[SliceState]:
        """Slices with an outcome, in the order in which the outcomes were recorded."""
        return self._decisions

    @property
    def results(self) -> list[TaskResult]:
        """The outcomes so far, in the order of the slices."""
        return [task_slice.result for task_slice in self.slices if task_slice.result is not None]

    @property
    def decided(self) -> int:
        """Number of slices with an outcome."""
        return len(self._decisions)

    def is_finished(self, task: int) -> bool:
        """Return whether all slices of the task have an outcome."""
        return task not in self._missing

    def record(self, result: TaskResult) -> bool:
        """Record a result if it is of a slice of this ticket that has no outcome yet, and return whether it was
        recorded. A later result of another attempt is only counted.
        """
        task_slice = self._slices.get((result.task_id - self.first_task, result.run_base))
        if task_slice is None:
            return False
        if task_slice.result is not None:
            self.duplicates += task_slice.result.attempt != result.attempt
            return False
        self._decide(task_slice, result)
        return True

    def cancel_rest(self, reason: str) -> list[int]:
        """Set the outcome *cancelled* for every slice without an outcome. Return the tasks that this completed."""
        cut_off = list(self._missing)
        for task in cut_off:
            self.decide_rest(task, "cancelled", reason)
        return cut_off

    def decide_rest(self, task: int, outcome: Outcome, reason: str) -> None:
        """Set an outcome that no runner reported for those slices of a task that have no outcome yet."""
        for task_slice in self._by_task[task]:
            if task_slice.result is None:
                result = TaskResult(
                    batch=self.batch,
                    ticket=self.ticket,
                    task_id=self.first_task + task,
                    run_base=task_slice.run_base,
                    repeat_times=task_slice.repeat_times,
                    attempt="",
                    outcome=outcome,
                    message=reason,
                    failure_kind="task" if outcome == "failed" else None,
                )
                self._decide(task_slice, result)

    def fail_unlisted(self, max_bytes: int) -> list[int]:
        """Fail the unfinished tasks whose slices do not fit into a manifest of ``max_bytes`` bytes, and return them.
        Space is assigned in the order of the tasks.
        """
        wanting_tasks = {submission.task_id for submission in self.submissions if submission.want_experiences}
        free_bytes, failed = max_bytes - MANIFEST_RESERVE_BYTES, []
        for task, slices in self._by_task.items():
            size = sum(manifest_bytes(1, task_slice.repeat_times) for task_slice in slices) + WANTED_BYTES * (
                task in wanting_tasks
            )
            if size <= free_bytes:
                free_bytes -= size
            elif task in self._missing:
                self.decide_rest(task, "failed", f"a manifest of {max_bytes} bytes has no room for it: {UNLISTED}")
                failed.append(task)
        return failed

    def results_of(self, task: int) -> list[TaskResult]:
        """Return the outcomes of the slices of a task, in the order of their runs."""
        return [task_slice.result for task_slice in self._by_task.get(task, ()) if task_slice.result is not None]

    def was_cut_off(self, task: int) -> bool:
        """Return whether a slice of the task was cancelled."""
        return any(result.outcome == "cancelled" for result in self.results_of(task))

    def counts(self, result: TaskResult) -> bool:
        """Return whether the experiences of this outcome go into the batch."""
        if result.outcome not in CAN_HAVE_RUNS or not result.parts:
            return False
        return not (self.whole_tasks_only and self.was_cut_off(result.task_id - self.first_task))

    def _decide(self, task_slice: SliceState, result: TaskResult) -> None:
        task_slice.result = result
        self._decisions.append(task_slice)
        self._missing[task_slice.task_id] -= 1
        if not self._missing[task_slice.task_id]:
            del self._missing[task_slice.task_id]

    def make_manifest(self) -> BatchClosed:
        """Return the manifest for the outcomes so far."""
        results = self.results
        return BatchClosed(
            batch=self.batch,
            ticket=self.ticket,
            accepted=[
                Accepted(task_id=r.task_id, run_base=r.run_base, attempt=r.attempt, runs=r.runs, parts=r.parts)
                for r in results
                if self.counts(r)
            ],
            outcomes=dict(Counter(r.outcome for r in results)),
            wanted=[
                Wanted(
                    task_id=self.first_task + submission.task_id,
                    reply_to=submission.reply_to,
                    correlation_id=submission.correlation_id,
                )
                for submission in self.submissions
                if submission.want_experiences and submission.reply_to
            ],
            repeat_times=max((task.repeat_times for task in self.tasks), default=1),
        )


def new_ticket(
    batch: BatchId,
    tasks: Sequence[TaskBody],
    *,
    deliver: Deliver,
    lane: Lane,
    time_left: float,
    max_repeat_times: int | None = None,
    first_run: int = 0,
    ticket: str | None = None,
    **more: Any,
) -> Ticket:
    """Return a new ticket for ``tasks``. If the same batch id is scheduled again, it gets another ticket.

    Args:
        batch: Id of the batch.
        tasks: At least one task.
        deliver: Receiver of the experiences.
        lane: Task queue of the slices.
        time_left: Seconds until the ticket is cut off.
        max_repeat_times: Maximum number of runs per slice. None: no limit.
        first_run: Id of the first run of each task.
        ticket: Ticket id, which must be unused. None: generate an id.
        more: Further fields of :class:`Ticket`.
    """
    slices = []
    for task_id, task in enumerate(tasks):
        size = max_repeat_times or task.repeat_times
        for base in range(0, task.repeat_times, size):
            runs = min(size, task.repeat_times - base)
            slices.append(SliceState(task_id=task_id, run_base=first_run + base, repeat_times=runs))
    return Ticket(
        batch=batch,
        ticket=ticket or uuid.uuid4().hex,
        lane=lane,
        deliver=deliver,
        tasks=list(tasks),
        slices=slices,
        time_left=time_left,
        **more,
    )


def check_batch_id(batch_id: BatchId) -> None:
    """Check the id of a batch: an int (no bool), or a string whose first word is an int, such as ``"123/my_task"``.

    Raises:
        ValueError: The id has another form.

    >>> check_batch_id(3), check_batch_id("3/gsm8k")
    (None, None)
    """
    if isinstance(batch_id, bool) or not isinstance(batch_id, int | str):
        kind = type(batch_id).__name__
    elif isinstance(batch_id, int) or re.match(r"-?\d+(?![\w.])", batch_id, re.ASCII):
        return
    else:
        kind = "text that does not start with an integer"
    raise ValueError(
        f"batch_id is {batch_id!r} ({kind}), wanted an integer or a string that starts with one, such as 123 or "
        '"123/my_task"'
    )


def sort_batch_id(batch_id: BatchId) -> tuple[float, int]:
    """Return the sort key of a batch id. Training batches (int ids) sort by number, each before the evaluations (string
    ids) with the same number. A string that does not start with a digit sorts last.

    >>> sorted(["3/b", 3, "4/a", 2, "x"], key=sort_batch_id)
    [2, 3, '3/b', '4/a', 'x']
    """
    if isinstance(batch_id, int):
        return (batch_id, 0)
    digits = re.match(r"\d+", batch_id)
    return (int(digits.group()), 1) if digits else (math.inf, 1)
