"""The Scheduler: schedules tasks and waits for their statuses and experiences."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Delivery, Topology, create_bus
from trinity_mq.config import Config
from trinity_mq.dispatch.collector import STOPPED, Collector
from trinity_mq.dispatch.dispatcher import CANCEL_GRACE, Dispatcher
from trinity_mq.dispatch.tickets import Ticket, check_batch_id
from trinity_mq.dispatch.timeouts import UsableClock, seconds_left
from trinity_mq.messages import BatchId, Deliver, Heartbeat, Role, SchedulerStatus, TaskResult
from trinity_mq.rollout.status import Status
from trinity_mq.runtime.deliveries import acknowledge, decode_or_dead_letter, handle_or_set_aside
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.peers import HEARTBEAT_LEASE, HeartbeatPublisher, Peers, heartbeat_patterns
from trinity_mq.scheduler.scheduled_tickets import CompletedTask, CompletedTasks, ScheduledTickets

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)
ROLE: Role = "scheduler"


class Scheduler:
    """Schedules rollout tasks over a :class:`~trinity_mq.bus.Bus` and returns their statuses, and for
    ``deliver="caller"`` their experiences.

    It is a client next to the run's agents, with its own id and heartbeats. Deadlines pause while the broker is
    unreachable or blocked::

        scheduler = Scheduler(config, [])
        await scheduler.start()
        scheduler.schedule(tasks, batch_id=1)
        statuses, experiences = await scheduler.get_results(1)
        await scheduler.stop()

    Args:
        config: The run's configuration.
        rollout_model: Accepted for the documented signature and ignored; runners find engines by their heartbeats.
        auxiliary_models: Accepted for the documented signature and ignored.
        bus: A connected bus, which its owner closes. None: a bus as configured (``broker.url``), which :meth:`start`
            connects and :meth:`stop` closes.
        topology: Names of the run's queues and exchanges; by default made from the configuration.

    Raises:
        AddressError: No bus is given, and the configuration has no usable address of a broker.
    """

    def __init__(
        self,
        config: Config,
        rollout_model: Sequence[Any] | None = None,
        auxiliary_models: Sequence[Sequence[Any]] | None = None,
        *,
        bus: Bus | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.config, self.topology, self.peers = config, topology or Topology.of(config), Peers()
        self._owns_bus, self._connected, self._starting = bus is None, False, asyncio.Lock()
        bus = self.bus = create_bus(config.broker, self.topology, "scheduler") if bus is None else bus
        self._heartbeats = SchedulerHeartbeats(bus, self.topology, lambda: self.dispatcher.open_tickets, self.peers)
        self.dispatcher = Dispatcher(
            config,
            bus=bus,
            topology=self.topology,
            owner=self._heartbeats.id,
            next_heartbeat=lambda: self._heartbeats.seq + 1,
            heartbeat_now=self._heartbeats.now,
            runners=lambda: self.peers.alive("runner"),
            holders=lambda: self.peers.remembered("runner"),
        )
        self._collector = Collector(bus, self.topology, config, self._heartbeats.id)
        self._scheduled = ScheduledTickets(self.dispatcher, self._collector, self._call_back)
        self._clock = UsableClock(bus)
        self._task: asyncio.Task[None] | None = None

    # -- documented interface

    async def start(self) -> None:
        """Connect, and publish the scheduled tasks and follow their results in the background. It returns once the
        results that are already on the stream have been read. While the scheduler runs, a further call does nothing;
        after :meth:`stop` it may be called again.
        """
        async with self._starting:
            if self._task is not None and not self._task.done():
                return
            if self._owns_bus and not self._connected:
                await self.bus.connect()
                self._connected = True
            await self.bus.declare(*self.topology.durable)
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="scheduler")
            await self._await_or_raise(self.dispatcher.caught_up())

    async def stop(self) -> None:
        """Stop following results, and raise the error that ended the background work, if any. Open tickets stay
        unchanged and continue after the next :meth:`start`.
        """
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
                await self._collector.close()
                await self._heartbeats.close()
        finally:
            if self._owns_bus:
                self._connected = False
                await self.bus.close()

    def schedule(self, tasks: Sequence[Task], batch_id: BatchId, *, deliver: Deliver | None = None) -> str | None:
        """Schedule ``tasks`` under ``batch_id`` (an int, or a string that starts with an int); return the id of their
        ticket, None for an empty list. Several calls may use the same batch id: :meth:`get_results` waits for the tasks
        of all these calls. Each task has its own id.

        Args:
            tasks: Evaluation tasks have a separate queue; ``is_eval`` of the first task decides.
            batch_id: May be reused, also while it is open. The integer gives the order of batches.
            deliver: Receiver of the experiences. ``caller``: only the caller of :meth:`get_results`, without operators
                and trainer. ``pipeline``: the run's operators and trainer, once all statuses were returned. ``none``:
                no receiver. By default the caller, and none for evaluation tasks, whose statuses have the metrics.

        Raises:
            ValueError: ``batch_id`` has another form.
        """
        check_batch_id(batch_id)
        if not tasks:
            return None
        batch = self._scheduled.batches.setdefault(batch_id, CompletedTasks())
        return self._scheduled.add(tasks, batch_id, batch, deliver=deliver or _receiver(tasks[0])).ticket

    def task_done_callback(self, async_task: CompletedTask) -> None:
        """Do nothing; subclasses override it and must not block. It is called once for each scheduled task that is done
        or was cut off, on the event loop, before callers that wait for the task are woken. Exceptions are logged.

        Args:
            async_task: Has the query methods of a done ``asyncio.Task``. ``result()`` returns the task's
                :class:`Status`, and raises CancelledError if the task was cut off without any kept result.
        """

    def has_step(self, batch_id: BatchId) -> bool:
        """Return whether a task of the batch is scheduled, running, or waiting to be fetched."""
        return any(ticket.batch == batch_id for ticket in self.dispatcher.tickets.values())

    async def get_results(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
    ) -> tuple[list[Status], list[Experience]]:
        """Wait for tasks of a batch and return their statuses and experiences, each task once, in the order of
        completion.

        With over-rollout (``explorer.over_rollout.ratio``) and a ``min_num``, the remaining tasks have
        ``wait_after_min`` more seconds (at most ``timeout``). Tasks done by then are returned too.

        Tasks that are cleared while no runner or no rollout engine is alive are returned as failed, with this reason as
        message. A warning is logged after :data:`~trinity_mq.runtime.peers.HEARTBEAT_LEASE` seconds in this situation.

        Args:
            batch_id: An unknown batch id returns ``([], [])``.
            min_num: Return this number of tasks as soon as they are done; further completed tasks stay for a later
                call. A number above the number of tasks is clamped with a warning. None waits for all tasks.
            timeout: Seconds; None means ``explorer.batch_timeout``.
            clear_timeout_tasks: True: cancel and forget tasks that were not done in time; with
                ``explorer.over_rollout.return_partial_tasks``, such tasks are returned if a run of them finished.
                False: keep them for a later call.
        """
        return await self._results_of(self._scheduled.batches.get(batch_id), min_num, timeout, clear_timeout_tasks)

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
    ) -> list[Status]:
        """Return statuses as :meth:`get_results` does, without moving experiences. Tasks with experiences for the
        caller stay for a later :meth:`get_results`.
        """
        batch = self._scheduled.batches.get(batch_id)
        if batch is None or not batch.left:
            return []
        taken = batch.take(await self._wait_for_tasks(batch, min_num, timeout, clear_timeout_tasks))
        batch.put_back(task for task in taken if task.ticket.deliver == "caller")
        batch.returned(task for task in taken if task.ticket.deliver != "caller")
        await self._scheduled.end_returned(batch)
        return [task.status for task in taken]

    async def run_one(
        self, task: Task, batch_id: BatchId, *, run_id_base: int = 0, part_of: object = None
    ) -> tuple[list[Status], list[Experience]]:
        """Run one task and return a list with its status, and its experiences (for an evaluation none), only to this
        caller, independent of other tasks under ``batch_id``. Both lists are empty if the task was not done within
        ``explorer.batch_timeout`` seconds and no finished run of it is kept. Runs are numbered from ``run_id_base``.
        Concurrent parts of the same object ``part_of`` share one task id.
        """
        check_batch_id(batch_id)
        batch = CompletedTasks()
        self._scheduled.add([task], batch_id, batch, deliver=_receiver(task), first_run=run_id_base, part_of=part_of)
        try:
            return await self._results_of(batch, None, None, True)
        except BaseException:  # nobody else can fetch the results of this batch
            await self._scheduled.abort(batch)
            raise

    async def wait_all(self, timeout: float | None = None, clear_timeout_tasks: bool = True) -> None:
        """Wait until every scheduled task has an outcome, without taking the results.

        Args:
            timeout: Seconds without a completed task; None means ``explorer.batch_timeout``.
            clear_timeout_tasks: Cancel and forget tasks that were not done in time. Completed tasks stay.

        Raises:
            TimeoutError: No task completed within ``timeout`` seconds. Each completion restarts the timer.
        """
        seconds, scheduled = self._seconds(timeout), self._scheduled
        while (unfinished := scheduled.unfinished) > 0:
            before = scheduled.completed

            def moved(before: int = before) -> bool:
                return scheduled.completed > before or not scheduled.unfinished

            if not await self._wait_for(self.dispatcher.changed, moved, seconds):
                per_message = max((ticket.grouped for ticket in self.dispatcher.tickets.values()), default=1)
                pending = min(unfinished, per_message * await self._waiting_messages())
                obstacle = await self._obstacle()
                if clear_timeout_tasks:
                    for batch in scheduled.all_batches:
                        await self._cut_off(batch)
                        await scheduled.end_returned(batch)
                raise TimeoutError(
                    f"no task was completed within {seconds:g} s; {unfinished} were left: {pending} pending, "
                    f"{unfinished - pending} running{obstacle and '; '}{obstacle}"
                )

    async def abort_batch(self, batch_id: BatchId, return_partial_tasks: bool = False) -> None:
        """Cancel the running and waiting tasks of a batch. None of its results are returned afterwards, unless
        ``return_partial_tasks`` is set: then completed tasks and the finished runs of other tasks stay for
        :meth:`get_results`.
        """
        batch = self._scheduled.batches.get(batch_id)
        if batch is None:
            return
        if return_partial_tasks:
            await self._cut_off(batch, keep=True)
            await self._scheduled.end_returned(batch)
        else:
            await self._scheduled.abort(batch)

    def get_runner_state(self, runner_id: int | str) -> dict[str, Any]:
        """Return the state in the last heartbeat of a living runner, empty for other ids. A number means a runner of
        ``trinity-mq run``.
        """
        return self.get_all_state().get(runner_id if isinstance(runner_id, str) else f"runner-{runner_id}", {})

    def get_all_state(self) -> dict[str, dict[str, Any]]:
        """Return the states in the last heartbeats of the living runners, by id."""
        return {
            beat.id: {"state": beat.state, "waits_for": beat.waits_for, **beat.detail.as_map()}
            for beat in self.peers.alive("runner")
        }

    # -- returning results

    async def _results_of(
        self, batch: CompletedTasks | None, min_num: int | None, timeout: float | None, clear_timeout_tasks: bool
    ) -> tuple[list[Status], list[Experience]]:
        if batch is None or not batch.left:
            return [], []
        async with self._collector.reading([task for task in batch.tickets.values() if task.deliver == "caller"]):
            count = await self._wait_for_tasks(batch, min_num, timeout, clear_timeout_tasks)
        taken = batch.take(count)
        by_ticket: dict[str, tuple[Ticket, list[TaskResult]]] = {}
        for task in taken:
            if task.ticket.deliver == "caller":
                by_ticket.setdefault(task.ticket.ticket, (task.ticket, []))[1].extend(task.results)
        try:
            for ticket, results in by_ticket.values():
                await self._collector.ensure(ticket, results)
        except BaseException:
            batch.put_back(taken)
            raise
        taken = [task for task in taken if task.ticket.ticket in batch.tickets]  # abort_batch may have run
        batch.returned(taken)
        delivered = [task for task in taken if task.ticket.deliver == "caller"]
        experiences = [
            experience for task in delivered for experience in self._collector.pop(task.ticket, task.results)
        ]
        await self._scheduled.end_returned(batch)
        return [task.status for task in taken], experiences

    async def _wait_for_tasks(
        self, batch: CompletedTasks, min_num: int | None, timeout: float | None, clear: bool
    ) -> int:
        """Wait, cut off the remaining tasks if requested, and return the number of tasks for the caller."""
        required = batch.left if min_num is None else min_num
        batch_id = next(iter(batch.tickets.values())).batch
        if required > batch.left:
            log.warning("min_num_clamped", batch=batch_id, min_num=min_num, tasks=batch.left)
            required = batch.left
        over_rollout = self.config.explorer.over_rollout
        waits_for_more = bool(over_rollout.ratio) and min_num is not None
        time_left, wait_left = self._seconds(timeout), over_rollout.wait_after_min if waits_for_more else 0.0

        def left() -> float:
            # recomputed each time, because other callers may take tasks while this caller waits
            return seconds_left(len(batch.done), batch.left, required, time_left=time_left, wait_left=wait_left)

        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(time_left):  # the limit of all waits of the loop together
                while (limit := left()) > 0 and await self._wait_for(batch.changed, lambda: left() < limit, limit):
                    pass
        if len(batch.done) >= required and not waits_for_more:
            return required
        obstacle = await self._obstacle() if len(batch.done) < batch.left else ""
        if obstacle and len(batch.done) < batch.left:  # abort_batch may have run during the await
            log.warning("tasks_not_done", batch=batch_id, tasks=batch.left - len(batch.done), reason=obstacle)
            if clear:
                batch.unserved |= {ticket.ticket for ticket in batch.tickets.values() if not ticket.is_complete}
                await self._cut_off(batch, reason=f"not done within {time_left:g} s: {obstacle}")
        if clear and len(batch.done) < batch.left:
            await self._cut_off(batch)
        return len(batch.done)

    async def _cut_off(
        self, batch: CompletedTasks, keep: bool | None = None, reason: str = "cleared by its scheduler"
    ) -> None:
        """Cut off the tasks that are not done. With ``keep``, tasks with finished runs count as done, and runners have
        ``CANCEL_GRACE`` seconds to send these runs. None: ``explorer.over_rollout.return_partial_tasks`` decides.
        """
        keep = self.config.explorer.over_rollout.return_partial_tasks if keep is None else keep
        tickets = [ticket for ticket in batch.tickets.values() if not ticket.is_complete]
        if waiting := [ticket for ticket in tickets if self.dispatcher.cut_off(ticket, reason, keep=keep)]:
            await self._wait_for(batch.changed, lambda: all(ticket.is_complete for ticket in waiting), CANCEL_GRACE)
        for ticket in waiting:
            self.dispatcher.cancel_rest(ticket, reason)

    def _call_back(self, task: CompletedTask) -> None:
        try:
            self.task_done_callback(task)
        except Exception:
            log.exception("task_done_callback_failed", batch=task.batch_id, task=task.task_id)

    # -- waiting, and background work

    async def _obstacle(self) -> str:
        """Return the reason why nobody works on the scheduled tasks: no runner is alive although slices wait, or no
        rollout engine is alive. Return an empty text otherwise, and if the broker cannot tell whether slices wait.
        """
        run = self.topology.run
        if not self.peers.alive("runner"):
            try:
                waiting = await self._waiting_messages()
            except BusUnavailable:
                return ""
            if not waiting:
                return ""
            return (
                f"no runner of the run {run!r} is alive on this broker, and {waiting} messages with slices wait for "
                "one; start runners with `trinity-mq runner CONFIG`, or the whole run with `trinity-mq run CONFIG`"
            )
        rollout = [beat for beat in self.peers.alive("engine") if getattr(beat.detail, "role", "") == "rollout"]
        if rollout:
            return ""
        return (
            f"no rollout engine of the run {run!r} is alive, so its runners wait; its explorer starts the engines "
            "(`trinity-mq explorer CONFIG`, or the whole run with `trinity-mq run CONFIG`)"
        )

    async def _watch_obstacles(self) -> None:
        """Log a warning if nobody works on scheduled tasks, and again whenever the reason changes, until cancelled."""
        logged = ""
        while True:
            await asyncio.sleep(HEARTBEAT_LEASE)
            obstacle = await self._obstacle() if self._scheduled.unfinished and self.bus.usable else ""
            if obstacle and obstacle != logged:
                log.warning("tasks_wait", tasks=self._scheduled.unfinished, reason=obstacle)
            logged = obstacle

    async def _waiting_messages(self) -> int:
        """Return the number of messages with slices, of all clients of the run, that no runner has taken yet."""
        lanes = (self.topology.tasks_train, self.topology.tasks_eval)
        return sum([await self.bus.depth(lane.name) or 0 for lane in lanes])

    def _seconds(self, timeout: float | None) -> float:
        return self.config.explorer.batch_timeout if timeout is None else timeout

    async def _wait_for(self, changed: Notifier, predicate: Callable[[], bool], seconds: float) -> bool:
        """Return True once ``predicate`` holds, False after ``seconds`` of a usable bus."""
        try:
            async with self._clock.timeout(seconds):
                await self._await_or_raise(changed.until(predicate))
        except TimeoutError:
            return False
        return True

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.dispatcher.follow(), name="results")
                group.create_task(self.dispatcher.watch_queues(), name="queues")
                group.create_task(self.dispatcher.watch_slices(), name="slices")
                group.create_task(self._scheduled.run(), name="open")
                group.create_task(self._collector.run(), name="delete")
                group.create_task(self._heartbeats.run(), name="heartbeats")
                group.create_task(self._watch_obstacles(), name="obstacles")
        finally:
            self.dispatcher.changed.notify()  # waiting callers raise the reason

    async def _await_or_raise(self, waiting: Any) -> None:
        """Await ``waiting``, but raise at once the error that ended the background task, or RuntimeError if
        :meth:`stop` ended it.
        """
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
                raise RuntimeError(STOPPED)
        finally:
            waiter.cancel()
            await asyncio.wait([waiter])
        if not waiter.cancelled():
            waiter.result()


def _receiver(task: Task) -> Deliver:
    """Return the default receiver of a task's experiences."""
    return "none" if task.is_eval else "caller"


class SchedulerHeartbeats:
    """Publishes the ids of the scheduler's open tickets every two seconds and on change, so that runners drop the
    slices of its other tickets. Receives the heartbeats of runners and engines.

    Args:
        bus: The scheduler's bus.
        topology: Names of the run's queues and exchanges.
        open_tickets: Returns the ids of the open tickets.
        peers: Stores the received heartbeats.
    """

    def __init__(self, bus: Bus, topology: Topology, open_tickets: Callable[[], list[str]], peers: Peers) -> None:
        self._bus, self._topology, self._open_tickets, self._peers = bus, topology, open_tickets, peers
        self.id = f"{ROLE}-{uuid.uuid4().hex[:8]}"
        self.seq = 0
        self._incarnation = uuid.uuid4().hex[:12]
        self._subscription = topology.listener(self.id, self._incarnation, "telemetry", *heartbeat_patterns(ROLE))
        self._publisher = HeartbeatPublisher(bus, topology, self.id, self._make)
        bus.on_change(self._bus_changed)

    def now(self) -> None:
        """Send a heartbeat now instead of at the next interval."""
        self._publisher.now()

    async def run(self) -> None:
        """Send and receive heartbeats until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="receive heartbeats")
            group.create_task(self._publisher.run(), name="send heartbeats")

    async def close(self) -> None:
        """Delete the subscription's queue, because it has no consumer after :meth:`run`."""
        if self._bus.usable:
            await self._bus.delete(self._subscription.name)

    async def _receive(self) -> None:
        await self._bus.declare(self._subscription)
        async with await self._bus.consume(self._subscription) as consumer:
            async for delivery in consumer:
                work = functools.partial(self._handle, delivery)
                await handle_or_set_aside(self._bus, self._topology, delivery, self.id, work, quiet=True)

    async def _handle(self, delivery: Delivery) -> None:
        message = await decode_or_dead_letter(self._bus, self._topology, delivery, self.id, quiet=True)
        if isinstance(message, Heartbeat):
            self._peers.receive(message)
        await acknowledge(delivery)

    def _make(self) -> Iterable[Heartbeat]:
        self.seq += 1
        heartbeat = Heartbeat(
            role=ROLE,
            id=self.id,
            seq=self.seq,
            incarnation=self._incarnation,
            lease=HEARTBEAT_LEASE,
            state="working",
            detail=SchedulerStatus(open=self._open_tickets()),
            **self._peers.own.fields(self._peers.uptime),
        )
        return (heartbeat,)

    def _bus_changed(self) -> None:
        if self._bus.usable:
            self._peers.refresh()
            self.now()
        else:
            self._peers.suspend()
