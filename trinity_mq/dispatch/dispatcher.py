"""Tickets on the bus: opened, followed by the outcomes of their slices on a stream, closed.

How runners hear that nobody waits for a slice any more: by level, in their owner's beats. ``detail["open"]`` of the
beats of agent ``TaskSlice.explorer`` (role ``explorer``, or ``scheduler`` for a Scheduler without an agent) lists the
tickets that have slices to be done. From the beat with number ``opened_beat`` on a slice whose ticket is not listed is
to be dropped, whether it runs or waits: its ticket was aborted, cleared, cut short, closed, or is complete. A ticket is
cut off only as a whole: what is left of it is dropped, slice by slice. A change makes a beat at once.

A slice that says ``keep_partial`` has ``explorer.cancel_grace`` seconds after that beat: what its runner publishes by
then of its finished runs, parts first, then a TaskResult of outcome *partial* with these runs (*cancelled* where there
are none), counts. Later results are *late*: counted, and dropped.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from trinity_mq.bus import Bus, BusRefused, Consumer, Delivery, Topology
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import submission_outcome
from trinity_mq.dispatch.batch_queues import BatchQueues
from trinity_mq.dispatch.slice_times import SliceTimes
from trinity_mq.dispatch.tickets import SliceState, SubmissionRef, Ticket, new_ticket
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
    TaskResults,
    TaskSlice,
)
from trinity_mq.rollout.seeds import stable_seed
from trinity_mq.runtime.deliveries import decode_or_dead_letter, envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

MARK_TIMEOUT = 60.0
"""Seconds on a usable bus without anything new until a missing own mark means: not the stream that our offset is of."""
WINDOW = 128
"""Slices of one ticket that are published and not yet confirmed."""
BURST = 64
"""Results taken in before others get their turn."""


class Dispatcher:
    """Opens and closes tickets, and keeps them up to date; everything durable is in ``tickets`` and ``results_offset``.

    Args:
        config: The run's configuration.
        bus: A connected bus.
        topology: The run's names.
        owner: Id of the agent that schedules.
        save: Called where the protocol demands that state be durable before going on.
        next_beat: Number of the owner's next beat, stamped on slices.
        tickets: The open tickets by id; changed in place.
        results_offset: Where to read on; None: from now on.
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
        tickets: dict[str, Ticket] | None,
        results_offset: int | None,
    ) -> None:
        self.config, self.bus, self.topology = config, bus, topology
        self.tickets: dict[str, Ticket] = tickets if tickets is not None else {}
        self.results_offset = results_offset
        """Next offset to read on the results stream; None before the first start."""
        self.queues = BatchQueues(bus, topology, self.tickets.values)
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.changed = Notifier()
        self.late_results = 0
        """Results of tickets that are closed, or of attempts that found theirs closed."""
        self.slice_times = SliceTimes(config.explorer)
        self._owner, self._save, self._next_beat = owner, save, next_heartbeat
        self._caught_up, self._resumed = asyncio.Event(), asyncio.Event()
        self._turns: dict[Lane, asyncio.Future[None]] = {}
        """By lane: done when the last slice of the ticket opened last is on its way."""

    async def follow(self) -> None:
        """Read the results stream until cancelled.

        Raises:
            FatalError: It is not the stream that our offset is of.
        """
        nonce = uuid.uuid4().hex
        mark = envelope(Mark(nonce=nonce), message_id=f"mark-{nonce}")
        async with await self.bus.consume(self.topology.results, offset=self.results_offset) as feed:
            await self.bus.publish(self.topology.exchange("results"), "mark", mark)
            while True:
                await self._heard(await self._next(feed), nonce)
                for _ in range(BURST):
                    more = feed.get_nowait()
                    if more is None:
                        break
                    await self._heard(more, nonce)
                self.changed.notify()
                await asyncio.sleep(0)  # however much there is to read, others get their turn

    async def watch_queues(self) -> None:
        """See to it that batch queues take what comes, until cancelled."""
        await self.caught_up()
        await self.queues.watch()

    async def caught_up(self) -> None:
        """Return once everything published before this start has been read."""
        await self._caught_up.wait()

    @property
    def is_caught_up(self) -> bool:
        """The results stream has been read up to our own mark."""
        return self._caught_up.is_set()

    async def resumed(self) -> None:
        """Return once :meth:`resume` is done: what opens or closes tickets before that would get into its way."""
        await self._resumed.wait()

    def make_ticket(
        self, tasks: Sequence[TaskBody], batch_id: BatchId, *, deliver: Deliver, lane: Lane = "train", **more: Any
    ) -> Ticket:
        """Return a ticket with this run's limits filled in."""
        explorer = self.config.explorer
        more.setdefault("keep_partial", deliver == "pipeline" and explorer.over_rollout.return_partial_tasks)
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

    @property
    def open_tickets(self) -> list[str]:
        """The tickets that have slices to be done, for the owner's beats."""
        return [name for name, ticket in self.tickets.items() if ticket.is_open]

    async def open(self, ticket: Ticket) -> None:
        """Save, declare and bind the batch queue, publish the slices, save that they are published.

        Several tickets may be opened at a time: their slices go out in the order of the calls, lane by lane.
        """
        before, mine = self._turns.get(ticket.lane), asyncio.get_running_loop().create_future()
        self._turns[ticket.lane] = mine
        try:
            self.tickets[ticket.ticket] = ticket
            again = bool(ticket.opened_beat)
            if not again:
                ticket.opened_beat = self._next_beat()
            await self._save()
            if ticket.deliver != "none":
                await self.queues.make(ticket, again=again)
            self.on_declared(ticket)
            if before is not None:
                await asyncio.wait([before])
            await self._publish_slices(ticket, mine)
        finally:
            _done(mine)
        ticket.published = True
        await self._save()

    async def resume(self) -> None:
        """After a restart and once caught up: keep batch queues alive, publish what was not published, in the order of
        opening.
        """
        await self.queues.keep()
        for ticket in list(self.tickets.values()):
            if not ticket.published and ticket.manifest is None and ticket.ticket in self.tickets:
                await self.open(ticket)
        self._resumed.set()

    def on_declared(self, ticket: Ticket) -> None:
        """The batch queue of ``ticket`` is there."""

    def on_task_done(self, ticket: Ticket, task: int) -> None:
        """The last slice of a task has its outcome."""

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

    async def answer(self, submission: SubmissionRef, outcome: SubmissionOutcome, what: str = "outcome") -> None:
        """Tell a submitter, if it wants to know, what became of its task, or (another ``what``) what changed since."""
        if submission.reply_to is None:
            return
        name = f"{what}-{submission.submission_id}"
        mail = envelope(outcome, message_id=name, correlation_id=submission.correlation_id)
        try:
            if not await self.bus.publish("", submission.reply_to, mail):
                log.info("submitter_gone", submission=submission.submission_id, reply_to=submission.reply_to)
        except BusRefused as error:  # our user may answer nobody: no reason for the run to end
            log.warning("submitter_not_answered", submission=submission.submission_id, reason=str(error))

    async def announce(self, manifest: BatchClosed) -> None:
        """Publish a manifest to the operators."""
        mail = envelope(manifest, message_id=f"closed-{manifest.ticket}")
        await self.bus.publish(self.topology.exchange("batches"), "closed", mail)

    # -- inside

    async def _publish_slices(self, ticket: Ticket, all_sent: asyncio.Future[None]) -> None:
        """Publish what has no outcome yet, :data:`WINDOW` at a time; ``all_sent`` is done before the last confirms."""
        left = iter(ticket.slices)
        fixed = self._same_for_all(ticket)

        async def work() -> None:
            for task_slice in left:
                if task_slice.result is None and ticket.grace is None:
                    await self._publish_slice(ticket, task_slice, fixed)
            _done(all_sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(WINDOW, len(ticket.slices))):
                group.create_task(work())

    def _same_for_all(self, ticket: Ticket) -> dict[str, Any]:
        explorer = self.config.explorer
        max_timeout = self.slice_times.limit(explorer.max_timeout) if ticket.lane == "train" else explorer.max_timeout
        return {
            "batch": ticket.batch,
            "ticket": ticket.ticket,
            "lane": ticket.lane,
            "deliver": ticket.deliver,
            "max_timeout": max_timeout,
            "max_retry_times": explorer.max_retry_times,
            "slice_timeout": min(explorer.slice_timeout, max_timeout * (explorer.max_retry_times + 1)),
            "pinned": ticket.pinned,
            "opened_beat": ticket.opened_beat,
            "explorer": self._owner,
            "keep_partial": ticket.keep_partial,
        }

    async def _publish_slice(self, ticket: Ticket, task_slice: SliceState, fixed: dict[str, Any]) -> None:
        task_id = ticket.first_task + task_slice.task_id
        body = TaskSlice(
            task_id=task_id,
            run_base=task_slice.run_base,
            repeat_times=task_slice.repeat_times,
            task=ticket.tasks[task_slice.task_id],
            seed=stable_seed(ticket.seed, ticket.batch, task_id),
            **fixed,
        )
        mail = envelope(body, message_id=f"{ticket.ticket}-{task_id}-{task_slice.run_base}")
        await self.bus.publish(self.topology.exchange("tasks"), f"{ticket.lane}.{batch_key(ticket.batch)}", mail)

    async def _heard(self, delivery: Delivery, nonce: str) -> None:
        """Take in one delivery of the results stream."""
        told = delivery.headers.get("ticket")
        if delivery.kind == TaskResult.kind and isinstance(told, str) and told not in self.tickets:
            self.late_results += 1  # nothing in it is wanted
        else:
            message = await decode_or_dead_letter(self.bus, self.topology, delivery, self._owner)
            if isinstance(message, Mark) and message.nonce == nonce:
                self._caught_up.set()
            elif message is not None:
                self._take(message)
        if delivery.offset is not None:
            self.results_offset = delivery.offset + 1

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
        if isinstance(message, TaskResults):
            for result in message.results:
                self._take(result)
        elif isinstance(message, TaskResult):
            ticket = self.tickets.get(message.ticket)
            if ticket is None or ticket.manifest is not None or message.outcome == "late":
                self.late_results += 1
            elif ticket.record(message):
                if ticket.lane == "train":
                    self.slice_times.slice_done(message)
                task = message.task_id - ticket.first_task
                if ticket.is_finished(task):
                    self.on_task_done(ticket, task)
                if ticket.is_complete and ticket.lane == "train":
                    self.slice_times.batch_done()
        elif isinstance(message, Progress):
            self.on_progress(message)


def _done(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
