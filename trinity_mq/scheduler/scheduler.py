"""The Scheduler: tasks in, statuses and experiences out, with the documented waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Topology
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import task_status
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import BatchId, Deliver
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.peers import Peers
from trinity_mq.scheduler.completed_tasks import CompletedTasks
from trinity_mq.scheduler.done_task import DoneTask
from trinity_mq.scheduler.heartbeats import SchedulerHeartbeats
from trinity_mq.scheduler.scheduled_tickets import Shelving

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)


async def _nothing() -> None:
    return None


class Scheduler(Shelving):
    """Rollout tasks in, outcomes (and for ``deliver="caller"`` experiences) out, over a :class:`~trinity_mq.bus.Bus`.

    Deadlines stand still while the broker is away or blocked.

    Args:
        config: The run's configuration.
        rollout_model: Accepted for the documented signature; runners find engines by their beats.
        auxiliary_models: Likewise.
        bus: A connected bus.
        topology: The run's names; by default made from the configuration.
        owner: Id of the agent that schedules, and whose beats list :attr:`open_tickets`. Empty: the scheduler has an id
            and beats of its own.
        save: Called where the protocol demands that state be durable before going on.
        next_beat: Number of the owner's next beat, stamped on slices.
        beat_soon: Makes the owner beat when a ticket is cut off.
        peers: The owner's, for the states of runners.
        tickets: The owner's open tickets.
        results_offset: Where to read on.
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
        next_heartbeat: Callable[[], int] = lambda: 0,
        heartbeat_soon: Callable[[], None] = lambda: None,
        peers: Peers | None = None,
        tickets: dict[str, Ticket] | None = None,
        results_offset: int | None = None,
    ) -> None:
        topology, peers = topology or Topology(config.name), peers or Peers()
        beacon = None
        if not owner:
            beacon = SchedulerHeartbeats(bus, topology, lambda: self.open_tickets, peers)
            owner, heartbeat_soon = beacon.id, beacon.soon
        super().__init__(
            config,
            bus=bus,
            topology=topology,
            owner=owner,
            save=save,
            next_heartbeat=next_heartbeat if beacon is None else lambda: beacon.seq + 1,
            heartbeat_soon=heartbeat_soon,
            tickets=tickets,
            results_offset=results_offset,
        )
        self.peers, self._beacon = peers, beacon
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
        if self._beacon is not None:
            await self._beacon.close()

    def schedule(self, tasks: Sequence[Task], batch_id: BatchId, *, deliver: Deliver = "caller") -> str | None:
        """Schedule ``tasks`` under ``batch_id`` (an int, or a string that starts with one); returns the ticket, None
        for no tasks. What is scheduled under one batch id at a time is returned together, each task with an id of its
        own.

        Args:
            tasks: Evaluation tasks (``is_eval`` of the first one) go by a queue of their own.
            batch_id: May be used again, also while it is open.
            deliver: Who gets the experiences: the ``caller`` of :meth:`get_results`, the run's operators and trainer
                (``pipeline``: once all statuses were returned), or ``none``.
        """
        if not tasks:
            return None
        shelf = self._shelves.get(batch_id)
        if shelf is None:
            shelf = self._shelves[batch_id] = CompletedTasks()
        return self._schedule(tasks, batch_id, shelf, deliver=deliver).ticket

    def task_done_callback(self, async_task: DoneTask) -> None:
        """Called once for each scheduled task that is done or cut off, on the event loop, before anybody who waits for
        it is woken. Does nothing: written by subclasses, which must not block. What it raises is logged.

        Args:
            async_task: Read like a done ``asyncio.Task``; its result is the task's :class:`Status`.
        """

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
        """Wait for tasks of a batch and return their statuses and experiences, each task once, in the order in which
        they ended.

        With over-rollout (``explorer.over_rollout.ratio``) and a ``min_num`` the others have ``wait_after_min`` seconds
        more, and what is done by then is returned too.

        Args:
            batch_id: Unknown ones give ``([], [])``.
            min_num: Return so many tasks as soon as they are done; what is done beyond them stays for a later call.
                More than there are is clamped with a warning. None waits for all.
            timeout: Seconds; None means ``explorer.batch_timeout``.
            clear_timeout_tasks: Cancel and forget the tasks that were not done in time; else a later call can have
                them.
        """
        return await self._results_of(self._shelves.get(batch_id), min_num, timeout, clear_timeout_tasks)

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
    ) -> list[Status]:
        """As :meth:`get_results`, without moving experiences: tasks that have some for the caller stay for a later
        :meth:`get_results`.
        """
        shelf = self._shelves.get(batch_id)
        if shelf is None or not shelf.left:
            return []
        seen = shelf.look(await self._wait_for_tasks(shelf, min_num, timeout, clear_timeout_tasks))
        statuses = [task_status(one.ticket.results_of(one.task)) for one in seen]
        await self._end_returned(shelf)
        return statuses

    async def run_one(
        self, task: Task, batch_id: BatchId, *, run_id_base: int = 0, part_of: object = None
    ) -> tuple[list[Status], list[Experience]]:
        """Have one task done and return its status and experiences to this caller alone, whatever else is scheduled
        under ``batch_id``. Its runs are numbered from ``run_id_base`` on; parts of the same object ``part_of`` that are
        under way together are one task.
        """
        shelf = CompletedTasks()
        self._schedule([task], batch_id, shelf, deliver="caller", first_run=run_id_base, part_of=part_of)
        try:
            return await self._results_of(shelf, None, None, True)
        except asyncio.CancelledError:
            await self._abort(shelf)
            raise

    async def wait_all(self, timeout: float | None = None, clear_timeout_tasks: bool = True) -> None:
        """Wait until every scheduled task has its outcome, without taking the results.

        Args:
            timeout: Seconds without a completed task; None means ``explorer.batch_timeout``.
            clear_timeout_tasks: Cancel and forget what was not done in time. What is done stays.

        Raises:
            TimeoutError: No task completed within ``timeout`` seconds; the timer starts anew at each completion.
        """
        seconds = self._seconds(timeout)
        while (left := self._undone) > 0:
            before = self._ended
            moved = await self._wait_for(self.changed, lambda seen=before: self._has_moved(seen), seconds)  # type: ignore[misc]
            # bound at once
            if not moved:
                pending = min(left, await self._waiting_slices())
                if clear_timeout_tasks:
                    for shelf in set(self._shelf_of.values()):
                        await self._cut_short(shelf)
                        await self._end_returned(shelf)
                raise TimeoutError(
                    f"no task was completed within {seconds:g} s; {left} were left: {pending} pending, "
                    f"{left - pending} running"
                )

    async def abort_batch(self, batch_id: BatchId, return_partial_tasks: bool = False) -> None:
        """Cancel what runs or waits of a batch. Nothing of it is returned to anybody any more, unless
        ``return_partial_tasks``: then what is done, and the finished runs of what is not, stay for
        :meth:`get_results`.
        """
        shelf = self._shelves.get(batch_id)
        if shelf is None:
            return
        if return_partial_tasks:
            await self._cut_short(shelf, keep=True)
            await self._end_returned(shelf)
        else:
            await self._abort(shelf)

    def get_runner_state(self, runner_id: int | str) -> dict[str, Any]:
        """Return what the last beat of a living runner said, empty for others. A number is that of
        ``trinity-mq run``.
        """
        return self.get_all_state().get(runner_id if isinstance(runner_id, str) else f"runner-{runner_id}", {})

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return what the living runners said last, by id."""
        return {
            beat.id: {"state": beat.state, "waits_for": beat.waits_for, **beat.detail.as_map()}
            for beat in self.peers.alive("runner")
        }

    async def run(self) -> None:
        """Follow results and open what :meth:`schedule` was given, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follow(), name="results")
            group.create_task(self.watch_queues(), name="queues")
            group.create_task(self._open_scheduled(), name="open")
            group.create_task(self._collector.run(), name="delete")
            if self._beacon is not None:
                group.create_task(self._beacon.run(), name="beacon")

    # -- inside

    def on_task_done(self, ticket: Ticket, task: int) -> None:
        """Put a task where it is fetched, and call :meth:`task_done_callback`."""
        super().on_task_done(ticket, task)
        if ticket.ticket not in self._shelf_of:
            return  # opened by who owns its batch, not scheduled
        try:
            self.task_done_callback(DoneTask(ticket, task))
        except Exception:
            log.exception("task_done_callback_failed", batch=ticket.batch, task=ticket.first_task + task)

    async def _serve(self) -> None:
        """:meth:`run`, waking who waits when it ends: they tell why."""
        try:
            await self.run()
        finally:
            self.changed.notify()

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
