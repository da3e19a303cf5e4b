"""Tickets on the bus: opened, followed by the outcomes of their slices on a stream, closed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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
from trinity_mq.scheduling.batch_metrics import submission_outcome
from trinity_mq.scheduling.seeds import stable_seed
from trinity_mq.scheduling.tickets import SliceState, SubmissionRef, Ticket, new_ticket

log = structlog.get_logger(__name__)

MARK_TIMEOUT = 60.0
"""Seconds on a usable bus without anything new until a missing own mark means: not the stream that our offset is of."""


class Dispatch:
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
        next_beat: Callable[[], int],
        tickets: dict[str, Ticket] | None,
        results_offset: int | None,
    ) -> None:
        self.config, self.bus, self.topology = config, bus, topology
        self.tickets: dict[str, Ticket] = tickets if tickets is not None else {}
        self.results_offset = results_offset
        """Next offset to read on the results stream; None before the first start."""
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.changed = Notifier()
        self.late_results = 0
        self._owner, self._save, self._next_beat = owner, save, next_beat
        self._caught_up, self._resumed = asyncio.Event(), asyncio.Event()
        self._completed = 0
        """Tasks that have got their last outcome."""

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
                delivery = await self._next(feed)
                message = await opened(self.bus, self.topology, delivery, self._owner)
                if isinstance(message, Mark) and message.nonce == nonce:
                    self._caught_up.set()
                elif message is not None:
                    self._take(message)
                if delivery.offset is not None:
                    self.results_offset = delivery.offset + 1
                self.changed.notify()

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
        self._resumed.set()

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
