"""The Scheduler: tasks in, statuses and experiences out, with the documented waits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.messages import BatchId, Deliver
from trinity_mq.scheduling.batch_metrics import task_status
from trinity_mq.scheduling.collector import Collector
from trinity_mq.scheduling.dispatch import Dispatch
from trinity_mq.scheduling.status import Status
from trinity_mq.scheduling.tickets import Ticket

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)


async def _nothing() -> None:
    return None


class Scheduler(Dispatch):
    """Rollout tasks in, outcomes (and for ``deliver="caller"`` experiences) out, over a :class:`~trinity_mq.bus.Bus`.

    Args:
        config: The run's configuration.
        rollout_model: Accepted for the documented signature; runners find engines by their beats.
        auxiliary_models: Likewise.
        bus: A connected bus.
        topology: The run's names; by default made from the configuration.
        owner: Id of the agent that schedules.
        save: Called where the protocol demands that state be durable before going on.
        next_beat: Number of the owner's next beat, stamped on slices.
    """

    def __init__(
        self,
        config: Config,
        rollout_model: Sequence[Any] | None = None,
        auxiliary_models: Sequence[Sequence[Any]] | None = None,
        *,
        bus: Bus,
        topology: Topology | None = None,
        owner: str = "",
        save: Callable[[], Awaitable[None]] = _nothing,
        next_beat: Callable[[], int] = lambda: 0,
        tickets: dict[str, Ticket] | None = None,
        results_offset: int | None = None,
    ) -> None:
        super().__init__(
            config,
            bus=bus,
            topology=topology or Topology(config.name),
            owner=owner,
            save=save,
            next_beat=next_beat,
            tickets=tickets,
            results_offset=results_offset,
        )
        self._to_open: list[Ticket] = []
        self._claimed: set[str] = set()
        """Tickets whose results are for one caller only."""
        self._collector = Collector(bus, self.topology, config, owner)
        self._returned: dict[str, set[int]] = {}
        self._task: asyncio.Task[None] | None = None

    # -- documented interface

    async def start(self) -> None:
        """Begin to follow results; may be called again after :meth:`stop`."""
        if self._task is None or self._task.done():
            await self.bus.declare(*self.topology.durable)
            self._caught_up.clear()
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="scheduler")
            await self._or_failure(self._caught_up.wait())

    async def stop(self) -> None:
        """Stop following; open tickets stay as they are and go on after the next :meth:`start`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        await self._collector.close()

    def schedule(self, tasks: Sequence[Task], batch_id: BatchId, *, deliver: Deliver = "caller") -> str | None:
        """Schedule ``tasks`` under ``batch_id`` (an int, or a string that starts with one); returns the ticket, None
        for no tasks.
        """
        if not tasks:
            return None
        return self._schedule(self.make_ticket([task.to_body() for task in tasks], batch_id, deliver=deliver))

    def has_step(self, batch_id: BatchId) -> bool:
        """Say whether anything of the batch is scheduled, running, or waits to be fetched."""
        return any(ticket.batch == batch_id for ticket in self.tickets.values())

    async def get_results(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for tasks of a batch and return their statuses and experiences, each task once.

        Args:
            batch_id: Unknown ones give ``([], [])``.
            min_num: Return as soon as so many tasks are done; more than there are is clamped with a warning. None waits
            for all.
            timeout: Seconds; None means ``explorer.batch_timeout``.
            clear_timeout_tasks: Forget the tasks that were not done in time; else a later call can have them.
        """
        tickets = [t for t in self.tickets.values() if t.batch == batch_id and t.ticket not in self._claimed]
        return await self._results_of(tickets, min_num, timeout, clear_timeout_tasks)

    async def run_one(
        self, task: Task, batch_id: BatchId, *, run_id_base: int = 0
    ) -> tuple[list[Status], list[Experience]]:
        """Have one task done and return its status and experiences to this caller alone, whatever else is scheduled
        under ``batch_id``. Its runs are numbered from ``run_id_base`` on.
        """
        ticket = self.make_ticket([task.to_body()], batch_id, deliver="caller", first_run=run_id_base)
        self._claimed.add(self._schedule(ticket))
        try:
            return await self._results_of([ticket], None, None, True)
        finally:
            self._claimed.discard(ticket.ticket)

    async def _results_of(
        self, tickets: Sequence[Ticket], min_num: int | None, timeout: float | None, clear_timeout_tasks: bool
    ) -> tuple[list[Status], list[Experience]]:
        if not tickets:
            return [], []
        left = sum(len(ticket.tasks) - len(self._returned.get(ticket.ticket, ())) for ticket in tickets)
        wanted = left if min_num is None else min_num
        if wanted > left:
            log.warning("min_num_clamped", batch=tickets[0].batch, min_num=min_num, tasks=left)
            wanted = left
        in_time = await self._wait_for(lambda: sum(len(self._fresh(t)) for t in tickets) >= wanted, timeout)
        statuses: list[Status] = []
        experiences: list[Experience] = []
        for ticket in tickets:
            for task_id in self._fresh(ticket):
                returned = self._returned.setdefault(ticket.ticket, set())
                if task_id in returned:
                    continue  # another caller of this batch took it meanwhile
                returned.add(task_id)
                results = ticket.results_of(task_id)
                if ticket.deliver == "caller":
                    try:
                        experiences += await self._collector.take(ticket, results)
                    except BaseException:
                        returned.discard(task_id)
                        raise
                statuses.append(task_status(results))
            done = len(self._returned.get(ticket.ticket, ())) == len(ticket.tasks)
            if done or (clear_timeout_tasks and not in_time):
                await self._forget(ticket)
        return statuses, experiences

    async def wait_all(self, timeout: float | None = None, clear_timeout_tasks: bool = True) -> None:
        """Wait until every scheduled task has its outcome, without taking the results.

        Raises:
            TimeoutError: No task completed within ``timeout`` seconds; the timer starts anew at each completion.
        """
        seconds = self._seconds(timeout)
        while (left := self._tasks_left()) > 0:
            before = self._completed
            moved = functools.partial(self._has_moved, before)
            if not await self._wait_for(moved, seconds):
                if clear_timeout_tasks:
                    for ticket in [t for t in self.tickets.values() if not t.is_complete]:
                        await self._forget(ticket)
                raise TimeoutError(f"no task was completed within {seconds:g} s; {left} were left")

    async def run(self) -> None:
        """Follow results and open what :meth:`schedule` was given, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="results")
            group.create_task(self._open_scheduled(), name="open")
            group.create_task(self._collector.run(), name="delete")

    # -- inside

    async def _serve(self) -> None:
        """:meth:`run`, waking who waits when it ends: they tell why."""
        try:
            await self.run()
        finally:
            self.changed.notify()

    def _schedule(self, ticket: Ticket) -> str:
        self.tickets[ticket.ticket] = ticket
        self._to_open.append(ticket)
        self.changed.notify()
        return ticket.ticket

    def _has_moved(self, before: int) -> bool:
        return self._completed > before or not self._tasks_left()

    def _tasks_left(self) -> int:
        return sum(len(ticket.tasks) - len(ticket.finished_tasks) for ticket in self.tickets.values())

    async def _open_scheduled(self) -> None:
        await self._caught_up.wait()
        while True:
            await self.changed.until(lambda: bool(self._to_open))
            ticket = self._to_open[0]
            if ticket.ticket in self.tickets and not ticket.published:
                await self.open(ticket)
            self._to_open.remove(ticket)  # not before: stopped in between, the next start opens it

    def _fresh(self, ticket: Ticket) -> list[int]:
        returned = self._returned.get(ticket.ticket, set())
        return [task_id for task_id in ticket.finished_tasks if task_id not in returned]

    async def _forget(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.ticket, None) is None:
            return  # another caller of this batch was first
        self._returned.pop(ticket.ticket, None)
        if ticket.deliver == "caller":
            await self._collector.forget(ticket)
        await self._save()

    def _seconds(self, timeout: float | None) -> float:
        return self.config.explorer.batch_timeout if timeout is None else timeout

    async def _wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(self._seconds(timeout)):
                await self._or_failure(self.changed.until(predicate))
        except TimeoutError:
            return False
        return True

    async def _or_failure(self, waiting: Any) -> None:
        """Await ``waiting``, but raise at once what ended the background task."""
        task = self._task
        if task is None:
            await waiting
            return
        waiter = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([waiter, task], return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done() and task.done():
                if not task.cancelled():
                    task.result()
                raise RuntimeError("the scheduler was stopped while somebody waited for it; call start() again")
        finally:
            waiter.cancel()
            await asyncio.wait([waiter])
        if not waiter.cancelled():
            waiter.result()
