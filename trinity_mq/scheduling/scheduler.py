"""The Scheduler: cuts tasks into slices, publishes them, follows their outcomes on a stream, closes batches."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Consumer, Delivery, Topology
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.messages import (
    BatchClosed,
    BatchId,
    Deliver,
    Lane,
    Mark,
    Message,
    Progress,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskSlice,
)
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.mail import envelope, opened
from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.streams import next_or_quiet
from trinity_mq.scheduling.batch_metrics import submission_outcome, task_status
from trinity_mq.scheduling.collector import Collector
from trinity_mq.scheduling.seeds import stable_seed
from trinity_mq.scheduling.status import Status
from trinity_mq.scheduling.tickets import SliceState, SubmissionRef, Ticket, new_ticket

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)

MARK_TIMEOUT = 60.0
"""Seconds on a usable bus without anything new until a missing own mark means: not the stream that our offset is of."""


async def _nothing() -> None:
    return None


class Scheduler:
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
        self.config, self.bus = config, bus
        self.topology = topology or Topology(config.name)
        self.tickets: dict[str, Ticket] = tickets if tickets is not None else {}
        self.results_offset = results_offset
        """Next offset to read on the results stream; None before the first start."""
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.changed = Notifier()
        self.late_results = 0
        self._owner, self._save, self._next_beat = owner, save, next_beat
        self._caught_up = asyncio.Event()
        self._to_open: list[Ticket] = []
        self._claimed: set[str] = set()
        """Tickets whose results are for one caller only."""
        self._collector = Collector(bus, self.topology, config, owner)
        self._returned: dict[str, set[int]] = {}
        self._completed = 0
        """Tasks that have got their last outcome."""
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

    # -- what the explorer uses

    async def run(self) -> None:
        """Follow results and open what :meth:`schedule` was given, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="results")
            group.create_task(self._open_scheduled(), name="open")
            group.create_task(self._collector.run(), name="delete")

    async def caught_up(self) -> None:
        """Return once everything published before this start has been read."""
        await self._caught_up.wait()

    @property
    def is_caught_up(self) -> bool:
        """The results stream has been read up to our own mark."""
        return self._caught_up.is_set()

    def make_ticket(
        self, tasks: Sequence[TaskBody], batch_id: BatchId, *, deliver: Deliver, lane: Lane = "train", **more: Any
    ) -> Ticket:
        """Return a ticket with this run's limits filled in."""
        explorer = self.config.explorer
        return new_ticket(
            batch_id,
            tasks,
            deliver=deliver,
            lane=lane,
            seed=self.config.seed,
            time_left=explorer.eval_timeout if lane == "eval" else explorer.batch_timeout,
            max_repeat_times=explorer.max_repeat_times_per_runner,
            **more,
        )

    async def open(self, ticket: Ticket) -> None:
        """Save, declare and bind the batch queue, publish the slices, save that they are published."""
        self.tickets[ticket.ticket] = ticket
        if not ticket.opened_beat:
            ticket.opened_beat = self._next_beat()
        await self._save()
        if ticket.deliver != "none":
            await self.bus.declare(self.topology.batch_queue(ticket.batch, ticket.ticket))
        async with asyncio.TaskGroup() as group:
            for piece in ticket.slices:
                if piece.result is None:
                    group.create_task(self._publish_slice(ticket, piece))
        ticket.published = True
        await self._save()

    async def resume(self) -> None:
        """After a restart and once caught up: keep batch queues alive, publish what was not published, in the order of
        opening.
        """
        await self.keep_queues()
        for ticket in list(self.tickets.values()):
            if not ticket.published and ticket.manifest is None and ticket.ticket in self.tickets:
                await self.open(ticket)

    async def keep_queues(self) -> None:
        """Declare the batch queues of open tickets anew: that starts their ``x-expires`` anew, publishing does not."""
        for ticket in list(self.tickets.values()):
            if ticket.published and ticket.manifest is None and ticket.deliver != "none":
                await self.bus.declare(self.topology.batch_queue(ticket.batch, ticket.ticket))

    async def close(self, ticket: Ticket, manifest: BatchClosed) -> None:
        """Close a ticket: save its manifest (once saved it stays), unbind, publish it, answer the submitters. The
        caller saves without the ticket.
        """
        ticket.manifest = manifest
        await self._save()
        if ticket.deliver != "none":
            await self.bus.unbind(self.topology.batch_queue(ticket.batch, ticket.ticket))
        if ticket.deliver == "pipeline":
            await self.announce(manifest)
        for submission in ticket.submissions:
            await self.answer(submission, submission_outcome(ticket, submission))
        self.tickets.pop(ticket.ticket, None)

    async def answer(self, submission: SubmissionRef, outcome: SubmissionOutcome) -> None:
        """Tell a submitter, if it wants to know, what became of its task."""
        if submission.reply_to is None:
            return
        name = f"outcome-{submission.submission_id}"
        mail = envelope(outcome, message_id=name, correlation_id=submission.correlation_id)
        if not await self.bus.publish("", submission.reply_to, mail):
            log.info("submitter_gone", submission=submission.submission_id, reply_to=submission.reply_to)

    async def announce(self, manifest: BatchClosed) -> None:
        """Publish a manifest to the operators."""
        mail = envelope(manifest, message_id=f"closed-{manifest.ticket}")
        await self.bus.publish(self.topology.exchange("batches"), "closed", mail)

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

    async def _publish_slice(self, ticket: Ticket, piece: SliceState) -> None:
        explorer = self.config.explorer
        body = TaskSlice(
            batch=ticket.batch,
            ticket=ticket.ticket,
            task_id=piece.task_id,
            run_base=piece.run_base,
            repeat_times=piece.repeat_times,
            task=ticket.tasks[piece.task_id],
            lane=ticket.lane,
            deliver=ticket.deliver,
            seed=stable_seed(ticket.seed, ticket.batch, piece.task_id),
            max_timeout=explorer.max_timeout,
            max_retry_times=explorer.max_retry_times,
            slice_timeout=explorer.slice_timeout,
            pinned=ticket.pinned,
            opened_beat=ticket.opened_beat,
            explorer=self._owner,
        )
        mail = envelope(body, message_id=f"{ticket.ticket}-{piece.task_id}-{piece.run_base}")
        await self.bus.publish(self.topology.exchange("tasks"), f"{ticket.lane}.{batch_key(ticket.batch)}", mail)

    async def _follow(self) -> None:
        nonce = uuid.uuid4().hex
        mark = envelope(Mark(nonce=nonce), message_id=f"mark-{nonce}")
        async with await self.bus.consume(self.topology.results, offset=self.results_offset) as feed:
            await self.bus.publish(self.topology.exchange("results"), "mark", mark)
            while True:
                delivery = await self._next(feed)
                message = await opened(self.bus, self.topology, delivery, self._owner)
                if isinstance(message, Mark) and message.nonce == nonce:
                    self._caught_up.set()
                elif message is not None:
                    self._take(message)
                if delivery.offset is not None:
                    self.results_offset = delivery.offset + 1
                self.changed.notify()

    async def _next(self, feed: Consumer) -> Delivery:
        """Return the next delivery.

        Raises:
            FatalError: The stream is shorter than our offset says; a reader at an offset beyond the end waits for ever.
        """
        if self._caught_up.is_set():
            return await anext(feed)
        delivery = await next_or_quiet(self.bus, feed, MARK_TIMEOUT)
        if delivery is None:
            raise FatalError(
                f"nothing was found on the results stream from offset {self.results_offset} on, not even our own mark: "
                "the stream is shorter than the saved state says, so this is not the broker (or not the data) it was "
                "made with. Bring that back, or start under another name"
            )
        return delivery

    def _take(self, message: Message) -> None:
        if isinstance(message, TaskResult):
            ticket = self.tickets.get(message.ticket)
            if ticket is None or ticket.manifest is not None or message.outcome == "late":
                self.late_results += 1
            elif ticket.record(message):
                self._completed += message.task_id in ticket.finished_tasks
        elif isinstance(message, Progress):
            self.on_progress(message)

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
