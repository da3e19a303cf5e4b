"""A slice in flight at a runner: its earlier deliveries, its results so far and its external cancellation.

Slices that came in one message are answered separately (:class:`SliceGroup`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from trinity_mq.bus import Bus, Delivery
from trinity_mq.bus.base import Answer
from trinity_mq.messages import CONTENT_TYPE, SchedulerStatus, TaskSlice, encode
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.runtime.deliveries import DeliveryHistory, acknowledge, republish, requeue
from trinity_mq.runtime.peers import Peers

SliceKey = tuple[str, int, int]

CANCELLED: Final = "its result is not needed any more"
PREEMPTED: Final = "its runner was stopped"
OVERDUE: Final = "it exceeded its time limit"
STOPPED: Final = "stopped"
"""Failure kind of a slice that was stopped because its result is not needed or its runner ends, so that the failure is
not the slice's own."""


class InFlightSlice:
    """One slice in a runner, from the time at which it gets a slot until its delivery is answered."""

    def __init__(self, task_slice: TaskSlice, delivery: Delivery, attempt: str) -> None:
        loop = asyncio.get_running_loop()
        self.task_slice, self.delivery, self.attempt = task_slice, delivery, attempt
        self.past = DeliveryHistory.of(delivery)
        self.task = asyncio.current_task()
        self.started = loop.time()
        self.results = RunResults()
        self.over = asyncio.Event()
        self.running = False
        """Whether the workflow is being executed."""
        self.why: str | None = None
        """Reason of the external cancellation, None without a cancellation."""
        self.detached = False
        """Whether the workflow ignored its cancellation, so that another task reports the slice."""

    @property
    def key(self) -> SliceKey:
        """Identity of the slice in all of its deliveries: (ticket, task id, first run)."""
        return self.task_slice.ticket, self.task_slice.task_id, self.task_slice.run_base

    @property
    def name(self) -> str:
        """The key as text, separated by slashes."""
        return "/".join(map(str, self.key))

    @property
    def seconds(self) -> float:
        """Seconds since the slice got a slot."""
        return asyncio.get_running_loop().time() - self.started

    def end(self, why: str) -> bool:
        """Cancel the workflow for the reason ``why``; return False if it is not running or was already cancelled by
        this method.
        """
        if not self.running or self.why is not None or self.task is None:
            return False
        self.why = why
        self.task.cancel()
        return True

    def absorb_cancel(self) -> bool:
        """Undo the cancellation of :meth:`end`; return whether no other cancellation of the task is pending."""
        return self.why is not None and self.task is not None and self.task.uncancel() == 0


class OpenTickets:
    """The open tickets in their owners' heartbeats (see :mod:`trinity_mq.dispatch.dispatcher`)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[str, tuple[object, frozenset[str]]] = {}

    def abandoned(self, task_slice: TaskSlice) -> bool:
        """Return whether the slice's ticket is missing in the latest heartbeat of its owner, if that heartbeat was sent
        after the owner had opened the ticket.
        """
        beat = self._peers.latest(task_slice.explorer) if task_slice.explorer else None
        if beat is None or beat.seq < task_slice.opened_beat:
            return False
        cached = self._known.get(task_slice.explorer)
        if cached is None or cached[0] is not beat:
            tickets = frozenset(beat.detail.open) if isinstance(beat.detail, SchedulerStatus) else frozenset()
            cached = self._known[task_slice.explorer] = (beat, tickets)
        return task_slice.ticket not in cached[1]


class SliceGroup:
    """Answers a delivery of several slices once each of its slices was answered.

    Args:
        delivery: The delivery.
        slices: The slices in the delivery.
    """

    def __init__(self, delivery: Delivery, slices: Sequence[TaskSlice]) -> None:
        self._delivery, self._slices = delivery, slices
        self._unanswered = len(slices)
        self._must_requeue = False

    @property
    def deliveries(self) -> list[tuple[TaskSlice, Delivery]]:
        """Each slice with a separate delivery."""
        return [(task_slice, _SliceDelivery(self, self._delivery, task_slice)) for task_slice in self._slices]

    async def publish_separately(self, bus: Bus) -> None:
        """Publish each slice in a separate message, with headers about earlier deliveries, then acknowledge the
        delivery of all of them. If a message is not accepted, requeue the delivery instead.

        If a slice has crashed the runners that had the message, it is then identified and does not affect the other
        slices. If this process dies before the acknowledgement, slices are delivered twice, and the readers of results
        drop the second result.
        """
        past = DeliveryHistory.of(self._delivery)
        apart = (republish(bus, delivery, past) for _, delivery in self.deliveries)
        if all(await asyncio.gather(*apart)):
            await acknowledge(self._delivery)
        else:
            await requeue(self._delivery)

    async def settle(self, answer: Answer) -> None:
        """Record the answer to one slice. The last answer settles the delivery.

        The delivery is requeued if any of its slices was requeued; its slices are published separately after the
        redelivery.
        """
        self._unanswered -= 1
        self._must_requeue |= answer == "requeue"
        if self._unanswered:
            return
        await (self._delivery.requeue() if self._must_requeue else self._delivery.ack())


class _SliceDelivery(Delivery):
    """One slice of a group as a separate delivery."""

    def __init__(self, group: SliceGroup, whole: Delivery, task_slice: TaskSlice) -> None:
        super().__init__(
            body=encode(task_slice),
            exchange=whole.exchange,
            routing_key=whole.routing_key,
            queue=whole.queue,
            message_id=task_slice.message_id,
            content_type=CONTENT_TYPE,
            headers={**whole.headers, "kind": task_slice.kind, "version": task_slice.version_number},
            deliveries_before=whole.deliveries_before,
        )
        self._group = group

    async def _settle(self, answer: Answer) -> None:
        await self._group.settle(answer)
