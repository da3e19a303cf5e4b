"""Scheduled tasks that are completed and wait to be returned, in the order in which they were completed. No I/O."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from trinity_mq.dispatch.batch_metrics import task_status
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId, TaskResult
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.notify import Notifier


@dataclass(frozen=True, slots=True)
class CompletedTask:
    """A task of a ticket that is done or cut off; it can be asked what a done ``asyncio.Task`` can."""

    ticket: Ticket
    task: int
    """Index in the ticket."""

    @property
    def batch_id(self) -> BatchId:
        """The batch id that it was scheduled under."""
        return self.ticket.batch

    @property
    def task_id(self) -> int:
        """Its number among the tasks of the batch, as in ``eid.task``."""
        return self.ticket.first_task + self.task

    @property
    def results(self) -> list[TaskResult]:
        """The outcomes of its slices, in order of their runs."""
        return self.ticket.results_of(self.task)

    @property
    def status(self) -> Status:
        """The status made of these outcomes."""
        return task_status(self.results)

    def done(self) -> bool:
        """Return True."""
        return True

    def cancelled(self) -> bool:
        """Say whether it was cut off by a timeout, over-rollout or an abort, and nothing of it is kept."""
        if not self.ticket.was_cut_off(self.task):
            return False
        return self.ticket.whole_tasks_only or not any(result.runs for result in self.results)

    def exception(self) -> None:
        """Return None: a task that failed has a status that says so."""
        return

    def result(self) -> Status:
        """Return its status, which covers the finished runs.

        Raises:
            asyncio.CancelledError: Nothing of it is kept.
        """
        if self.cancelled():
            raise asyncio.CancelledError(f"task {self.task_id} of batch {self.batch_id} was cut off")
        return self.status


class CompletedTasks:
    """The completed tasks of one batch id, or of one caller of ``run_one``, and the tickets that they belong to."""

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.done: deque[CompletedTask] = deque()
        """Tasks to be returned, the one completed first is first."""
        self.changed = Notifier()
        self._to_return: dict[str, int] = {}
        """By ticket: number of its tasks, completed or not, that are still to be returned."""

    @property
    def left(self) -> int:
        """Number of tasks still to be returned, completed or not."""
        return sum(self._to_return.values())

    @property
    def returned_tickets(self) -> list[Ticket]:
        """The tickets of which nothing is left to be returned."""
        return [ticket for name, ticket in self.tickets.items() if not self._to_return[name]]

    def add(self, ticket: Ticket) -> None:
        """Add a ticket none of whose tasks is completed."""
        self.tickets[ticket.ticket] = ticket
        self._to_return[ticket.ticket] = len(ticket.tasks)

    def put(self, one: CompletedTask) -> None:
        """Add a task that was completed; one that was cut off and of which nothing is kept is never returned."""
        if one.ticket.ticket not in self.tickets:
            return
        if one.ticket.grace is not None and one.cancelled():
            self._to_return[one.ticket.ticket] -= 1
        else:
            self.done.append(one)
        self.changed.notify()

    def take(self, count: int) -> list[CompletedTask]:
        """Remove the first ``count`` completed tasks; :meth:`returned` or :meth:`put_back` follows."""
        return [self.done.popleft() for _ in range(min(count, len(self.done)))]

    def returned(self, items: Iterable[CompletedTask]) -> None:
        """Count taken tasks as returned to their caller."""
        for one in items:
            if one.ticket.ticket in self.tickets:
                self._to_return[one.ticket.ticket] -= 1
        self.changed.notify()  # other callers now wait for fewer

    def put_back(self, items: Iterable[CompletedTask]) -> None:
        """Undo a :meth:`take`, except for tickets that were removed meanwhile."""
        self.done.extendleft(reversed([one for one in items if one.ticket.ticket in self.tickets]))
        self.changed.notify()

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket and its tasks."""
        if self.tickets.pop(ticket.ticket, None) is not None and self._to_return.pop(ticket.ticket):
            self.done = deque(one for one in self.done if one.ticket is not ticket)
            self.changed.notify()


@dataclass(slots=True)
class _Numbers:
    following: int = 0
    tickets: int = 0
    parts: list[tuple[object, int]] = field(default_factory=list)


class TaskNumbers:
    """Assigns task ids that are unique among the open tickets of one batch id."""

    def __init__(self) -> None:
        self._batches: defaultdict[BatchId, _Numbers] = defaultdict(_Numbers)

    def take(self, batch: BatchId, count: int, part_of: object = None) -> int:
        """Return the first of ``count`` ids. Tickets of the same object ``part_of`` share one id."""
        numbers = self._batches[batch]
        numbers.tickets += 1
        for known, first in numbers.parts:
            if known is part_of:
                return first
        first = numbers.following
        numbers.following += count
        if part_of is not None:
            numbers.parts.append((part_of, first))
        return first

    def give_back(self, batch: BatchId) -> None:
        """End a ticket; after the last one ids begin at 0 again."""
        self._batches[batch].tickets -= 1
        if not self._batches[batch].tickets:
            del self._batches[batch]
