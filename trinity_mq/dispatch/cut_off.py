"""Decides when enough tasks of a batch are done and the rest is cut off. No I/O."""

from __future__ import annotations

import math
from typing import Literal

from trinity_mq.config import ExplorerConfig, OverRolloutConfig
from trinity_mq.dispatch.tickets import Ticket

CutOffReason = Literal["timeout", "enough"]


def required_tasks(count: int, config: OverRolloutConfig) -> int:
    """Return how many of ``count`` tasks must be done before the others may be cut off, rounded up."""
    return math.ceil(round(count * (1 - config.ratio), 9))  # 10 * (1 - 0.9) is 0.9999999999999998


def seconds_left(done: int, total: int, required: int, *, time_left: float, wait_left: float) -> float:
    """Return for how many seconds unfinished tasks are still waited for; 0 or less: no longer.

    Args:
        done: Number of tasks that are done.
        total: Number of all tasks.
        required: Number of tasks after which only ``wait_left`` applies.
        time_left: Seconds that are left of the batch's timeout.
        wait_left: Seconds that are left to the others once ``required`` tasks are done.
    """
    if done >= total:
        return 0.0
    return min(time_left, wait_left) if done >= required else time_left


def pass_time(ticket: Ticket, seconds: float, config: ExplorerConfig) -> CutOffReason | None:
    """Let ``seconds`` of an incomplete ticket's time pass; return why the rest is to be cut off, None if it is not."""
    over_rollout, done, total = config.over_rollout, ticket.finished_count, len(ticket.tasks)
    applies = over_rollout.ratio and ticket.deliver == "pipeline"
    required = required_tasks(total, over_rollout) if applies else total
    ticket.time_left -= seconds
    if done >= required:
        ticket.wait_left = (over_rollout.wait_after_min if ticket.wait_left is None else ticket.wait_left) - seconds
    if seconds_left(done, total, required, time_left=ticket.time_left, wait_left=ticket.wait_left or 0.0) > 0:
        return None
    return "timeout" if ticket.time_left <= 0 else "enough"
