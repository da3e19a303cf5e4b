"""What a scheduler's done callback is told: which task is over, and what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from trinity_mq.dispatch.batch_metrics import task_status
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId
from trinity_mq.rollout.status import Status


@dataclass(frozen=True, slots=True)
class DoneTask:
    """A task of a ticket that is over, with what a done ``asyncio.Task`` can be asked."""

    ticket: Ticket
    task: int
    """Its place in the ticket."""

    @property
    def batch_id(self) -> BatchId:
        """The batch it was scheduled under."""
        return self.ticket.batch

    @property
    def task_id(self) -> int:
        """Its number among the tasks of the batch, as in ``eid.task``."""
        return self.ticket.first_task + self.task

    def done(self) -> bool:
        """True."""
        return True

    def cancelled(self) -> bool:
        """It was cut off, by a timeout, over-rollout or an abort, and nothing of it is kept."""
        if not self.ticket.was_cut_off(self.task):
            return False
        return self.ticket.whole_tasks_only or not any(one.runs for one in self.ticket.results_of(self.task))

    def exception(self) -> None:
        """None: a task that failed has a status that says so."""
        return

    def result(self) -> Status:
        """Return its status, whose runs are what was finished.

        Raises:
            asyncio.CancelledError: Nothing of it is kept.
        """
        if self.cancelled():
            raise asyncio.CancelledError(f"task {self.task_id} of batch {self.batch_id} was cut off")
        return task_status(self.ticket.results_of(self.task))
