"""The tickets of ``schedule()`` calls, from opening to end, and their completed tasks."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trinity_mq.dispatch.batch_metrics import rollout_metrics, task_status
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId, Deliver, TaskResult
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.notify import Notifier

if TYPE_CHECKING:
    from trinity_mq.workflows import Task

MAX_OPENING = 8
"""Maximum tickets opened concurrently: the broker takes longer to declare a queue than to accept a slice."""


@dataclass(frozen=True, slots=True)
class CompletedTask:
    """A task of a ticket that is done or was cut off. It has the query methods of a done ``asyncio.Task``."""

    ticket: Ticket
    task: int
    """Index of the task in the ticket."""

    @property
    def batch_id(self) -> BatchId:
        """The batch id under which the task was scheduled."""
        return self.ticket.batch

    @property
    def task_id(self) -> int:
        """Number of the task in its batch, as in ``eid.task``."""
        return self.ticket.first_task + self.task

    @property
    def results(self) -> list[TaskResult]:
        """The outcomes of the task's slices, in the order of their runs."""
        return self.ticket.results_of(self.task)

    @property
    def status(self) -> Status:
        """The task's status, computed from :attr:`results`."""
        return task_status(self.results)

    def done(self) -> bool:
        """Return True."""
        return True

    def cancelled(self) -> bool:
        """Return whether the task was cut off by a timeout, over-rollout or an abort without any kept result."""
        if not self.ticket.was_cut_off(self.task):
            return False
        return self.ticket.whole_tasks_only or not any(result.runs for result in self.results)

    def exception(self) -> None:
        """Return None: the status reports a failed task."""
        return

    def result(self) -> Status:
        """Return the task's status, which covers the finished runs.

        Raises:
            asyncio.CancelledError: The task was cut off without any kept result.
        """
        if self.cancelled():
            raise asyncio.CancelledError(f"task {self.task_id} of batch {self.batch_id} was cut off")
        return self.status


class CompletedTasks:
    """The completed tasks of one batch id, or of one caller of ``run_one``, and their tickets."""

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.done: deque[CompletedTask] = deque()
        """Completed tasks that no caller has taken, in the order of completion."""
        self.changed = Notifier()
        self.unserved: set[str] = set()
        """Ids of tickets that were cut off because nobody works on their tasks. All tasks of these tickets are
        returned, with the reason as message.
        """
        self._to_return: dict[str, int] = {}
        """Number of tasks, completed or not, that have not been returned, by ticket id."""

    @property
    def left(self) -> int:
        """Number of tasks, completed or not, that have not been returned."""
        return sum(self._to_return.values())

    @property
    def returned_tickets(self) -> list[Ticket]:
        """The tickets whose tasks have all been returned."""
        return [ticket for name, ticket in self.tickets.items() if not self._to_return[name]]

    def add(self, ticket: Ticket) -> None:
        """Add a ticket without completed tasks."""
        self.tickets[ticket.ticket] = ticket
        self._to_return[ticket.ticket] = len(ticket.tasks)

    def put(self, task: CompletedTask) -> None:
        """Add a completed task, unless its ticket was removed. A task that was cut off without any kept result is not
        returned, except for the tickets in :attr:`unserved`.
        """
        if task.ticket.ticket not in self.tickets:
            return
        if task.ticket.grace is not None and task.cancelled() and task.ticket.ticket not in self.unserved:
            self._to_return[task.ticket.ticket] -= 1
        else:
            self.done.append(task)
        self.changed.notify()

    def take(self, count: int) -> list[CompletedTask]:
        """Remove the first ``count`` completed tasks. The caller then calls :meth:`returned` or :meth:`put_back`."""
        return [self.done.popleft() for _ in range(min(count, len(self.done)))]

    def returned(self, items: Iterable[CompletedTask]) -> None:
        """Count taken tasks as returned to their caller."""
        for task in items:
            if task.ticket.ticket in self.tickets:
                self._to_return[task.ticket.ticket] -= 1
        self.changed.notify()  # other callers now wait for fewer tasks

    def put_back(self, items: Iterable[CompletedTask]) -> None:
        """Undo a :meth:`take`, except for the tasks of tickets that were removed since."""
        self.done.extendleft(reversed([task for task in items if task.ticket.ticket in self.tickets]))
        self.changed.notify()

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket and its tasks."""
        self.unserved.discard(ticket.ticket)
        if self.tickets.pop(ticket.ticket, None) is not None and self._to_return.pop(ticket.ticket):
            self.done = deque(task for task in self.done if task.ticket is not ticket)
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
        """Return the first of ``count`` consecutive ids for a ticket of ``batch``. Tickets with the same object
        ``part_of`` get the same ids; None: the ticket gets new ids.
        """
        numbers = self._batches[batch]
        numbers.tickets += 1
        for whole, first in numbers.parts:
            if whole is part_of:
                return first
        first = numbers.following
        numbers.following += count
        if part_of is not None:
            numbers.parts.append((part_of, first))
        return first

    def give_back(self, batch: BatchId) -> None:
        """Count a ticket of ``batch`` as ended. After the last open ticket of a batch id, ids start at 0 again; until
        then, the ids of ended tickets are not assigned again.
        """
        self._batches[batch].tickets -= 1
        if not self._batches[batch].tickets:
            del self._batches[batch]


class ScheduledTickets:
    """Opens tickets in the order of their scheduling, collects their completed tasks, and ends them.

    Args:
        dispatcher: Opens and follows the tickets; this object sets its callbacks.
        collector: Holds the experiences of tickets that deliver to their caller.
        on_completed: Called for each task that is done or was cut off.
    """

    def __init__(
        self, dispatcher: Dispatcher, collector: Collector, on_completed: Callable[[CompletedTask], None]
    ) -> None:
        self.batches: dict[BatchId, CompletedTasks] = {}
        self.unfinished = 0
        """Number of scheduled tasks that are not completed."""
        self.completed = 0
        """Number of tasks that were ever completed, or cut off."""
        self._dispatcher, self._collector, self._on_completed = dispatcher, collector, on_completed
        self._batch_of: dict[str, CompletedTasks] = {}
        """The object that receives the completed tasks of a ticket, by ticket id."""
        self._numbers = TaskNumbers()
        self._to_open: deque[Ticket] = deque()
        self._added = Notifier()
        dispatcher.on_declared, dispatcher.on_task_done = collector.opened, self._task_done

    @property
    def all_batches(self) -> set[CompletedTasks]:
        """The completed tasks of all batch ids and of all ``run_one`` callers that have open tickets."""
        return set(self._batch_of.values())

    def add(
        self, tasks: Sequence[Task], batch_id: BatchId, batch: CompletedTasks, *, part_of: object = None, **more: Any
    ) -> Ticket:
        """Schedule ``tasks`` in a new ticket and return the ticket; ``batch`` receives the completed tasks. ``more``
        has further fields of the ticket, among them ``deliver``.
        """
        deliver: Deliver = more["deliver"]
        if deliver != "pipeline":
            more["keep_partial"] = True
        ticket = self._dispatcher.make_ticket(
            [task.to_body() for task in tasks],
            batch_id,
            lane="eval" if tasks[0].is_eval else "train",
            first_task=self._numbers.take(batch_id, len(tasks), part_of),
            **more,
        )
        self._dispatcher.tickets[ticket.ticket] = ticket
        self._to_open.append(ticket)
        self._batch_of[ticket.ticket] = batch
        batch.add(ticket)
        self.unfinished += len(tasks)
        if deliver == "caller":
            self._collector.expect(ticket)
        self._added.notify()
        return ticket

    async def run(self) -> None:
        """Open scheduled tickets, several concurrently, until cancelled. A later call opens the remaining tickets."""
        await self._dispatcher.caught_up()
        self._to_open = deque(ticket for ticket in self._dispatcher.tickets.values() if not ticket.published)
        async with asyncio.TaskGroup() as group:
            for _ in range(MAX_OPENING):
                group.create_task(self._open_next(), name="open")

    async def _open_next(self) -> None:
        while True:
            await self._added.until(lambda: bool(self._to_open))
            ticket = self._to_open.popleft()
            if ticket.ticket in self._dispatcher.tickets:
                await self._dispatcher.open(ticket)

    async def abort(self, batch: CompletedTasks) -> None:
        """Cancel and end the tickets of a batch. None of their results are returned afterwards."""
        for ticket in list(batch.tickets.values()):
            ticket.grace, ticket.whole_tasks_only = 0.0, True
            self._dispatcher.cancel_rest(ticket, "aborted")
            await self._end(batch, ticket)

    async def end_returned(self, batch: CompletedTasks) -> None:
        """End the tickets whose tasks have all been returned."""
        for ticket in batch.returned_tickets:
            await self._end(batch, ticket)

    async def _end(self, batch: CompletedTasks, ticket: Ticket) -> None:
        """Forget a ticket whose slices all have an outcome. A ticket for the pipeline is closed with its manifest."""
        if self._batch_of.pop(ticket.ticket, None) is None:
            return  # another caller has ended the ticket
        batch.drop(ticket)
        if self.batches.get(ticket.batch) is batch and not batch.tickets:
            del self.batches[ticket.batch]
        self._numbers.give_back(ticket.batch)
        if ticket.deliver == "pipeline":
            metrics = rollout_metrics(ticket)
            await self._dispatcher.close(ticket, ticket.make_manifest().model_copy(update={"metrics": metrics}))
        self._dispatcher.tickets.pop(ticket.ticket, None)
        self._dispatcher.heartbeat_now()
        if ticket.deliver == "caller":
            self._collector.forget(ticket)

    def _task_done(self, ticket: Ticket, task: int) -> None:
        self.unfinished -= 1
        self.completed += 1
        completed_task = CompletedTask(ticket, task)
        self._batch_of[ticket.ticket].put(completed_task)
        self._on_completed(completed_task)
