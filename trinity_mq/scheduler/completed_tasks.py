"""What was scheduled and not yet returned, by batch id, and what of it is done, the first one done first. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId
from trinity_mq.runtime.notify import Notifier


class CompletedTask(NamedTuple):
    """A task that is done."""

    ticket: Ticket
    task: int
    """Its place in the ticket."""


class CompletedTasks:
    """The tickets of one batch id, or the one ticket of a caller who shares it with nobody."""

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}
        self.done: deque[CompletedTask] = deque()
        """Done and not yet returned, the first one done first."""
        self.changed = Notifier()
        self._to_return: dict[str, int] = {}
        """By ticket: tasks not yet returned and not given up."""

    @property
    def left(self) -> int:
        """Tasks not yet returned, done or not."""
        return sum(self._to_return.values())

    def left_of(self, ticket: Ticket) -> int:
        """Return how many tasks of ``ticket`` are not yet returned, done or not."""
        return self._to_return.get(ticket.ticket, 0)

    def add(self, ticket: Ticket) -> None:
        """Put up a ticket none of whose tasks is done."""
        self.tickets[ticket.ticket] = ticket
        self._to_return[ticket.ticket] = len(ticket.tasks)

    def put(self, one: CompletedTask) -> None:
        """A task is done."""
        if one.ticket.ticket in self.tickets:
            self.done.append(one)
            self.changed.notify()

    def give_up(self, one: CompletedTask) -> None:
        """A task was cut off and is never returned."""
        if one.ticket.ticket in self.tickets:
            self._to_return[one.ticket.ticket] -= 1
            self.changed.notify()

    def take(self, count: int) -> list[CompletedTask]:
        """Return the first ``count`` that are done: they are the caller's now."""
        return self.remove(list(islice(self.done, count)))

    def look(self, count: int) -> list[CompletedTask]:
        """Return the first ``count`` that are done; they stay. Those without experiences are the caller's now."""
        seen = list(islice(self.done, count))
        self.remove([one for one in seen if one.ticket.deliver != "caller"])
        return seen

    def remove(self, items: Sequence[CompletedTask]) -> list[CompletedTask]:
        """Take ``items``, which are in the order in which they lie here."""
        taken = iter(items)
        following = next(taken, None)
        kept: list[CompletedTask] = []
        while following is not None:
            one = self.done.popleft()
            if one is following:
                self._to_return[one.ticket.ticket] -= 1
                following = next(taken, None)
            else:
                kept.append(one)
        self.done.extendleft(reversed(kept))
        if items:
            self.changed.notify()  # who waits for them as well waits for fewer now
        return list(items)

    def put_back(self, items: Iterable[CompletedTask]) -> None:
        """Undo a :meth:`take`, but for tickets that are gone."""
        for one in reversed([one for one in items if one.ticket.ticket in self.tickets]):
            self.done.appendleft(one)
            self._to_return[one.ticket.ticket] += 1
        self.changed.notify()

    def drop(self, ticket: Ticket) -> None:
        """Forget a ticket."""
        if self.tickets.pop(ticket.ticket, None) is not None and self._to_return.pop(ticket.ticket):
            self.done = deque(one for one in self.done if one.ticket is not ticket)
            self.changed.notify()


class TaskNumbers:
    """Ids of tasks that are unique among what is open under one batch id, whoever scheduled it."""

    def __init__(self) -> None:
        self._next: dict[BatchId, int] = {}
        self._open: dict[BatchId, int] = {}
        self._known: dict[BatchId, list[tuple[object, int]]] = {}

    def take(self, batch: BatchId, count: int, part_of: object = None) -> int:
        """Return the first of ``count`` ids. ``part_of``: one id for all parts of the same object."""
        self._open[batch] = self._open.get(batch, 0) + 1
        for known, number in self._known.get(batch, ()) if part_of is not None else ():
            if known is part_of:
                return number
        first = self._next.get(batch, 0)
        self._next[batch] = first + count
        if part_of is not None:
            self._known.setdefault(batch, []).append((part_of, first))
        return first

    def give_back(self, batch: BatchId) -> None:
        """A ticket is over; after the last one ids begin at 0 again."""
        self._open[batch] -= 1
        if not self._open[batch]:
            del self._open[batch]
            self._next.pop(batch, None)
            self._known.pop(batch, None)
