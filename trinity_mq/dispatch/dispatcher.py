"""Dispatches tickets over the bus: opens them, reads the outcomes of their slices from a stream, and closes them.

Runners learn from heartbeats which slices are still needed. ``detail["open"]`` in the heartbeats of agent
``TaskSlice.explorer`` (role ``explorer``, or ``scheduler`` for a Scheduler) lists the tickets that still have slices to
execute. From the heartbeat with number ``opened_beat`` on, a runner drops every slice, running or waiting, whose ticket
is not listed: the ticket was aborted, cleared, cut off or closed, or is complete. A ticket can only be cut off as a
whole. A cut-off triggers an immediate heartbeat.

If partial results are kept, a slice with ``keep_partial`` has :data:`CANCEL_GRACE` seconds after its ticket was cut
off. Finished runs that its runner publishes in this time count: first the parts, then a TaskResult with outcome
*partial* and these runs, or *cancelled* if no run finished. Results that arrive after the ticket was closed are *late*:
they are counted and dropped.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

from trinity_mq.bus import Bus, BusRefused, BusUnavailable, Consumer, Delivery, Envelope, MessageTooLarge, Topology
from trinity_mq.bus.properties import HeaderValue
from trinity_mq.bus.streams import next_or_quiet
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config
from trinity_mq.dispatch.batch_metrics import Failures, submission_outcome
from trinity_mq.dispatch.batch_queues import BatchQueues
from trinity_mq.dispatch.loss_repair import LossRepair
from trinity_mq.dispatch.tickets import GROUPED, SliceState, SubmissionRef, Ticket, new_ticket
from trinity_mq.dispatch.timeouts import SliceTimes
from trinity_mq.messages import (
    BatchClosed,
    BatchId,
    BatchReady,
    ContentError,
    Deliver,
    Heartbeat,
    Lane,
    Message,
    Progress,
    RunnerStatus,
    SubmissionOutcome,
    TaskBody,
    TaskResult,
    TaskResults,
    TaskSlice,
    TaskSlices,
)
from trinity_mq.rollout.seeds import stable_seed
from trinity_mq.runtime.deliveries import (
    acknowledge_foreign,
    decode_or_dead_letter,
    envelope,
    handle_or_set_aside,
    new_mark,
)
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry.trace import record, span
from trinity_mq.telemetry.trace_ids import LINK

log = structlog.get_logger(__name__)

NO_REPLY_QUEUE = (
    "reply_to names no reply queue of a submitter: take a queue that the broker names, or one that begins with "
    "tmq.<run>.replies.submit., or list its prefix in outsiders.reply_queues"
)

CANCEL_GRACE = 2.0
"""Seconds after a cut-off for runners to send finished runs, if partial results are kept: a heartbeat reaches a runner
in milliseconds, and its answer has to be confirmed.
"""
MARK_TIMEOUT = 60.0
"""Seconds on a usable bus without a delivery. If this dispatcher's own mark was not read by then, the saved offset
belongs to another stream. Also the limit of :meth:`Dispatcher.read_to_end`.
"""
WINDOW = 128
"""Maximum number of unconfirmed messages with slices of a ticket."""
GROUP_SECONDS = 2.0
"""Maximum seconds for the slices of one message, run in sequence, as estimated from the mean of earlier slices."""
KEPT_OPENED = 10_000
"""Maximum number of tickets whose late results a dispatcher recognizes as its own."""
BURST = 64
"""Number of waiting messages to process before other tasks of the event loop get a turn."""


async def _save_nothing() -> None:
    return None


class Dispatcher:
    """Opens, cuts off and closes tickets, and records the outcomes of their slices.

    The whole durable state is in :attr:`tickets` and :attr:`results_offset`. The callbacks ``on_declared`` (the batch
    queue of a ticket exists, or the ticket needs none), ``on_task_done`` (all slices of a task have an outcome) and
    ``on_progress`` (the trainer reported its progress) run on the event loop and must not block.

    Args:
        owner: Id of the agent whose heartbeats list :attr:`open_tickets`.
        save: Saves the state. Called where the protocol requires durable state before the next step.
        next_heartbeat: Returns the number of the owner's next heartbeat, which is stamped on slices.
        heartbeat_now: Makes the owner send a heartbeat immediately.
        runners: Returns the heartbeats of the live runners.
        holders: Returns the last heartbeats of all runners that may hold slices, including runners that fell silent.
        tickets: Tickets that are not closed, by id. The mapping is changed in place.
        results_offset: Offset at which to resume the results stream. None: start with new results.
        changed: Notified after messages of the results stream were processed, and after a slice got an outcome without
            a result.
    """

    def __init__(
        self,
        config: Config,
        *,
        bus: Bus,
        topology: Topology,
        owner: str,
        save: Callable[[], Awaitable[None]] = _save_nothing,
        next_heartbeat: Callable[[], int] = lambda: 0,
        heartbeat_now: Callable[[], None] = lambda: None,
        runners: Callable[[], Sequence[Heartbeat]] = tuple,
        holders: Callable[[], Sequence[Heartbeat]] = tuple,
        tickets: dict[str, Ticket] | None = None,
        results_offset: int | None = None,
        changed: Notifier | None = None,
    ) -> None:
        self.config, self.bus, self.topology = config, bus, topology
        self.tickets: dict[str, Ticket] = tickets if tickets is not None else {}
        self.results_offset = results_offset
        """Next offset to read on the results stream. None: nothing was read yet, and reading starts with new
        results.
        """
        self.changed = changed or Notifier()
        self.heartbeat_now = heartbeat_now
        self.on_declared: Callable[[Ticket], None] = lambda ticket: None
        self.on_task_done: Callable[[Ticket, int], None] = lambda ticket, task: None
        self.on_progress: Callable[[Progress], None] = lambda progress: None
        self.queues = BatchQueues(bus, topology, self.tickets.values)
        self.failures = Failures()
        self.late_results = 0
        """Number of results of tickets of this dispatcher that are closed. Results whose runner already found the
        ticket closed are included. Results of tickets that were closed before this dispatcher started, or that
        another dispatcher opened, do not count.
        """
        self.refused_submissions = 0
        """Number of submitted tasks that the explorer refused."""
        self.slice_times = SliceTimes(config.explorer)
        self.losses = LossRepair(
            bus,
            topology,
            self.tickets,
            runners=runners,
            holders=holders,
            read_to_end=self.read_to_end,
            publish_again=self.publish_again,
        )
        self._opened = OrderedDict.fromkeys(self.tickets)
        """Ids of the last tickets of this dispatcher, open or closed."""
        self._marks: dict[str, asyncio.Event] = {}
        """Events by the message id of this dispatcher's marks on the results stream. An event is set when its mark is
        read.
        """
        self._owner, self._save, self._next_heartbeat, self._runners = owner, save, next_heartbeat, runners
        self._caught_up, self._resumed = asyncio.Event(), asyncio.Event()
        self._all_sent: dict[Lane, asyncio.Future[None]] = {}
        """Futures by lane: done when all slices of the lane's most recently opened ticket have been sent."""

    async def follow(self) -> None:
        """Read the results stream until cancelled.

        Raises:
            FatalError: The stream is not the stream of the saved offset.
        """
        mark = new_mark()
        self._marks[mark.message_id] = self._caught_up
        try:
            async with await self.bus.consume(self.topology.results, offset=self.results_offset) as consumer:
                await self.bus.publish(self.topology.exchange("results"), "mark", mark)
                while True:
                    await self._receive(await self._next(consumer))
                    for _ in range(BURST):
                        more = consumer.get_nowait()
                        if more is None:
                            break
                        await self._receive(more)
                    self.changed.notify()
                    await asyncio.sleep(0)  # other tasks run between bursts
        finally:
            del self._marks[mark.message_id]
            self._caught_up.clear()

    async def watch_queues(self) -> None:
        """Examine batch queues, replace queues that do not accept messages, and maintain a spare queue, until
        cancelled.
        """
        await self.caught_up()
        await self.queues.watch()

    async def watch_slices(self) -> None:
        """Republish slices that were lost with the content of their queue, until cancelled."""
        await self.caught_up()
        await self.losses.run()

    async def caught_up(self) -> None:
        """Return once :meth:`follow` has read all messages that were on the stream when it started."""
        await self._caught_up.wait()

    @property
    def is_caught_up(self) -> bool:
        """True if the results stream has been read up to this dispatcher's own mark."""
        return self._caught_up.is_set()

    async def read_to_end(self) -> None:
        """Return once all results that are on the stream now have been read.

        Raises:
            BusUnavailable: The results were not read within :data:`MARK_TIMEOUT` seconds.
        """
        mark = new_mark()
        read = self._marks[mark.message_id] = asyncio.Event()
        try:
            await self.bus.publish(self.topology.exchange("results"), "mark", mark)
            async with asyncio.timeout(MARK_TIMEOUT):
                await read.wait()
        except TimeoutError:
            raise BusUnavailable(f"the results stream did not show a mark within {MARK_TIMEOUT:g} s") from None
        finally:
            del self._marks[mark.message_id]

    async def publish_again(self, ticket: Ticket, slices: Sequence[SliceState]) -> None:
        """Publish slices of an open ticket again, each under its own message id."""
        self.heartbeat_now()  # the heartbeat reports the lost slices
        common = self._common_fields(ticket)
        for task_slice in slices:
            await self._publish_group(ticket, [task_slice], common)

    async def resumed(self) -> None:
        """Return once :meth:`resume` is done. Until then, tickets must not be opened or closed."""
        await self._resumed.wait()

    def make_ticket(
        self, tasks: Sequence[TaskBody], batch_id: BatchId, *, deliver: Deliver, lane: Lane = "train", **more: Any
    ) -> Ticket:
        """Return a ticket with the limits of the configuration filled in. Record its submissions in the trace."""
        explorer = self.config.explorer
        more.setdefault("keep_partial", deliver == "pipeline" and explorer.over_rollout.return_partial_tasks)
        ticket = new_ticket(
            batch_id,
            tasks,
            deliver=deliver,
            lane=lane,
            seed=self.config.seed,
            time_left=explorer.eval_timeout if lane == "eval" else explorer.batch_timeout,
            max_repeat_times=explorer.max_repeat_times_per_runner,
            ticket=None if deliver == "none" else self.queues.next_ticket(),
            **more,
        )
        for submission in ticket.submissions:
            if submission.traceparent:
                now, task = time.monotonic(), (ticket.first_task + submission.task_id, 0)
                record(
                    "take submission", now, now, batch=batch_id, task=task, attributes={LINK: submission.traceparent}
                )
        return ticket

    @property
    def open_tickets(self) -> list[str]:
        """Ids of the tickets that still have slices to execute, as listed in the owner's heartbeats."""
        return [name for name, ticket in self.tickets.items() if ticket.is_open]

    async def open(self, ticket: Ticket) -> None:
        """Save the ticket, declare and bind its batch queue (unless it delivers nothing), publish its slices, and save
        that they are published. Tasks that do not fit into a message or into the manifest fail.

        Several tickets may be opened concurrently. Within a lane, their slices are published in the order of the calls.
        """
        previous_sent, all_sent = self._all_sent.get(ticket.lane), asyncio.get_running_loop().create_future()
        self._all_sent[ticket.lane] = all_sent
        try:
            self.tickets[ticket.ticket] = ticket
            self._opened[ticket.ticket] = None
            if len(self._opened) > KEPT_OPENED:
                self._opened.popitem(last=False)
            again = bool(ticket.opened_beat)
            if not again:
                ticket.opened_beat = self._next_heartbeat()
                if ticket.deliver == "pipeline" and (tasks := ticket.fail_unlisted(self.bus.max_message_bytes)):
                    self._failed(ticket, *tasks)
            with span("save state", ticket.batch, wait=True):
                await self._save()
            if ticket.deliver != "none":
                with span("declare queue", ticket.batch, wait=True):
                    await self.queues.make(ticket, again=again)
            self.on_declared(ticket)
            if previous_sent is not None:
                await asyncio.wait([previous_sent])
            await self._publish_slices(ticket, all_sent)
        finally:
            _resolve(all_sent)
        ticket.published = True
        if ticket.deliver != "none":
            self.queues.want_spare()
        with span("save state", ticket.batch, wait=True):
            await self._save()

    async def resume(self) -> None:
        """Renew the expiry of the batch queues and publish unpublished tickets in the order of their opening. Called
        after a restart, once this dispatcher has caught up.
        """
        await self.queues.keep()
        for ticket in list(self.tickets.values()):
            if not ticket.published and ticket.manifest is None and ticket.ticket in self.tickets:
                await self.open(ticket)
        self._resumed.set()

    def cut_off(self, ticket: Ticket, reason: str, *, keep: bool) -> bool:
        """Make runners drop the unfinished slices of a ticket.

        With ``keep``, finished runs of the tasks that are cut off count; otherwise none of their runs counts. If the
        ticket has ``keep_partial`` too, runners have :data:`CANCEL_GRACE` seconds to publish finished runs. Return
        whether that grace time applies: the caller must then end it with :meth:`cancel_rest`. Otherwise the unfinished
        slices are cancelled here.
        """
        ticket.grace, ticket.whole_tasks_only = CANCEL_GRACE, not keep
        self.heartbeat_now()
        if keep and ticket.keep_partial and ticket.grace:
            return True
        self.cancel_rest(ticket, reason)
        return False

    def cancel_rest(self, ticket: Ticket, reason: str) -> None:
        """Set the outcome *cancelled* for every slice of a ticket that has no outcome yet."""
        for task in ticket.cancel_rest(reason):
            self.on_task_done(ticket, task)
        self.changed.notify()

    async def close(self, ticket: Ticket, manifest: BatchClosed) -> None:
        """Close a ticket: save its manifest (final once saved), unbind its queue, publish the manifest if the ticket
        delivers to the pipeline, answer the submitters, and remove the ticket. The caller then saves the state.
        """
        ticket.manifest = manifest
        with span("save state", ticket.batch, wait=True):
            await self._save()
        if ticket.deliver != "none":
            with span("unbind queue", ticket.batch, wait=True):
                await self.bus.unbind(self.topology.batch_queue(ticket.batch, ticket.ticket))
        if ticket.deliver == "pipeline":
            await self.announce(manifest)
        for submission in ticket.submissions:
            await self.answer(submission, submission_outcome(ticket, submission))
        self.tickets.pop(ticket.ticket, None)

    async def answer(self, submission: SubmissionRef, outcome: SubmissionOutcome, what: str = "outcome") -> None:
        """Send the outcome of a task to its submitter, if the submitter gave an address. A failure to send is only
        logged, unless the bus is unavailable.

        ``what`` is part of the message id. A second answer about the same task needs another value.
        """
        if submission.reply_to is None:
            return
        if not (submission.by_gateway or self.topology.is_reply_queue(submission.reply_to)):
            log.warning("submitter_not_answered", submission=submission.submission_id, reason=NO_REPLY_QUEUE)
            return
        name = f"{what}-{submission.submission_id}"
        # the sessions stream has an exchange: agents may have no permission to publish to queues by name
        sessions = self.topology.exchange("sessions"), "outcome"
        exchange, key = sessions if submission.by_gateway else ("", submission.reply_to)
        try:
            message = envelope(outcome, message_id=name, correlation_id=submission.correlation_id)
            if not await self.bus.publish(exchange, key, message):
                log.info("reply_queue_missing", submission=submission.submission_id, reply_to=submission.reply_to)
        except (BusRefused, MessageTooLarge, ContentError) as error:  # an unreachable submitter must not end the run
            log.warning("submitter_not_answered", submission=submission.submission_id, reason=str(error))

    async def announce(self, manifest: BatchClosed) -> None:
        """Publish a manifest to the operators. If the manifest does not fit into a message, its batch fails."""
        try:
            message = envelope(manifest, message_id=f"closed-{manifest.ticket}")
            await self.bus.publish_declared(self.topology.closed, "closed", message)
        except (MessageTooLarge, ContentError) as error:
            log.warning("manifest_not_published", batch=manifest.batch, reason=str(error))
            await self.fail(manifest, str(error))

    async def fail(self, manifest: BatchClosed, reason: str) -> None:
        """Publish that a closed batch failed, so that the trainer skips it."""
        op = uuid.uuid4().hex
        failed = BatchReady(batch=manifest.batch, ticket=manifest.ticket, op=op, state="failed", reason=reason)
        message = envelope(failed, message_id=f"tomb-{manifest.ticket}-{op}")
        await self.bus.publish(self.topology.exchange("ready"), batch_key(manifest.batch), message)

    # -- publishing

    async def _publish_slices(self, ticket: Ticket, all_sent: asyncio.Future[None]) -> None:
        """Publish the slices without an outcome, with at most :data:`WINDOW` unconfirmed messages, until the ticket is
        cut off. ``all_sent`` is done before the last confirms arrive.
        """
        size = ticket.grouped = self._group_size(ticket)
        groups = (ticket.slices[start : start + size] for start in range(0, len(ticket.slices), size))
        common = self._common_fields(ticket)

        async def publish_next() -> None:
            for group in groups:
                undecided = [task_slice for task_slice in group if task_slice.result is None]
                if undecided and ticket.grace is None:
                    await self._publish_group(ticket, undecided, common)
            _resolve(all_sent)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(WINDOW, len(ticket.slices))):
                group.create_task(publish_next())

    def _group_size(self, ticket: Ticket) -> int:
        """Return the number of slices per message. It is above 1 only if earlier training slices were short, each
        runner still gets two messages, and all runners support grouped slices.
        """
        mean, runners = self.slice_times.mean, self._runners()
        are_able = all(
            isinstance(heartbeat.detail, RunnerStatus) and heartbeat.detail.grouped_slices for heartbeat in runners
        )
        if ticket.lane != "train" or mean is None or not runners or not are_able:
            return 1
        share = math.ceil(len(ticket.slices) / (2 * len(runners)))
        return max(1, min(GROUPED, share, int(GROUP_SECONDS / max(mean, 1e-6))))

    def _common_fields(self, ticket: Ticket) -> dict[str, Any]:
        """Return the fields that all slices of a ticket share."""
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

    async def _publish_group(self, ticket: Ticket, group: Sequence[SliceState], common: dict[str, Any]) -> None:
        """Publish slices in one message, or each in its own message if they cannot be sent together. A task whose slice
        cannot be sent alone fails.
        """
        try:
            message = self._slices_message(ticket, group, common)
            key = f"{ticket.lane}.{batch_key(ticket.batch)}"
            await self.bus.publish_declared(self.topology.task_queue(ticket.lane), key, message)
        except (MessageTooLarge, ContentError) as error:
            if len(group) > 1:
                for task_slice in group:
                    await self._publish_group(ticket, [task_slice], common)
            elif not ticket.is_finished(group[0].task_id):
                reason = f"the task cannot be sent as a message: {error}"
                if isinstance(error, MessageTooLarge):
                    reason = (
                        f"the task takes {len(message.body)} bytes in a message, over broker.max_message_bytes "
                        f"({self.bus.max_message_bytes}): give large fields such as images as paths or URLs, or raise "
                        "it"
                    )
                ticket.decide_rest(group[0].task_id, "failed", reason)
                self._failed(ticket, group[0].task_id)

    @staticmethod
    def _slices_message(ticket: Ticket, group: Sequence[SliceState], common: dict[str, Any]) -> Envelope:
        """Return the message that carries the slices of a group.

        Raises:
            ContentError: The slices hold a value that no message can carry, or nest too deeply.
        """
        with span("encode slices", ticket.batch, count=len(group)) as traced:
            slices = [
                TaskSlice(
                    task_id=(task_id := ticket.first_task + task_slice.task_id),
                    run_base=task_slice.run_base,
                    repeat_times=task_slice.repeat_times,
                    task=ticket.tasks[task_slice.task_id],
                    seed=stable_seed(ticket.seed, ticket.batch, task_id),
                    **common,
                )
                for task_slice in group
            ]
            if len(slices) == 1:
                message = envelope(slices[0], message_id=slices[0].message_id)
            else:
                named: dict[str, HeaderValue] = {"batch": ticket.batch, "ticket": ticket.ticket}
                ids = f"{slices[0].message_id}+{len(slices) - 1}"
                message = envelope(TaskSlices(slices=slices), message_id=ids, headers=named)
            traced.size = len(message.body)
        return message

    def _failed(self, ticket: Ticket, *tasks: int) -> None:
        """Report tasks that failed before they reached a runner."""
        for task in tasks:
            results = ticket.results_of(task)
            name, reason = ticket.first_task + task, results[-1].message
            log.warning("task_not_published", batch=ticket.batch, task=name, reason=reason)
            for result in results:
                self.failures.add(ticket, result)
            self.on_task_done(ticket, task)
        self.changed.notify()

    # -- receiving

    async def _receive(self, delivery: Delivery) -> None:
        """Process a message of the results stream, or set it aside if processing fails. A slice whose result was set
        aside is republished as a lost slice.
        """
        work = functools.partial(self._taken, delivery)
        await handle_or_set_aside(self.bus, self.topology, delivery, self._owner, work)
        if delivery.offset is not None:
            self.results_offset = delivery.offset + 1

    async def _taken(self, delivery: Delivery) -> None:
        ticket = delivery.headers.get("ticket")
        if await acknowledge_foreign(self.bus, delivery):
            pass
        elif (read := self._marks.get(delivery.message_id or "")) is not None:
            read.set()
        elif delivery.kind == TaskResult.kind and isinstance(ticket, str) and ticket not in self.tickets:
            self.late_results += ticket in self._opened  # not even decoded, to save time
        else:
            batch = delivery.headers.get("batch")
            with span("take results", batch if isinstance(batch, int | str) else None, size=len(delivery.body)):
                message = await decode_or_dead_letter(self.bus, self.topology, delivery, self._owner)
                if message is not None:
                    self._apply(message)

    async def _next(self, consumer: Consumer) -> Delivery:
        """Return the next delivery.

        Raises:
            FatalError: The stream ends before the saved offset. A reader beyond the end would wait forever.
        """
        if self._caught_up.is_set():
            return await anext(consumer)
        delivery = await next_or_quiet(self.bus, consumer, MARK_TIMEOUT)
        if delivery is None:
            raise FatalError(
                f"nothing was found on the results stream from offset {self.results_offset} on, not even this "
                "explorer's own mark: the stream is shorter than the saved state says, so this broker or its data "
                "is not that of the saved state. Restore that broker's data, or start over with --fresh"
            )
        return delivery

    def _apply(self, message: Message) -> None:
        if isinstance(message, TaskResults):
            for result in message.results:
                self._apply(result)
        elif isinstance(message, TaskResult):
            ticket = self.tickets.get(message.ticket)
            if ticket is None or ticket.manifest is not None or message.outcome == "late":
                self.late_results += message.ticket in self._opened
            elif ticket.record(message):
                self.failures.add(ticket, message)
                if ticket.lane == "train":
                    self.slice_times.slice_done(message)
                task = message.task_id - ticket.first_task
                if ticket.is_finished(task):
                    self.on_task_done(ticket, task)
                if ticket.is_complete and ticket.lane == "train":
                    self.slice_times.batch_done()
        elif isinstance(message, Progress):
            self.on_progress(message)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
