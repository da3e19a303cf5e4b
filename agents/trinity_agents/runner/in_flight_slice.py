"""A slice that a runner holds: its results so far, its cancellation from outside, and the crashes it has caused."""

from __future__ import annotations

import asyncio
from typing import Final

from trinity_mq.bus import Delivery
from trinity_mq.messages import SchedulerStatus, TaskSlice
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.runtime.peers import Peers

SliceKey = tuple[str, int, int]

MAX_CRASHED_SLICES = 1024
"""Slices whose crashes are remembered; those that crashed longest ago are forgotten first."""
MAX_CRASHES = 5
"""Crashes that are remembered of one slice."""
MAX_REASON = 160
"""Characters of a crash's reason."""

CANCELLED: Final = "nobody waits for it any more"
PREEMPTED: Final = "its runner had to end"
OVERDUE: Final = "it went on after its time was over"


class InFlightSlice:
    """One slice, from its delivery until it is reported."""

    def __init__(self, task_slice: TaskSlice, delivery: Delivery, attempt: str) -> None:
        loop = asyncio.get_running_loop()
        self.task_slice, self.delivery, self.attempt = task_slice, delivery, attempt
        self.task = asyncio.current_task()
        self.started = loop.time()
        self.results = RunResults()
        self.over = asyncio.Event()
        self.running = False
        """Whether the workflow is being executed."""
        self.why: str | None = None
        """Reason of the cancellation from outside."""
        self.detached = False
        """Whether it ignored its cancellation: another task reports it."""

    @property
    def key(self) -> SliceKey:
        """Identity of the slice over all of its deliveries."""
        return self.task_slice.ticket, self.task_slice.task_id, self.task_slice.run_base

    @property
    def seconds(self) -> float:
        """Seconds since it was delivered."""
        return asyncio.get_running_loop().time() - self.started

    def end(self, why: str) -> bool:
        """Cancel the workflow; False if it does not run, or was cancelled before."""
        if not self.running or self.why is not None or self.task is None:
            return False
        self.why = why
        self.task.cancel()
        return True

    def absorb_cancel(self) -> bool:
        """Say whether a CancelledError that arrived is that of :meth:`end` alone, and take it back."""
        return self.why is not None and self.task is not None and self.task.uncancel() == 0


class OpenTickets:
    """The open tickets, by their owners' heartbeats (see :mod:`trinity_mq.dispatch.dispatcher`)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known: dict[str, tuple[object, frozenset[str]]] = {}

    def abandoned(self, task_slice: TaskSlice) -> bool:
        """Say whether the owner of a slice, at a time when it must have known of the ticket, did not list it."""
        beat = self._peers.latest(task_slice.explorer) if task_slice.explorer else None
        if beat is None or beat.seq < task_slice.opened_beat:
            return False
        known = self._known.get(task_slice.explorer)
        if known is None or known[0] is not beat:
            tickets = frozenset(beat.detail.open) if isinstance(beat.detail, SchedulerStatus) else frozenset()
            known = self._known[task_slice.explorer] = (beat, tickets)
        return task_slice.ticket not in known[1]


class CrashHistory:
    """The latest crashes that slices have caused in one runner, for their dead letters."""

    def __init__(self) -> None:
        self._crashes: dict[SliceKey, list[str]] = {}

    def add(self, in_flight: InFlightSlice, runner: str, reason: str) -> None:
        """Remember how an attempt ended."""
        known = self._crashes.pop(in_flight.key, [])
        number, reason = in_flight.delivery.deliveries_before + 1, " ".join(reason.split())[:MAX_REASON]
        known.append(f"delivery {number}: attempt {in_flight.attempt} of {runner}: {reason}")
        self._crashes[in_flight.key] = known[-MAX_CRASHES:]
        while len(self._crashes) > MAX_CRASHED_SLICES:
            del self._crashes[next(iter(self._crashes))]

    def of(self, in_flight: InFlightSlice) -> list[str]:
        """Return the crashes of a slice, a line for each; the first line counts those elsewhere."""
        lines, deliveries = self._crashes.get(in_flight.key, []), in_flight.delivery.deliveries_before
        elsewhere = deliveries - sum(not line.startswith(f"delivery {deliveries + 1}:") for line in lines)
        if elsewhere <= 0:
            return list(lines)
        unknown = (
            f"{elsewhere} earlier deliveries ended without a reason known here: the runner died, was cut off or is "
            "another one (its log says slice_comes_again)"
        )
        return [unknown, *lines]
