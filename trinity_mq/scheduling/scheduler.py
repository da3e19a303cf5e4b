"""The Scheduler: cuts tasks into slices, publishes them, follows their outcomes on a stream, closes batches."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from trinity_mq.bus import Bus, Topology
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
from trinity_mq.runtime.mail import envelope, opened
from trinity_mq.runtime.notify import Notifier
from trinity_mq.scheduling.collector import Collector
from trinity_mq.scheduling.seeds import stable_seed
from trinity_mq.scheduling.status import Status
from trinity_mq.scheduling.tickets import SliceState, SubmissionRef, Ticket, new_ticket

if TYPE_CHECKING:
    from trinity_mq.experience import Experience
    from trinity_mq.workflows import Task

log = structlog.get_logger(__name__)


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
        self.on_result: Callable[[Ticket, TaskResult], None] = lambda ticket, result: None
        self.changed = Notifier()
        self.late_results = 0
        self._owner, self._save, self._next_beat = owner, save, next_beat
        self._caught_up = asyncio.Event()
        self._to_open: asyncio.Queue[Ticket] = asyncio.Queue()
        self._collector = Collector(bus, self.topology, config)
        self._returned: dict[str, set[int]] = {}
        self._task: asyncio.Task[None] | None = None

    # -- documented interface

    async def start(self) -> None:
        """Begin to follow results; may be called again after :meth:`stop`."""
        if self._task is None or self._task.done():
            await self.bus.declare(*self.topology.durable)
            self._caught_up.clear()
            self._task = asyncio.get_running_loop().create_task(self.run(), name="scheduler")
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
        ticket = self.make_ticket([task.to_body() for task in tasks], batch_id, deliver=deliver)
        self.tickets[ticket.ticket] = ticket
        self._to_open.put_nowait(ticket)
        return ticket.ticket

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
        tickets = [ticket for ticket in self.tickets.values() if ticket.batch == batch_id]
        if not tickets:
            return [], []
        left = sum(len(ticket.tasks) - len(self._returned.get(ticket.ticket, ())) for ticket in tickets)
        wanted = left if min_num is None else min_num
        if wanted > left:
            log.warning("min_num_clamped", batch=batch_id, min_num=min_num, tasks=left)
            wanted = left
        in_time = await self._wait_for(lambda: sum(len(self._fresh(t)) for t in tickets) >= wanted, timeout)
        statuses: list[Status] = []
        experiences: list[Experience] = []
        for ticket in tickets:
            for task_id in self._fresh(ticket):
                results = ticket.results_of(task_id)
                statuses.append(task_status(results))
                if ticket.deliver == "caller":
                    experiences += await self._collector.take(ticket, results)
                self._returned.setdefault(ticket.ticket, set()).add(task_id)
            done = len(self._returned.get(ticket.ticket, ())) == len(ticket.tasks)
            if done or (clear_timeout_tasks and not in_time):
                await self._forget(ticket)
        return statuses, experiences

    async def wait_all(self, timeout: float | None = None, clear_timeout_tasks: bool = True) -> None:
        """Wait until every scheduled task has its outcome, without taking the results.

        Raises:
            TimeoutError: No task completed within ``timeout`` seconds; the timer starts anew at each completion.
        """

        def left() -> int:
            return sum(len(ticket.tasks) - len(ticket.finished_tasks) for ticket in self.tickets.values())

        while (before := left()) > 0:
            if not await self._wait_for(lambda before=before: left() < before, timeout):  # type: ignore[misc]  # bound at once
                if clear_timeout_tasks:
                    for ticket in [t for t in self.tickets.values() if not t.is_complete]:
                        await self._forget(ticket)
                raise TimeoutError(f"no task was completed within {timeout:g} s; {before} were left")

    # -- what the explorer uses

    async def run(self) -> None:
        """Follow results and open what :meth:`schedule` was given, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="results")
            group.create_task(self._open_scheduled(), name="open")

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
        for ticket in list(self.tickets.values()):
            if ticket.manifest is not None:
                continue
            if ticket.deliver != "none":
                await self.bus.declare(self.topology.batch_queue(ticket.batch, ticket.ticket))
            if not ticket.published:
                await self.open(ticket)

    async def close(self, ticket: Ticket, metrics: dict[str, float]) -> BatchClosed:
        """Close a pipeline ticket: save the manifest, unbind, publish it, answer the submitters. The caller saves
        without the ticket.
        """
        if ticket.manifest is None:
            ticket.manifest = ticket.make_manifest().model_copy(update={"metrics": metrics})
            await self._save()
        if ticket.deliver != "none":
            await self.bus.unbind(self.topology.batch_queue(ticket.batch, ticket.ticket))
        if ticket.deliver == "pipeline":
            await self.announce(ticket.manifest)
        for submission in ticket.submissions:
            await self.answer(submission, submission_outcome(ticket, submission))
        del self.tickets[ticket.ticket]
        return ticket.manifest

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

    async def _open_scheduled(self) -> None:
        await self._caught_up.wait()
        while True:
            ticket = await self._to_open.get()
            if ticket.ticket in self.tickets and not ticket.published:
                await self.open(ticket)

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
            async for delivery in feed:
                message = await opened(self.bus, self.topology, delivery, self._owner)
                if isinstance(message, Mark) and message.nonce == nonce:
                    self._caught_up.set()
                elif message is not None:
                    self._take(message)
                if delivery.offset is not None:
                    self.results_offset = delivery.offset + 1
                self.changed.notify()

    def _take(self, message: Message) -> None:
        if isinstance(message, TaskResult):
            ticket = self.tickets.get(message.ticket)
            if ticket is None or ticket.manifest is not None or message.outcome == "late":
                self.late_results += 1
            elif ticket.record(message):
                self.on_result(ticket, message)
        elif isinstance(message, Progress):
            self.on_progress(message)

    def _fresh(self, ticket: Ticket) -> list[int]:
        returned = self._returned.get(ticket.ticket, set())
        return [task_id for task_id in ticket.finished_tasks if task_id not in returned]

    async def _forget(self, ticket: Ticket) -> None:
        self.tickets.pop(ticket.ticket, None)
        self._returned.pop(ticket.ticket, None)
        if ticket.deliver == "caller":
            await self._collector.forget(ticket)
        await self._save()

    async def _wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(self.config.explorer.batch_timeout if timeout is None else timeout):
                await self._or_failure(self.changed.until(predicate))
        except TimeoutError:
            return False
        return True

    async def _or_failure(self, waiting: Any) -> None:
        """Await ``waiting``, but raise at once what ended the background task."""
        if self._task is None:
            await waiting
            return
        waiter = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([waiter, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done() and self._task.done():
                self._task.result()
                raise RuntimeError("the scheduler was stopped while somebody waited for it")
        finally:
            waiter.cancel()
            await asyncio.wait([waiter])
        if not waiter.cancelled():
            waiter.result()


def task_status(results: Sequence[TaskResult]) -> Status:
    """Return the status of a task from the outcomes of its slices."""
    runs = [metrics for result in results for metrics in result.metrics]
    completed = sum(len(result.runs) for result in results)
    total = sum(result.repeat_times for result in results)
    names = sorted({name for metrics in runs for name in metrics})
    mean = {name: sum(m[name] for m in runs if name in m) / sum(name in m for m in runs) for name in names}
    message = next((result.message for result in results if result.message), None)
    return Status(
        ok=completed == total, metric=mean, message=message, completed_runs=completed, total_runs=total, metrics=runs
    )


def submission_outcome(ticket: Ticket, submission: SubmissionRef) -> SubmissionOutcome:
    """Return what a submitter is told of its task."""
    results = ticket.results_of(submission.task_id)
    status = task_status(results)
    decisive = next((r.outcome for r in results if r.outcome != "finished"), "finished") if results else "cancelled"
    if decisive != "finished" and status.completed_runs:
        decisive = "partial"
    return SubmissionOutcome(
        submission_id=submission.submission_id,
        batch=ticket.batch,
        ticket=ticket.ticket,
        outcome=decisive,
        completed_runs=status.completed_runs,
        total_runs=status.total_runs,
        metrics=status.metric,
        message=status.message,
        experiences=sum(r.parts for r in results)
        if submission.want_experiences and ticket.deliver == "pipeline"
        else 0,
    )
