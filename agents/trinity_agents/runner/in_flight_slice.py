"""A slice in flight at a runner: its earlier deliveries, its results so far and its external cancellation."""

from __future__ import annotations

import asyncio
from typing import Final

from trinity_mq.bus import Delivery
from trinity_mq.messages import SchedulerStatus, TaskSlice
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.runtime.deliveries import DeliveryHistory
from trinity_mq.runtime.peers import Peers

SliceKey = tuple[str, int, int]

CANCELLED: Final = "its result is not needed any more"
PREEMPTED: Final = "its runner was stopped"
OVERDUE: Final = "it exceeded its time limit"
STOPPED: Final = "stopped"
"""Failure kind of a slice that was stopped from outside and is not to blame."""


class InFlightSlice:
    """One slice, from its delivery until it is reported."""

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
        """Cancel the workflow; return False if it is not running or already cancelled."""
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
        """Return whether the owner of a slice, in a heartbeat after it opened the ticket, does not list the ticket."""
        beat = self._peers.latest(task_slice.explorer) if task_slice.explorer else None
        if beat is None or beat.seq < task_slice.opened_beat:
            return False
        cached = self._known.get(task_slice.explorer)
        if cached is None or cached[0] is not beat:
            tickets = frozenset(beat.detail.open) if isinstance(beat.detail, SchedulerStatus) else frozenset()
            cached = self._known[task_slice.explorer] = (beat, tickets)
        return task_slice.ticket not in cached[1]
