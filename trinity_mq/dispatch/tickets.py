"""Tickets: the state of scheduled tasks, with their slices, the outcomes and the closing manifest. No I/O."""

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
"""Outcomes whose experiences go into the batch; a cancelled slice has some if its runner was asked to keep them."""

GROUPED = 16
"""Most slices in one message."""
WANTED_BYTES = 600
"""Upper bound of the bytes that a submitter who wants experiences takes in a manifest."""
UNLISTED = "lower buffer.batch_size, raise explorer.max_repeat_times_per_runner, or raise broker.max_message_bytes"


class SubmissionRef(BaseModel):
    """The submitter of a task from outside, and how its outcome is sent to it."""

    submission_id: str
    task_id: int = -1
    reply_to: str | None = None
    correlation_id: str | None = None
    want_experiences: bool = False
    traceparent: str | None = None
    """Header of its message: the work of the submitter's that it is part of."""
    by_gateway: bool = False
    """The run's own gateway submitted the task; its outcome goes to the stream of sessions."""


class SliceState(BaseModel):
    """A slice and its first outcome."""

    task_id: int
    run_base: int
    repeat_times: int
    result: TaskResult | None = None


class Ticket(BaseModel):
    """Tasks scheduled together and the outcomes of their slices; saved with the explorer's state.

    Tasks are counted from 0 here. On the wire a task's id is ``first_task`` more, so that what is scheduled under one
    batch id at a time has ids of its own each.
    """

    batch: BatchId
    ticket: str
    lane: Lane = "train"
    deliver: Deliver = "pipeline"
    tasks: list[TaskBody]
    slices: list[SliceState]
    first_task: int = 0
    """Id of the first task on the wire."""
    seed: int = 0
    pinned: Version | None = None
    opened_beat: int = 0
    published: bool = False
    time_left: float
    """Seconds of the batch's own clock, which runs only while the batch can move."""
    wait_left: float | None = None
    """Over-rollout: seconds of that clock since enough tasks are done, until the rest is cut off; None: too few are."""
    keep_partial: bool = False
    """Runners publish the finished runs of slices that they drop on a cut-off."""
    grace: float | None = None
    """Seconds in which such runs still count; None while nothing is cut off. A ticket that is cut off is not listed as
    open any more."""
    whole_tasks_only: bool = False
    """Finished runs of tasks that were cut off do not count."""
    submissions: list[SubmissionRef] = Field(default_factory=list)
    manifest: BatchClosed | None = None
    """Once saved it never changes."""
    duplicates: int = 0
    """Outcomes beyond the first of a slice."""
    grouped: int = Field(default=GROUPED, exclude=True)
    """Most slices of it in one message, as this process published them; not saved."""
    resent: int = Field(default=0, exclude=True)
    """Slices that this process sent again because they were lost; not saved."""
    _decisions: list[SliceState] = PrivateAttr(default_factory=list)
    _slices: dict[tuple[int, int], SliceState] = PrivateAttr(default_factory=dict)
    _by_task: dict[int, list[SliceState]] = PrivateAttr(default_factory=dict)
    _missing: dict[int, int] = PrivateAttr(default_factory=dict)
    """Slices without an outcome, by task; tasks that have them all are not in it."""

    def model_post_init(self, context: Any, /) -> None:
        """Index the slices: each result is looked up in no more time than it takes for one slice."""
        for task_slice in self.slices:
            self._slices[task_slice.task_id, task_slice.run_base] = task_slice
            self._by_task.setdefault(task_slice.task_id, []).append(task_slice)
            if task_slice.result is None:
                self._missing[task_slice.task_id] = self._missing.get(task_slice.task_id, 0) + 1
            else:
                self._decisions.append(task_slice)

    @property
    def is_complete(self) -> bool:
        """Every slice has an outcome."""
        return not self._missing

    @property
    def is_open(self) -> bool:
        """Slices of it are still to be executed; such tickets are listed in their owner's heartbeats."""
        return bool(self._missing) and self.grace is None and self.manifest is None

    @property
    def finished_count(self) -> int:
        """Number of tasks whose slices all have an outcome."""
        return len(self.tasks) - len(self._missing)

    @property
    def decisions(self) -> Sequence[SliceState]:
        """The slices that have an outcome, in the order in which they got it."""
        return self._decisions

    @property
    def decided(self) -> int:
        """Number of slices that have an outcome."""
        return len(self._decisions)

    def is_finished(self, task: int) -> bool:
        """All slices of the task have an outcome."""
        return task not in self._missing

    def record(self, result: TaskResult) -> bool:
        """Record a result; return True when it is the first of its slice. Later ones are only counted."""
        task_slice = self._slices.get((result.task_id - self.first_task, result.run_base))
        if task_slice is None:
            return False
        if task_slice.result is not None:
            self.duplicates += task_slice.result.attempt != result.attempt
            return False
        self._decide(task_slice, result)
        return True

    def cancel_rest(self, reason: str) -> list[int]:
        """Give every slice that has no outcome the outcome *cancelled*; return the tasks that this ended."""
        cut_off = list(self._missing)
        for task in cut_off:
            self.decide_rest(task, "cancelled", reason)
        return cut_off

    def decide_rest(self, task: int, outcome: Outcome, reason: str) -> None:
        """Give every slice of a task that has no outcome this one, which no runner reports."""
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
        """Fail the tasks whose slices a manifest of ``max_bytes`` has no room for; return them."""
        wanted = {one.task_id for one in self.submissions if one.want_experiences}
        left, failed = max_bytes - MANIFEST_RESERVE_BYTES, []
        for task, slices in self._by_task.items():
            size = sum(manifest_bytes(1, one.repeat_times) for one in slices) + WANTED_BYTES * (task in wanted)
            if size <= left:
                left -= size
            elif task in self._missing:
                self.decide_rest(task, "failed", f"a manifest of {max_bytes} bytes has no room for it: {UNLISTED}")
                failed.append(task)
        return failed

    def results_of(self, task: int) -> list[TaskResult]:
        """Return the outcomes of a task's slices, in order of their runs."""
        return [task_slice.result for task_slice in self._by_task.get(task, ()) if task_slice.result is not None]

    def was_cut_off(self, task: int) -> bool:
        """A slice of the task was cancelled."""
        return any(result.outcome == "cancelled" for result in self.results_of(task))

    def counts(self, result: TaskResult) -> bool:
        """The experiences of this outcome go into the batch."""
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
        """Return the manifest of the outcomes so far."""
        results = [task_slice.result for task_slice in self.slices if task_slice.result is not None]
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
                Wanted(task_id=self.first_task + one.task_id, reply_to=one.reply_to, correlation_id=one.correlation_id)
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
    max_repeat_times: int | None = None,
    first_run: int = 0,
    ticket: str | None = None,
    **more: Any,
) -> Ticket:
    """Return a fresh ticket for ``tasks``; the same batch id scheduled again is another ticket.

    Args:
        batch: The batch id.
        tasks: At least one.
        deliver: Receiver of the experiences.
        lane: The task queue.
        time_left: Seconds until the ticket is cut off.
        max_repeat_times: Upper bound of the runs of one slice.
        first_run: Id of the first run of each task.
        ticket: Its id, which no other ticket has had; None: a new one.
        more: Further fields of :class:`Ticket`.
    """
    return Ticket(
        batch=batch,
        ticket=ticket or uuid.uuid4().hex,
        lane=lane,
        deliver=deliver,
        tasks=list(tasks),
        slices=cut(tasks, max_repeat_times, first_run),
        time_left=time_left,
        **more,
    )


def sort_batch_id(batch_id: BatchId) -> tuple[float, int]:
    """Return the sort key of a batch id: training batches by number, each before the evaluations that carry its number.

    >>> sorted(["3/b", 3, "4/a", 2, "x"], key=sort_batch_id)
    [2, 3, '3/b', '4/a', 'x']
    """
    if isinstance(batch_id, int):
        return (batch_id, 0)
    digits = re.match(r"\d+", batch_id)
    return (int(digits.group()), 1) if digits else (math.inf, 1)
