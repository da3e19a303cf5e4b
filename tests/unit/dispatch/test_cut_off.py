"""When enough tasks are done and the rest is cut off."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trinity_mq.config import load_config
from trinity_mq.config.agents import OverRolloutConfig
from trinity_mq.dispatch.tickets import Ticket, new_ticket
from trinity_mq.dispatch.timeouts import pass_time, required_tasks, seconds_left
from trinity_mq.messages import TaskBody, TaskResult


@pytest.mark.parametrize(
    ("tasks", "ratio", "required"), [(4, 0.5, 2), (5, 0.5, 3), (10, 0.9, 1), (10, 0.3, 7), (3, 0, 3)]
)
def test_how_many_tasks_are_enough(tasks: int, ratio: float, required: int) -> None:
    assert required_tasks(tasks, OverRolloutConfig(ratio=ratio)) == required


@pytest.mark.parametrize(
    ("done", "total", "required", "time_left", "wait_left", "seconds"),
    [
        (0, 4, 2, 60.0, 5.0, 60.0),  # too few: the whole timeout
        (1, 4, 2, 0.0, 5.0, 0.0),  # too few, and time is up
        (2, 4, 2, 60.0, 5.0, 5.0),  # enough: the rest has only the wait
        (3, 4, 2, 60.0, 0.0, 0.0),  # enough, and the wait is over
        (2, 4, 2, 3.0, 5.0, 3.0),  # the wait never exceeds the timeout
        (4, 4, 2, 60.0, 5.0, 0.0),  # all
        (4, 4, 4, 60.0, 5.0, 0.0),
        (3, 3, 4, 60.0, 5.0, 0.0),  # other callers took some: fewer are left than were required
        (0, 0, 0, 60.0, 5.0, 0.0),
        (0, 4, 0, 60.0, 0.0, 0.0),  # none is required
        (0, 4, 2, math.inf, 5.0, math.inf),
    ],
)
def test_how_long_the_rest_is_waited_for(
    done: int, total: int, required: int, time_left: float, wait_left: float, seconds: float
) -> None:
    assert seconds_left(done, total, required, time_left=time_left, wait_left=wait_left) == seconds


def ticket_of(tasks: int, done: int, deliver: Any = "pipeline") -> Ticket:
    ticket = new_ticket(1, [TaskBody()] * tasks, deliver=deliver, lane="train", time_left=10.0)
    for task in range(done):
        ticket.record(
            TaskResult(batch=1, ticket=ticket.ticket, task_id=task, attempt="a", outcome="finished", runs=[0])
        )
    return ticket


@pytest.mark.parametrize(
    ("ratio", "done", "deliver", "reasons"),
    [
        (0.5, 1, "pipeline", [None, None, None, "timeout"]),
        (0.5, 2, "pipeline", [None, "enough", "enough", "timeout"]),
        (0.0, 3, "pipeline", [None, None, None, "timeout"]),
        (0.5, 2, "none", [None, None, None, "timeout"]),  # evaluations wait for all
    ],
)
def test_a_ticket_is_cut_off_for_a_reason(ratio: float, done: int, deliver: Any, reasons: list[Any]) -> None:
    overrides = (f"explorer.over_rollout.ratio={ratio}", "explorer.over_rollout.wait_after_min=5")
    config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides).explorer
    ticket = ticket_of(4, done, deliver)
    assert [pass_time(ticket, seconds, config) for seconds in (2.5, 2.5, 2.5, 2.5)] == reasons
    assert ticket.time_left == 0.0


def test_the_wait_begins_when_enough_are_done_and_goes_on_after_a_restart() -> None:
    overrides = ("explorer.over_rollout.ratio=0.5", "explorer.over_rollout.wait_after_min=3")
    config = load_config({"name": "cut", "model": {"tiny": {}}}, overrides).explorer
    ticket = ticket_of(2, 0)
    assert pass_time(ticket, 4.0, config) is None
    assert ticket.wait_left is None
    ticket.record(TaskResult(batch=1, ticket=ticket.ticket, task_id=1, attempt="a", outcome="finished", runs=[0]))
    assert pass_time(ticket, 2.0, config) is None
    again = Ticket.model_validate(ticket.model_dump())
    assert pass_time(again, 1.0, config) == "enough"
