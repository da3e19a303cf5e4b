"""Tickets of ``schedule()`` calls: opened in their order, their tasks put where they are fetched, cut off, ended."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import rollout_metrics, task_status
from trinity_mq.dispatch.collector import Collector
from trinity_mq.dispatch.dispatcher import Dispatcher
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.dispatch.usable_clock import UsableClock
from trinity_mq.messages import BatchId, Deliver, TaskResult
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.notify import Notifier
from trinity_mq.scheduler.completed_tasks import CompletedTask, CompletedTasks, TaskNumbers

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)

OPENING = 8
"""Tickets opened at a time: to declare a queue takes the broker longer than to take in a slice."""


class Shelving(Dispatcher, ABC):
    """What :class:`~trinity_mq.scheduler.scheduler.Scheduler` is made of, under its documented interface.

    Args as for it and for :class:`Dispatcher`.
    """

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        owner: str,
        save: Callable[[], Awaitable[None]],
        next_heartbeat: Callable[[], int],
        heartbeat_soon: Callable[[], None],
        tickets: dict[str, Ticket] | None,
        results_offset: int | None,
    ) -> None:
        super().__init__(
            config,
            bus=bus,
            topology=topology,
            owner=owner,
            save=save,
            next_heartbeat=next_heartbeat,
            tickets=tickets,
            results_offset=results_offset,
        )
        self.heartbeat_soon = heartbeat_soon
        self._shelves: dict[BatchId, CompletedTasks] = {}
        self._shelf_of: dict[str, CompletedTasks] = {}
        """By ticket: the shelf of its batch id, or its caller's own."""
        self._in_hand: Counter[str] = Counter()
        """By ticket: callers who have taken tasks and wait for their experiences; its queue is theirs until then."""
        self._numbers = TaskNumbers()
        self._undone = 0
        """Scheduled tasks that are neither done nor given up."""
        self._ended = 0
        """Tasks that were done or given up, ever."""
        self._to_open: dict[str, Ticket] = {}
        self._asked = Notifier()
        """Something was scheduled, or the opening of something ended."""
        self._clock = UsableClock(bus)
        self._collector = Collector(bus, topology, config, owner)

    @abstractmethod
    async def _or_failure(self, waiting: Any) -> None:
        """Await ``waiting``, but raise at once what ended the background task."""

    # -- tickets in

    def _schedule(
        self,
        tasks: Sequence[Task],
        batch_id: BatchId,
        shelf: CompletedTasks,
        *,
        deliver: Deliver,
        first_run: int = 0,
        part_of: object = None,
    ) -> Ticket:
        more: dict[str, Any] = {"keep_partial": True} if deliver == "caller" else {}
        ticket = self.make_ticket(
            [task.to_body() for task in tasks],
            batch_id,
            deliver=deliver,
            lane="eval" if tasks[0].is_eval else "train",
            first_run=first_run,
            first_task=self._numbers.take(batch_id, len(tasks), part_of),
            **more,
        )
        self.tickets[ticket.ticket] = self._to_open[ticket.ticket] = ticket
        self._shelf_of[ticket.ticket] = shelf
        shelf.add(ticket)
        self._undone += len(tasks)
        if deliver == "caller":
            self._collector.expect(ticket)
        self._asked.notify()
        return ticket

    async def _open_scheduled(self) -> None:
        """Open what is asked for, several at a time; what a stop interrupts is opened by the next start."""
        await self._caught_up.wait()
        opening: set[str] = set()

        def following() -> Ticket | None:
            if len(opening) >= OPENING:
                return None
            return next((ticket for name, ticket in self._to_open.items() if name not in opening), None)

        async def open_one(ticket: Ticket) -> None:
            if ticket.ticket in self.tickets:
                await self.open(ticket)
            del self._to_open[ticket.ticket]
            opening.discard(ticket.ticket)
            self._asked.notify()

        async with asyncio.TaskGroup() as group:
            while True:
                await self._asked.until(lambda: following() is not None)
                while (ticket := following()) is not None:
                    opening.add(ticket.ticket)
                    group.create_task(open_one(ticket), name=f"open {ticket.ticket}")

    def on_declared(self, ticket: Ticket) -> None:
        """Its experiences can be read."""
        self._collector.opened(ticket)

    # -- tasks out

    def on_task_done(self, ticket: Ticket, task: int) -> None:
        """Put a task of ours where it is fetched; one that was cut off only where there is something of it to keep."""
        shelf = self._shelf_of.get(ticket.ticket)
        if shelf is None:
            return
        self._undone -= 1
        self._ended += 1
        one, results = CompletedTask(ticket, task), ticket.results_of(task)
        cut_off = ticket.grace is not None and ticket.was_cut_off(task)
        if cut_off and (ticket.whole_tasks_only or not any(result.runs for result in results)):
            shelf.give_up(one)
        else:
            shelf.put(one)

    async def _results_of(
        self, shelf: CompletedTasks | None, min_num: int | None, timeout: float | None, clear_timeout_tasks: bool
    ) -> tuple[list[Status], list[Experience]]:
        if shelf is None or not shelf.left:
            return [], []
        async with self._reading(shelf):
            count = await self._wait_for_tasks(shelf, min_num, timeout, clear_timeout_tasks)
        taken = shelf.take(count)
        wanted: dict[str, tuple[Ticket, list[TaskResult]]] = {}
        for ticket, task in taken:
            if ticket.deliver == "caller":
                wanted.setdefault(ticket.ticket, (ticket, []))[1].extend(ticket.results_of(task))
        self._in_hand.update(wanted.keys())
        try:
            for ticket, results in wanted.values():
                await self._collector.ensure(ticket, results)
        except BaseException:
            shelf.put_back(taken)
            raise
        finally:
            self._in_hand.subtract(wanted.keys())
            for name in wanted.keys() - self._shelf_of.keys():
                self._in_hand.pop(name, None)  # aborted meanwhile
        statuses: list[Status] = []
        experiences: list[Experience] = []
        for ticket, task in taken:
            results = ticket.results_of(task)
            statuses.append(task_status(results))
            if ticket.deliver == "caller":
                experiences += self._collector.pop(ticket, results)
        await self._end_returned(shelf)
        return statuses, experiences

    @asynccontextmanager
    async def _reading(self, shelf: CompletedTasks) -> AsyncIterator[None]:
        """Read the experiences of a shelf meanwhile: at the end little is left to be read."""
        tickets = [ticket for ticket in shelf.tickets.values() if ticket.deliver == "caller"]
        loop = asyncio.get_running_loop()
        readers = [loop.create_task(self._collector.read(ticket)) for ticket in tickets]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            if readers:
                await asyncio.wait(readers)
            for reader in readers:
                if not reader.cancelled() and (error := reader.exception()) is not None:
                    log.warning("reading_failed", reason=str(error))  # the rest is read by who takes it

    async def _wait_for_tasks(
        self, shelf: CompletedTasks, min_num: int | None, timeout: float | None, clear: bool
    ) -> int:
        """Wait, cancel the rest where that is asked for, and return how many tasks the caller gets."""
        left = shelf.left
        wanted = left if min_num is None else min_num
        if wanted > left:
            batch = next(iter(shelf.tickets.values())).batch
            log.warning("min_num_clamped", batch=batch, min_num=min_num, tasks=left)
            wanted = left
        over_rollout = self.config.explorer.over_rollout
        # others may take or give up some meanwhile
        in_time = await self._wait_for(
            shelf.changed, lambda: len(shelf.done) >= min(wanted, shelf.left), self._seconds(timeout)
        )
        if in_time and not (over_rollout.ratio and min_num is not None):
            return wanted
        if in_time:
            in_time = await self._wait_for(
                shelf.changed, lambda: len(shelf.done) >= shelf.left, over_rollout.wait_after_min
            )
        if clear and not in_time:
            await self._cut_short(shelf)
        return len(shelf.done)

    async def _cut_short(self, shelf: CompletedTasks, keep: bool | None = None) -> None:
        """Cancel what is not done: runners hear of it at once. With ``keep`` (default: as configured) finished runs of
        such tasks make them done, and runners have a moment to send them.
        """
        explorer = self.config.explorer
        keep = explorer.over_rollout.return_partial_tasks if keep is None else keep
        tickets = [ticket for ticket in shelf.tickets.values() if not ticket.is_complete]
        for ticket in tickets:
            ticket.grace, ticket.whole_tasks_only = explorer.cancel_grace, not keep
        if not tickets:
            return
        self.heartbeat_soon()
        if keep and any(ticket.keep_partial and ticket.published for ticket in tickets):
            await self._wait_for(
                shelf.changed, lambda: all(ticket.is_complete for ticket in tickets), explorer.cancel_grace
            )
        for ticket in tickets:
            for task in ticket.cancel_rest("cleared by its scheduler"):
                self.on_task_done(ticket, task)
        self.changed.notify()

    async def _abort(self, shelf: CompletedTasks) -> None:
        for ticket in list(shelf.tickets.values()):
            ticket.grace, ticket.whole_tasks_only = 0.0, True
            for task in ticket.cancel_rest("aborted"):
                self.on_task_done(ticket, task)
            await self._end(shelf, ticket)
        self.changed.notify()

    async def _end_returned(self, shelf: CompletedTasks) -> None:
        """End the tickets of which nothing is left to be returned."""
        over = [one for one in shelf.tickets.values() if not shelf.left_of(one) and not self._in_hand[one.ticket]]
        for ticket in over:
            await self._end(shelf, ticket)

    async def _end(self, shelf: CompletedTasks, ticket: Ticket) -> None:
        """Forget a ticket, all of whose slices have an outcome; one for the pipeline is closed with its manifest."""
        if self._shelf_of.pop(ticket.ticket, None) is None:
            return  # another caller of this batch was first
        shelf.drop(ticket)
        if self._shelves.get(ticket.batch) is shelf and not shelf.tickets:
            del self._shelves[ticket.batch]
        self._numbers.give_back(ticket.batch)
        self._in_hand.pop(ticket.ticket, None)
        if ticket.deliver == "pipeline":
            await self.close(ticket, ticket.make_manifest().model_copy(update={"metrics": rollout_metrics(ticket)}))
        self.tickets.pop(ticket.ticket, None)
        self.heartbeat_soon()
        if ticket.deliver == "caller":
            await self._collector.forget(ticket)
        await self._save()

    # -- waiting

    def _has_moved(self, before: int) -> bool:
        return self._ended > before or not self._undone

    async def _waiting_slices(self) -> int:
        """Return how many slices no runner has taken yet."""
        lanes = (self.topology.tasks_train, self.topology.tasks_eval)
        return sum([await self.bus.depth(lane.name) or 0 for lane in lanes])

    def _seconds(self, timeout: float | None) -> float:
        return self.config.explorer.batch_timeout if timeout is None else timeout

    async def _wait_for(self, changed: Notifier, predicate: Callable[[], bool], seconds: float) -> bool:
        """Return True once ``predicate`` holds, False after ``seconds`` of a usable bus."""
        try:
            async with self._clock.timeout(seconds):
                await self._or_failure(changed.until(predicate))
        except TimeoutError:
            return False
        return True
