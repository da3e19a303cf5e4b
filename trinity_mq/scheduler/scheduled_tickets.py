"""The tickets of ``schedule()`` calls, from their opening to their end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trinity_mq.dispatch.batch_metrics import rollout_metrics
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId, Deliver
from trinity_mq.runtime.notify import Notifier
from trinity_mq.scheduler.completed_tasks import CompletedTask, CompletedTasks, TaskNumbers

if TYPE_CHECKING:
    from trinity_mq.workflows import Task

MAX_OPENING = 8
"""Tickets opened at a time: to declare a queue takes the broker longer than to take in a slice."""


class ScheduledTickets:
    """Opens tickets in the order of their scheduling, collects their completed tasks, and ends them.

    Args:
        dispatcher: Opens and follows the tickets; its callbacks become this object's.
        collector: Holds the experiences of tickets whose caller gets them.
        on_completed: Called for each task that is done or cut off.
    """

    def __init__(
        self, dispatcher: Dispatcher, collector: Collector, on_completed: Callable[[CompletedTask], None]
    ) -> None:
        self.batches: dict[BatchId, CompletedTasks] = {}
        self.unfinished = 0
        """Number of scheduled tasks that are not completed."""
        self.completed = 0
        """Number of tasks completed since the beginning."""
        self._dispatcher, self._collector, self._on_completed = dispatcher, collector, on_completed
        self._batch_of: dict[str, CompletedTasks] = {}
        """By ticket: the tasks of its batch id, or of its ``run_one`` caller."""
        self._numbers = TaskNumbers()
        self._to_open: deque[Ticket] = deque()
        self._added = Notifier()
        dispatcher.on_declared, dispatcher.on_task_done = collector.opened, self._task_done

    @property
    def all_batches(self) -> set[CompletedTasks]:
        """The tasks of all batch ids and callers."""
        return set(self._batch_of.values())

    def add(
        self, tasks: Sequence[Task], batch_id: BatchId, batch: CompletedTasks, *, part_of: object = None, **more: Any
    ) -> Ticket:
        """Schedule ``tasks``; ``batch`` receives those that are completed."""
        deliver: Deliver = more["deliver"]
        if deliver == "caller":
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
        """Open what is scheduled, several tickets at a time, until cancelled; the next call opens what is left."""
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
        """Cancel and end the tickets of a batch; nothing of them is returned any more."""
        for ticket in list(batch.tickets.values()):
            ticket.grace, ticket.whole_tasks_only = 0.0, True
            self._dispatcher.cancel_rest(ticket, "aborted")
            await self._end(batch, ticket)

    async def end_returned(self, batch: CompletedTasks) -> None:
        """End the tickets of which nothing is left to be returned."""
        for ticket in batch.returned_tickets:
            await self._end(batch, ticket)

    async def _end(self, batch: CompletedTasks, ticket: Ticket) -> None:
        """Forget a ticket, all of whose slices have an outcome; one for the pipeline is closed with its manifest."""
        if self._batch_of.pop(ticket.ticket, None) is None:
            return  # another caller of this batch was first
        batch.drop(ticket)
        if self.batches.get(ticket.batch) is batch and not batch.tickets:
            del self.batches[ticket.batch]
        self._numbers.give_back(ticket.batch)
        if ticket.deliver == "pipeline":
            metrics = rollout_metrics(ticket)
            await self._dispatcher.close(ticket, ticket.make_manifest().model_copy(update={"metrics": metrics}))
        self._dispatcher.tickets.pop(ticket.ticket, None)
        self._dispatcher.heartbeat_soon()
        if ticket.deliver == "caller":
            await self._collector.forget(ticket)

    def _task_done(self, ticket: Ticket, task: int) -> None:
        self.unfinished -= 1
        self.completed += 1
        one = CompletedTask(ticket, task)
        self._batch_of[ticket.ticket].put(one)
        self._on_completed(one)
