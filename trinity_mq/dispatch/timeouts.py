"""Time limits: deadlines on a clock that pauses while the broker is unavailable, a timeout derived from the duration of
slices, and the decision when to cut off the rest of a batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from trinity_mq.bus import Bus
from trinity_mq.config import ExplorerConfig, OverRolloutConfig
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import TaskResult

WARMUP_BATCHES = 1
"""Number of complete training batches before the dynamic timeout applies: the first slices also load workflows."""


class UsableClock:
    """Counts the time in which the bus is usable, so that a deadline does not pass while the bus is down."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._paused: dict[asyncio.Timeout, float | None] = {}
        """Remaining seconds of paused deadlines, by deadline. None for deadlines that run."""
        bus.on_change(self._changed)

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after ``seconds`` on this clock, as :func:`asyncio.timeout` does."""
        async with asyncio.timeout(seconds) as deadline:
            self._paused[deadline] = None
            self._changed()
            try:
                yield
            finally:
                del self._paused[deadline]

    def _changed(self) -> None:
        usable = self._bus.usable
        for deadline, remaining_s in self._paused.items():
            if deadline.expired():
                continue
            now, when = asyncio.get_running_loop().time(), deadline.when()
            if usable and remaining_s is not None:
                self._paused[deadline] = None
                deadline.reschedule(now + remaining_s)
            elif not usable and when is not None:
                self._paused[deadline] = max(0.0, when - now)
                deadline.reschedule(None)


class SliceTimes:
    """Mean seconds of training slices since the start of this process, and the dynamic timeout derived from it.

    Only slices with a finished run count. Otherwise a slice that fails at once would shorten the timeout of all others.
    """

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config.dynamic_timeout
        self._count, self._seconds, self._batches = 0, 0.0, 0

    def slice_done(self, result: TaskResult) -> None:
        """Count a slice that has its outcome, if at least one of its runs finished."""
        if result.outcome in {"finished", "partial"} and result.runs:
            self._count += 1
            self._seconds += result.seconds

    def batch_done(self) -> None:
        """Count a batch whose slices all have outcomes."""
        self._batches += 1

    @property
    def mean(self) -> float | None:
        """Mean seconds of a slice. None: no slice with a finished run has ended."""
        return self._seconds / self._count if self._count else None

    def limit(self, seconds: float) -> float:
        """Return the timeout in seconds: ``mean * ratio`` but at most ``seconds``, the configured timeout. Return
        ``seconds`` while the dynamic timeout is disabled or has too few batches.
        """
        if not self._config.enable or self._batches < WARMUP_BATCHES or not self._seconds:
            return seconds
        return min(seconds, self._seconds / self._count * self._config.ratio)


CutOffReason = Literal["timeout", "enough"]


def required_tasks(count: int, config: OverRolloutConfig) -> int:
    """Return the number of tasks, out of ``count``, that must be done before the others may be cut off, rounded up."""
    return math.ceil(round(count * (1 - config.ratio), 9))  # 10 * (1 - 0.9) is 0.9999999999999998


def seconds_left(done: int, total: int, required: int, *, time_left: float, wait_left: float) -> float:
    """Return the seconds for which to wait for unfinished tasks. 0 or less: stop waiting.

    Args:
        done: Number of tasks that are done.
        total: Number of all tasks.
        required: Number of done tasks from which on ``wait_left`` also limits the wait.
        time_left: Seconds left of the batch timeout.
        wait_left: Seconds left for the other tasks once ``required`` tasks are done.
    """
    if done >= total:
        return 0.0
    return min(time_left, wait_left) if done >= required else time_left


def pass_time(ticket: Ticket, seconds: float, config: ExplorerConfig) -> CutOffReason | None:
    """Subtract ``seconds`` from the times left of an incomplete ticket. Return the reason to cut off its unfinished
    slices, or None to continue.
    """
    over_rollout, done, total = config.over_rollout, ticket.finished_count, len(ticket.tasks)
    applies = over_rollout.ratio and ticket.deliver == "pipeline"
    required = required_tasks(total, over_rollout) if applies else total
    ticket.time_left -= seconds
    if done >= required:
        ticket.wait_left = (over_rollout.wait_after_min if ticket.wait_left is None else ticket.wait_left) - seconds
    if seconds_left(done, total, required, time_left=ticket.time_left, wait_left=ticket.wait_left or 0.0) > 0:
        return None
    return "timeout" if ticket.time_left <= 0 else "enough"
