"""The documented done callback: once for each scheduled task, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.unit.scheduler.test_scheduler import Stage, by_number, play, tasks
from tests.virtual import virtually
from trinity_mq.scheduler.scheduled_tickets import CompletedTask
from trinity_mq.scheduling import Scheduler

Logs = list[Any]


@pytest.fixture(autouse=True)
def logs() -> Iterator[Logs]:
    with capture_logs() as found:
        yield found


def told(stage: Stage) -> list[CompletedTask]:
    """What the callback of the stage's scheduler is told."""
    heard: list[CompletedTask] = []

    class Watched(Scheduler):
        def task_done_callback(self, async_task: CompletedTask) -> None:
            heard.append(async_task)

    stage.scheduler = Watched(stage.config, bus=stage.bus)
    return heard


def watched(stage: Stage, scene: Callable[[Scheduler], Awaitable[Any]]) -> list[CompletedTask]:
    heard = told(stage)
    play(stage, scene)
    return heard


@virtually
async def test_once_for_each_task_before_who_waits_is_woken() -> None:
    stage = Stage("explorer.max_repeat_times_per_runner=1")
    heard = told(stage)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(3, repeat=2), 1)
        scheduler.schedule(tasks(1), "4/e")
        statuses, _ = await scheduler.get_results(1)
        first = [done for done in heard if done.batch_id == 1]
        assert sorted(done.task_id for done in first) == [0, 1, 2]
        assert [done.result() for done in first] == statuses, "in the order in which they ended"
        assert all(done.done() and not done.cancelled() and done.exception() is None for done in first)
        assert {status.total_runs for status in statuses} == {2}, "slices are not tasks"
        await scheduler.get_results("4/e")
    assert [(done.batch_id, done.task_id) for done in heard if done.batch_id != 1] == [("4/e", 0)]


def test_tasks_cut_off_or_aborted_are_told_once_as_cancelled() -> None:
    async def scene(scheduler: Scheduler) -> None:
        scheduler.schedule(tasks(3), 1)
        await scheduler.get_results(1, timeout=5)
        scheduler.schedule(tasks(2), 2)
        await asyncio.sleep(1)
        await scheduler.abort_batch(2)
        await scheduler.abort_batch(2)

    heard = watched(Stage(seconds=by_number({1: 500.0, 2: 500.0})), scene)
    ends = {(done.batch_id, done.task_id): done for done in heard}
    assert len(ends) == len(heard) == 5
    cut_off = {key for key, done in ends.items() if done.cancelled()}
    assert cut_off == {(1, 1), (1, 2), (2, 1)}
    assert ends[1, 0].result().ok
    with pytest.raises(asyncio.CancelledError, match="task 2 of batch 1 was cut off"):
        ends[1, 2].result()


def test_a_task_cut_off_whose_finished_runs_are_kept_has_a_status() -> None:
    stage = Stage(
        "explorer.over_rollout.return_partial_tasks=true",
        "explorer.max_repeat_times_per_runner=1",
        seconds=lambda task_slice: 500.0 if task_slice.run_base else 0.1,
    )

    async def scene(scheduler: Scheduler) -> list[Any]:
        scheduler.schedule(tasks(1, repeat=2), 1)
        statuses, _ = await scheduler.get_results(1, timeout=5)
        return statuses

    heard = told(stage)
    statuses = play(stage, scene)
    assert [(done.cancelled(), done.result()) for done in heard] == [(False, statuses[0])]
    assert (statuses[0].completed_runs, statuses[0].total_runs) == (1, 2)


def test_a_callback_that_fails_is_logged_and_stops_nothing(logs: Logs) -> None:
    class Failing(Scheduler):
        def task_done_callback(self, async_task: CompletedTask) -> None:
            raise ArithmeticError("mine")

    stage = Stage()
    stage.scheduler = Failing(stage.config, bus=stage.bus)

    async def scene(scheduler: Scheduler) -> int:
        scheduler.schedule(tasks(3), 1)
        return len((await scheduler.get_results(1))[0])

    assert play(stage, scene) == 3
    failures = [line for line in logs if line["event"] == "task_done_callback_failed"]
    assert sorted((line["batch"], line["task"]) for line in failures) == [(1, 0), (1, 1), (1, 2)]
