"""The documented Scheduler, scenario by scenario, on both kinds of bus and with real runners."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.contract.scheduler_worlds import RUNNERS, MemoryWorld, RabbitWorld, SchedulerWorld, Stage
from trinity_mq.scheduling import RunnerWrapper, Scheduler, TaskWrapper


@pytest.fixture(
    scope="module", params=["memory", pytest.param("rabbit", marks=[pytest.mark.broker, pytest.mark.timeout(120)])]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerWorld]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    found = RabbitWorld(request.getfixturevalue("broker_url"), tmp_path_factory.mktemp("scheduler"))
    yield found
    found.close()


pytestmark = pytest.mark.usefixtures("logs")


def rids(experiences: list) -> list[str]:  # type: ignore[type-arg]
    return [one.eid.rid for one in experiences]


def test_results_come_in_the_order_in_which_tasks_end(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        stage.scheduler.schedule(stage.tasks(6.0, 0.0, 3.0), 1)
        assert stage.scheduler.has_step(1)
        statuses, experiences = await stage.scheduler.get_results(1)
        assert not stage.scheduler.has_step(1)
        assert await stage.scheduler.get_results(1) == ([], [])
        assert [one.eid.task for one in experiences] == [1, 2, 0]
        assert [one.metric["reward"] for one in statuses] == [1.0, 2.0, 0.0]
        assert all(one.ok and one.completed_runs == one.total_runs == 1 for one in statuses)

    world.play(scene)


@pytest.mark.parametrize("clear", [True, False])
def test_two_of_four_hang_past_the_timeout(world: SchedulerWorld, clear: bool) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(0.0, 0.0, *[60.0 if clear else 8.0] * 2), 3)
        async with stage.lasts(3.0, 3.5):
            statuses, experiences = await scheduler.get_results(3, timeout=3.0 * stage.unit, clear_timeout_tasks=clear)
        assert len(statuses) == len(experiences) == 2
        assert scheduler.has_step(3) is not clear
        if clear:
            async with asyncio.timeout(4.0):
                await stage.idle_again()  # they were cancelled, not waited for
        statuses, more = await scheduler.get_results(3)
        assert sorted(one.eid.task for one in more) == ([] if clear else [2, 3])
        assert len(statuses) == len(more)

    world.play(scene)


def test_a_task_that_fails_is_a_finished_task(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        tasks = [stage.task(n, fail=True) for n in range(3)] + [stage.task(3)]
        stage.scheduler.schedule(tasks, 4)
        statuses, experiences = await stage.scheduler.get_results(4)
        assert len(statuses) == 4
        assert sum(one.ok for one in statuses) == len(experiences) == 1
        assert all("as the record says" in str(one.message) for one in statuses if not one.ok)
        stage.scheduler.schedule(tasks, 5)
        statuses, _ = await stage.scheduler.get_results(5, min_num=4)
        assert len(statuses) == 4, "it counts for min_num"

    world.play(scene)


def test_nothing_scheduled_gives_nothing_at_once(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.scheduler.schedule([], 1) is None
        assert await stage.scheduler.get_results(1) == ([], [])
        assert await stage.scheduler.get_results("no/such") == ([], [])
        assert await stage.scheduler.get_statuses("no/such") == []
        await stage.scheduler.wait_all()
        await stage.scheduler.abort_batch(1)
        assert not stage.scheduler.has_step(1)

    world.play(scene)


def test_min_num_gives_the_first_ones_and_leaves_the_others(
    world: SchedulerWorld, logs: list[dict[str, object]]
) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(3.0, 0.0, 6.0, 1.5), "6/x")
        async with stage.lasts(1.5, 2.0):
            statuses, first = await scheduler.get_results("6/x", min_num=2)
        assert len(statuses) == 2
        assert scheduler.has_step("6/x")
        await scheduler.wait_all()
        _, second = await scheduler.get_results("6/x", min_num=1)
        _, third = await scheduler.get_results("6/x", min_num=7)
        assert [one.eid.task for one in first + second + third] == [1, 3, 0, 2]
        (warning,) = (line for line in logs if line["event"] == "min_num_clamped")
        assert (warning["min_num"], warning["tasks"]) == (7, 1)

    world.play(scene)


def test_run_ids_over_slices(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        stage.scheduler.schedule(stage.tasks(0.0, 0.0, 0.0, 0.0, repeat=8), 7)
        statuses, experiences = await stage.scheduler.get_results(7)
        assert [one.completed_runs for one in statuses] == [8] * 4
        assert len(set(rids(experiences))) == len(experiences) == 32
        assert Counter(one.eid.tid for one in experiences) == {f"7/{task}": 8 for task in range(4)}
        assert [one.eid.run for one in experiences] == list(range(8)) * 4

    world.play(scene, "explorer.max_repeat_times_per_runner=3")


def test_one_batch_id_twice_while_it_is_open(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        assert scheduler.schedule(stage.tasks(0.0, 2.0), 8) != scheduler.schedule(stage.tasks(0.0, 1.0, 0.0), 8)
        statuses, experiences = await scheduler.get_results(8)
        assert len(statuses) == 5
        assert {one.eid.tid for one in experiences} == {f"8/{task}" for task in range(5)}
        scheduler.schedule(stage.tasks(0.0), 8)
        _, experiences = await scheduler.get_results(8)
        assert [one.eid.tid for one in experiences] == ["8/0"], "once all is over ids begin anew"

    world.play(scene)


def test_batches_beside_each_other_keep_apart(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        for batch in (1, 2, "2/eval"):
            scheduler.schedule(stage.tasks(1.0, 0.0, is_eval=batch == "2/eval"), batch)
        found = await asyncio.gather(*(scheduler.get_results(batch) for batch in ("2/eval", 2, 1)))
        for batch, (statuses, experiences) in zip(("2/eval", 2, 1), found, strict=True):
            assert len(statuses) == 2
            wanted = set() if batch == "2/eval" else {batch}
            assert {one.eid.batch for one in experiences} == wanted, "an evaluation has statuses only"

    world.play(scene)


def test_experiences_of_an_evaluation_are_returned_where_that_is_asked_for(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(0.0, is_eval=True), "3/eval", deliver="caller")
        assert len((await scheduler.get_results("3/eval"))[1]) == 1
        runner = RunnerWrapper(0, None, [], scheduler.config, scheduler=scheduler)
        status, experiences, _ = await runner.run_with_retry(TaskWrapper(stage.task(is_eval=True, repeat=2), "3/eval"))
        assert (status.ok, status.completed_runs, experiences) == (True, 1, [])

    world.play(scene)


def test_wait_all_starts_its_timer_anew_and_takes_nothing(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(1.0, 2.0, 3.0, 4.0, 5.0), 1)
        scheduler.schedule(stage.tasks(6.0), 2)
        async with stage.lasts(6.0, 7.0):
            await scheduler.wait_all(timeout=4.5 * stage.unit)  # a timer that started once would end before
        assert len((await scheduler.get_results(1))[1]) == 5
        assert len((await scheduler.get_results(2))[1]) == 1

    world.play(scene)


@pytest.mark.parametrize("clear", [True, False])
def test_wait_all_gives_up_and_says_what_was_left(world: SchedulerWorld, clear: bool) -> None:
    async def scene(stage: Stage) -> None:
        scheduler, seconds = stage.scheduler, 2.0 * stage.unit
        scheduler.schedule(stage.tasks(0.0, 8.0, 8.0), 1)
        with pytest.raises(TimeoutError, match=rf"within {seconds:g} s; 2 were left: 0 pending, 2 running"):
            await scheduler.wait_all(timeout=seconds, clear_timeout_tasks=clear)
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == len(experiences) == (1 if clear else 3)

    world.play(scene)


def test_stop_and_start_again(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(0.0, 0.0, 4.0, repeat=2), 1)
        _, some = await scheduler.get_results(1, min_num=1)
        await scheduler.stop()
        scheduler.schedule(stage.tasks(0.0), 2)
        await stage.sleep(3.0)
        await scheduler.start()
        await scheduler.start()
        _, rest = await scheduler.get_results(1)
        assert len(set(rids(some + rest))) == 6
        assert len((await scheduler.get_results(2))[1]) == 1

    world.play(scene)


def test_over_rollout_waits_a_little_for_the_slow_ones(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(1.0, 1.0, 3.0, 16.0), 1)
        async with stage.lasts(5.0, 5.5):
            statuses, experiences = await scheduler.get_results(1, min_num=2)
        assert len(statuses) == len(experiences) == 3
        assert not scheduler.has_step(1), "the rest was cut off"
        scheduler.schedule(stage.tasks(0.0, 1.0), 2)
        async with stage.lasts(1.0, 1.5):
            assert len((await scheduler.get_results(2, min_num=1))[0]) == 2

    wait = f"explorer.over_rollout.wait_after_min={4 * world.unit}"
    world.play(scene, "explorer.over_rollout.ratio=0.5", wait)


def test_abort_leaves_nothing(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(0.0, 60.0), 1)
        await scheduler.get_statuses(1, min_num=1)
        waiting = asyncio.ensure_future(scheduler.get_results(1))
        await stage.sleep(1.0)
        async with stage.lasts(0.0, 3.0):
            await scheduler.abort_batch(1)
            assert await waiting == ([], [])
            assert not scheduler.has_step(1)
            await stage.idle_again()
        scheduler.schedule(stage.tasks(0.0), 1)
        assert len((await scheduler.get_results(1))[1]) == 1

    world.play(scene)


@pytest.mark.parametrize("per_slice", [1, 4])
def test_abort_can_keep_the_finished_runs_of_unfinished_tasks(world: SchedulerWorld, per_slice: int) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        # finished slices of an unfinished task, or finished runs of an unfinished slice: these its runner sends when it
        # hears of the abort
        unfinished = stage.task(0, repeat=4, stagger=20.0)
        scheduler.schedule([unfinished, stage.task(1), stage.task(2, 40.0)], 1)
        await scheduler.get_statuses(1, min_num=1)
        await stage.sleep(2.0)
        await scheduler.abort_batch(1, return_partial_tasks=True)
        assert scheduler.has_step(1)
        statuses, experiences = await scheduler.get_results(1)
        assert sorted(one.total_runs for one in statuses) == [1, 4]
        assert 1 <= len([one for one in experiences if one.eid.task == 0]) < 4
        assert len([one for one in experiences if one.eid.task == 1]) == 1
        assert not [one for one in experiences if one.eid.task == 2]
        assert sum(one.completed_runs for one in statuses) == len(experiences)

    world.play(scene, f"explorer.max_repeat_times_per_runner={per_slice}")


def test_statuses_move_no_experiences(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        scheduler.schedule(stage.tasks(0.0, 1.0), 1)
        assert len(await scheduler.get_statuses(1)) == 2
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == len(experiences) == 2
        scheduler.schedule(stage.tasks(0.0, 1.0, is_eval=True), "1/eval", deliver="none")
        assert len(await scheduler.get_statuses("1/eval", min_num=1)) == 1
        assert await scheduler.get_results("1/eval") == ([statuses[1]], []) or not scheduler.has_step("1/eval")

    world.play(scene)


def test_two_callers_of_a_batch_share_it(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        stage.scheduler.schedule(stage.tasks(*[0.0] * 6, repeat=2), 1)
        both = await asyncio.gather(stage.scheduler.get_results(1), stage.scheduler.get_results(1))
        assert sum(len(statuses) for statuses, _ in both) == 6
        assert len(set(rids(both[0][1] + both[1][1]))) == 12

    world.play(scene)


def test_runners_can_be_seen(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler: Scheduler = stage.scheduler
        await stage.idle_again()
        assert set(scheduler.get_all_state()) == set(RUNNERS)
        assert scheduler.get_runner_state(0) == scheduler.get_runner_state("runner-0")
        assert scheduler.get_runner_state("runner-9") == {}
        scheduler.schedule(stage.tasks(6.0), 1)
        await stage.heard(lambda states: any(state["running"] for state in states))
        assert len((await scheduler.get_results(1))[0]) == 1

    world.play(scene)


def test_run_with_retry(world: SchedulerWorld) -> None:
    async def scene(stage: Stage) -> None:
        scheduler = stage.scheduler
        runner = RunnerWrapper(0, None, [], scheduler.config, scheduler=scheduler)
        task = stage.task(5, 1.0, repeat=4)
        halves = [TaskWrapper(task, 9, run_id_base=base, repeat_times=2) for base in (0, 2)]
        other = TaskWrapper(stage.task(6), 9)
        done = await asyncio.gather(*(runner.run_with_retry(one) for one in (*halves, other)))
        assert all(status.ok and status.runners == [f"runner-{runner_id}"] for status, _, runner_id in done)
        found = [one for _, experiences, _ in done for one in experiences]
        assert rids(found) == ["9/0/0", "9/0/1", "9/0/2", "9/0/3", "9/1/0"]

    world.play(scene)
