"""A slice in the hands of a runner: what is done of it, and how it is ended from outside."""

from __future__ import annotations

import asyncio
from typing import Final

from trinity_mq.bus import Delivery
from trinity_mq.messages import SchedulerStatus, TaskSlice
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.runtime.peers import Peers

SliceKey = tuple[str, int, int]

CANCELLED: Final = "nobody waits for it any more"
PREEMPTED: Final = "its runner had to end"
OVERDUE: Final = "it went on after its time was over"


class InFlightSlice:
    """One slice, from its delivery until it is answered for."""

    def __init__(self, task_slice: TaskSlice, delivery: Delivery, attempt: str) -> None:
        loop = asyncio.get_running_loop()
        self.task_slice, self.delivery, self.attempt = task_slice, delivery, attempt
        self.task = asyncio.current_task()
        self.started = loop.time()
        self.tally = RunResults()
        self.over = asyncio.Event()
        self.running = False
        """The workflow has its turn."""
        self.why: str | None = None
        """Why it was ended from outside."""
        self.given_up = False
        """It did not end when it was told to: another task answers for it."""

    @property
    def key(self) -> SliceKey:
        """Which slice it is, whoever delivers it and how often."""
        return self.task_slice.ticket, self.task_slice.task_id, self.task_slice.run_base

    @property
    def seconds(self) -> float:
        """Since it was delivered."""
        return asyncio.get_running_loop().time() - self.started

    def end(self, why: str) -> bool:
        """Cancel the workflow; False if it does not run, or was cancelled before."""
        if not self.running or self.why is not None or self.task is None:
            return False
        self.why = why
        self.task.cancel()
        return True

    def was_ended(self) -> bool:
        """Say whether a CancelledError that arrived is that of :meth:`end` alone, and take it back."""
        return self.why is not None and self.task is not None and self.task.uncancel() == 0


class OpenTickets:
    """Which tickets are still waited for, by their owners' beats (see :mod:`trinity_mq.dispatch.dispatcher`)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[str, tuple[object, frozenset[str]]] = {}

    def forgotten(self, task_slice: TaskSlice) -> bool:
        """Say whether the owner of a slice, at a time when it must have known of the ticket, did not list it."""
        beat = self._peers.latest(task_slice.explorer) if task_slice.explorer else None
        if beat is None or beat.seq < task_slice.opened_beat:
            return False
        known = self._known.get(task_slice.explorer)
        if known is None or known[0] is not beat:
            tickets = frozenset(beat.detail.open) if isinstance(beat.detail, SchedulerStatus) else frozenset()
            known = self._known[task_slice.explorer] = (beat, tickets)
        return task_slice.ticket not in known[1]
