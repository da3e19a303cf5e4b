"""The documented Scheduler (deliver="caller") on MemoryBus in virtual time, with a runner of the test kit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from tests.virtual import virtually
from tests.waiting import until
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import Config, load_config
from trinity_mq.messages import BatchClosed, ControlEvent, TaskSlice, decode
from trinity_mq.runtime.errors import FatalError
from trinity_mq.scheduling import RunnerWrapper, Scheduler, Status, TaskWrapper
from trinity_mq.testing.fakes import FakeRunner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.workflows import Task


class Stage:
    """One broker, one runner, one scheduler."""

    def __init__(
        self, *overrides: str, seconds: Callable[[TaskSlice], float] = lambda task_slice: 0.1, runner: bool = True
    ) -> None:
        self.config: Config = load_config({"name": "sched", "model": {"tiny": {}}}, overrides)
        self.topology, self.broker, self.with_runner = Topology("sched"), MemoryBroker(), runner
        self.bus = MemoryBus(self.broker, self.topology, config=self.config.broker)
        self.runner = FakeRunner(self.another(), self.topology, lambda: (1, 3), seconds)
        self.scheduler = Scheduler(self.config, bus=self.bus)

    def another(self) -> MemoryBus:
        return MemoryBus(self.broker, self.topology, config=self.config.broker)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Scheduler]:
        await self.bus.connect()
        await self.bus.declare(*self.topology.durable)
        await self.runner.bus.connect()
        working = asyncio.get_running_loop().create_task(self.runner.run())
        if not self.with_runner:
            working.cancel()
        try:
            await self.scheduler.start()
            yield self.scheduler
            await self.scheduler.stop()
            assert self.scheduler.dispatcher.queues.spare is None
        finally:
            working.cancel()
            await asyncio.wait([working])

    def batch_queues(self) -> list[str]:
        """Return the batch queues of tickets; one that is declared ahead belongs to none yet."""
        spare = f".batch.{self.scheduler.dispatcher.queues.spare}"
        return [name for name in self.broker.queues if ".batch." in name and not name.endswith(spare)]


def tasks(count: int, repeat: int = 1, **raw: Any) -> list[Task]:
    return [Task(repeat_times=repeat, raw_task={"n": n, **raw}) for n in range(count)]


def play(stage: Stage, scene: Callable[[Scheduler], Awaitable[Any]], limit: float = 5000) -> Any:
    async def main() -> Any:
        async with stage.up() as scheduler:
            return await scene(scheduler)

    return run_virtually(main(), limit=limit)


def by_number(seconds: dict[int, float]) -> Callable[[TaskSlice], float]:
    return lambda task_slice: seconds.get(task_slice.task.raw_task["n"], 0.1)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtually
async def test_all_results_of_a_batch_each_once() -> None:
    async with Stage().up() as scheduler:
        scheduler.schedule(tasks(3, repeat=2), 7)
        assert scheduler.has_step(7)
        statuses, experiences = await scheduler.get_results(7)
        assert [(one.ok, one.completed_runs, one.total_runs) for one in statuses] == [(True, 2, 2)] * 3
        assert all(one.metric == {"accuracy": 1.0, "reward": 1.0} for one in statuses)
        assert [one.eid.rid for one in experiences] == [f"7/{task}/{run}" for task in range(3) for run in range(2)]
        assert not scheduler.has_step(7)
        assert await scheduler.get_results(7) == ([], [])


@virtually
async def test_a_task_larger_than_a_message_fails_with_the_reason_and_the_others_are_run() -> None:
    async with Stage("broker.max_message_bytes=65536").up() as scheduler:
        large = Task(repeat_times=2, raw_task={"n": 9, "image": b"x" * 100_000})
        scheduler.schedule([*tasks(2), large], 1)
        statuses, experiences = await scheduler.get_results(1)
        assert sorted(status.ok for status in statuses) == [False, True, True]
        (failed,) = [status for status in statuses if not status.ok]
        assert (failed.completed_runs, failed.total_runs) == (0, 2)
        assert "over broker.max_message_bytes (65536)" in str(failed.message)
        assert len(experiences) == 2


@virtually
async def test_an_unknown_batch_and_no_tasks_give_nothing_at_once() -> None:
    async with Stage().up() as scheduler:
        started = now()
        assert await scheduler.get_results("9/none") == ([], [])
        assert scheduler.schedule([], 1) is None
        assert await scheduler.get_results(1) == ([], [])
        assert now() - started < 0.1


@virtually
async def test_min_num_returns_early_and_the_rest_comes_with_a_later_call() -> None:
    async with Stage(seconds=by_number({2: 5.0, 3: 9.0})).up() as scheduler:
        scheduler.schedule(tasks(4), 1)
        started = now()
        statuses, experiences = await scheduler.get_results(1, min_num=2)
        assert now() - started < 4
        assert len(statuses) == len(experiences) == 2
        assert scheduler.has_step(1)
        rest, more = await scheduler.get_results(1)
        assert len(rest) == len(more) == 2
        assert sorted(one.eid.task for one in experiences + more) == [0, 1, 2, 3]


@virtually
async def test_min_num_beyond_what_there_is_is_clamped_with_a_warning() -> None:
    async with Stage().up() as scheduler:
        scheduler.schedule(tasks(2), 1)
        with structlog.testing.capture_logs() as logs:
            statuses, _ = await scheduler.get_results(1, min_num=5)
        assert len(statuses) == 2
        (warning,) = (line for line in logs if line["event"] == "min_num_clamped")
        assert (warning["min_num"], warning["tasks"]) == (5, 2)


@virtually
async def test_the_wait_for_more_than_enough_never_exceeds_the_timeout() -> None:
    overrides = ("explorer.over_rollout.ratio=0.5", "explorer.over_rollout.wait_after_min=500")
    async with Stage(*overrides, seconds=by_number({1: 8.0, 2: 400.0})).up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        started = now()
        statuses, _ = await scheduler.get_results(1, min_num=1, timeout=10.0)
        assert 8.0 <= now() - started < 20.0
        assert len(statuses) == 2, "one more was done in time"
        assert not scheduler.has_step(1), "the rest was cut off"


@pytest.mark.parametrize("clear", [True, False])
@virtually
async def test_a_timeout_gives_what_is_done_and_the_rest_is_cleared_or_comes_later(clear: bool) -> None:
    async with Stage(seconds=by_number({2: 8.0})).up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        started = now()
        statuses, experiences = await scheduler.get_results(1, timeout=4.0, clear_timeout_tasks=clear)
        assert 4.0 <= now() - started < 5.5
        assert len(statuses) == len(experiences) == 2
        assert scheduler.has_step(1) is not clear
        await asyncio.sleep(10.0)
        late, more = await scheduler.get_results(1, timeout=1.0)
        assert [one.eid.task for one in more] == ([] if clear else [2])
        assert len(late) == len(more)


@virtually
async def test_the_default_timeout_is_the_batchs() -> None:
    async with Stage("explorer.batch_timeout=50", "explorer.max_timeout=10", runner=False).up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        started = now()
        assert await scheduler.get_results(1) == ([], [])
        assert 50.0 <= now() - started < 52.0


@virtually
async def test_slices_of_a_task_are_one_group_with_a_run_id_each() -> None:
    stage = Stage("explorer.max_repeat_times_per_runner=3")
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2, repeat=8), 1)
        statuses, experiences = await scheduler.get_results(1)
        assert [one.completed_runs for one in statuses] == [8, 8]
        assert len({one.eid.rid for one in experiences}) == 16
        assert {one.eid.tid for one in experiences} == {"1/0", "1/1"}
        assert sorted(task_slice.repeat_times for task_slice in stage.runner.done) == [2, 2, 3, 3, 3, 3]


@virtually
async def test_the_same_batch_twice_is_two_tickets() -> None:
    async with Stage().up() as scheduler:
        first = scheduler.schedule(tasks(2, which="first"), 1)
        second = scheduler.schedule(tasks(3, which="second"), 1)
        assert first != second
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == len(experiences) == 5


@virtually
async def test_a_result_of_a_cleared_ticket_never_reaches_its_successor() -> None:
    stage = Stage(seconds=lambda task_slice: 6.0 if task_slice.task.raw_task["which"] == "old" else 9.0)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(1, which="old"), 1)
        assert await scheduler.get_results(1, timeout=2.0) == ([], [])
        scheduler.schedule(tasks(1, which="new"), 1)
        started = now()
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == len(experiences) == 1
        assert now() - started > 8.0
        assert scheduler.dispatcher.late_results == 1


@virtually
async def test_slices_go_out_in_the_order_of_their_tickets_and_evaluations_do_not_wait() -> None:
    stage = Stage(runner=False)
    sent: list[TaskSlice] = []
    publish = stage.bus.publish

    async def slowly(exchange: str, key: str, mail: Any, **how: Any) -> bool:
        if mail.kind == "task_slice":
            sent.append(decode(mail.body, TaskSlice))
            await asyncio.sleep(1.0)
        return await publish(exchange, key, mail, **how)

    stage.bus.publish = slowly  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        started = now()
        for batch, count in ((1, 300), (2, 200), (3, 1)):
            scheduler.schedule(tasks(count), batch)
        scheduler.schedule([Task(is_eval=True)], "3/eval", deliver="none")
        await until(lambda: len(sent) == 502)
        assert now() - started < 10.0, "many are under way at a time"
        train = [task_slice.batch for task_slice in sent if task_slice.lane == "train"]
        assert train == [1] * 300 + [2] * 200 + [3]
        assert [task_slice.lane for task_slice in sent].index("eval") < 300
        for batch in (1, 2, 3, "3/eval"):
            await scheduler.abort_batch(batch)


@virtually
async def test_what_is_aborted_while_it_is_published_goes_no_further() -> None:
    stage = Stage(runner=False)
    publish, sent = stage.bus.publish, 0

    async def slowly(exchange: str, key: str, mail: Any, **how: Any) -> bool:
        nonlocal sent
        if mail.kind == "task_slice":
            sent += 1
            await asyncio.sleep(1.0)
        return await publish(exchange, key, mail, **how)

    stage.bus.publish = slowly  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2000), 1)
        await asyncio.sleep(1.5)
        await scheduler.abort_batch(1)
        before = sent
        await asyncio.sleep(20.0)
        assert 0 < sent == before < 2000
        assert not stage.batch_queues()


@virtually
async def test_a_ticket_for_the_pipeline_is_closed_once_all_its_statuses_were_returned() -> None:
    stage = Stage()
    async with stage.up() as scheduler:
        ticket = scheduler.schedule(tasks(3, repeat=2), 1, deliver="pipeline")
        statuses, experiences = await scheduler.get_results(1, min_num=1)
        assert (len(statuses), experiences) == (1, [])
        assert await stage.bus.depth(stage.topology.closed.name) == 0
        assert len(await scheduler.get_statuses(1)) == 2
        async with await stage.bus.consume(stage.topology.closed) as feed:
            manifest = decode((await anext(feed)).body, BatchClosed)
        assert (manifest.ticket, manifest.outcomes) == (ticket, {"finished": 3})
        assert sum(len(one.runs) for one in manifest.accepted) == 6
        assert manifest.metrics["rollout/finished_runs"] == 6.0
        assert not scheduler.has_step(1)
        assert len(stage.batch_queues()) == 1, "it is the operators'"


@virtually
async def test_two_callers_of_a_batch_share_its_tasks() -> None:
    async with Stage().up() as scheduler:
        scheduler.schedule(tasks(6, repeat=2), 1)
        both = await asyncio.gather(scheduler.get_results(1), scheduler.get_results(1))
        assert sum(len(statuses) for statuses, _ in both) == 6
        rids = [one.eid.rid for _, experiences in both for one in experiences]
        assert len(rids) == len(set(rids)) == 12


@virtually
async def test_a_caller_who_got_nothing_takes_nobodys_experiences_away() -> None:
    stage = Stage()
    publish = stage.runner.bus.publish

    async def delays_parts(exchange: str, key: str, mail: Any, **how: Any) -> bool:
        if mail.kind != "experience_part":
            return await publish(exchange, key, mail, **how)
        asyncio.get_running_loop().call_later(
            2.0, lambda: late.append(asyncio.ensure_future(publish(exchange, key, mail)))
        )
        return True

    late: list[Any] = []
    stage.runner.bus.publish = delays_parts  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        both = await asyncio.gather(scheduler.get_results(1), scheduler.get_results(1))
        assert sorted(len(statuses) for statuses, _ in both) == [0, 3]
        assert sorted(len(experiences) for _, experiences in both) == [0, 3]
        assert not scheduler.has_step(1)


@virtually
async def test_wait_all_takes_nothing_and_its_timer_starts_anew_at_each_completion() -> None:
    stage = Stage(seconds=by_number({0: 3.0, 1: 6.0, 2: 9.0}))
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2), 1)
        scheduler.schedule(tasks(3), "1/other")
        await scheduler.wait_all(timeout=4.0)
        assert now() > 8.0
        assert len((await scheduler.get_results(1))[0]) == 2
        assert len((await scheduler.get_results("1/other"))[0]) == 3


@virtually
async def test_wait_all_counts_a_completion_also_when_more_is_scheduled_meanwhile() -> None:
    stage = Stage(seconds=by_number({0: 3.0, 1: 6.0}))
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2), 1)
        waiting = asyncio.ensure_future(scheduler.wait_all(timeout=4.0))
        await asyncio.sleep(2.9)
        scheduler.schedule(tasks(2), 2)
        scheduler.schedule(tasks(2), 3)
        await waiting


@pytest.mark.parametrize("timeout", [4.0, None])
@pytest.mark.parametrize("clear", [True, False])
@virtually
async def test_wait_all_says_what_was_left(timeout: float | None, clear: bool) -> None:
    stage = Stage("explorer.batch_timeout=30", "explorer.max_timeout=10", seconds=by_number({1: 45.0, 2: 46.0}))
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        with pytest.raises(TimeoutError, match=rf"within {timeout or 30.0:g} s; 2 were left: 0 pending, 2 running"):
            await scheduler.wait_all(timeout=timeout, clear_timeout_tasks=clear)
        started = now()
        statuses, experiences = await scheduler.get_results(1, timeout=60.0)
        assert len(statuses) == len(experiences) == (1 if clear else 3), "what is done stays"
        assert (now() - started < 1.0) is clear
        assert not scheduler.has_step(1)


@virtually
async def test_stop_and_start_again_loses_nothing() -> None:
    async with Stage(seconds=by_number({3: 6.0})).up() as scheduler:
        scheduler.schedule(tasks(4), 1)
        first, some = await scheduler.get_results(1, min_num=1)
        await scheduler.stop()
        scheduler.schedule(tasks(2), 2)
        await asyncio.sleep(20.0)
        assert scheduler.has_step(1)
        await scheduler.start()
        rest, more = await scheduler.get_results(1)
        assert len(first + rest) == len(some + more) == 4
        assert len((await scheduler.get_results(2))[0]) == 2


@virtually
async def test_what_was_scheduled_at_the_moment_of_a_stop_is_opened_by_the_next_start() -> None:
    stage = Stage()
    stuck = asyncio.Event()
    declare = stage.bus.declare

    async def hangs_once(*queues: Any) -> None:
        if not stuck.is_set() and ".batch." in queues[0].name:
            stuck.set()
            await asyncio.sleep(1e5)
        await declare(*queues)

    stage.bus.declare = hangs_once  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        await stuck.wait()
        await scheduler.stop()
        await scheduler.start()
        assert len((await scheduler.get_results(1))[0]) == 1


@virtually
async def test_who_waits_hears_of_a_stop() -> None:
    async with Stage(runner=False).up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        waiting = asyncio.ensure_future(scheduler.get_results(1))
        await asyncio.sleep(1.0)
        await scheduler.stop()
        with pytest.raises(RuntimeError, match="stopped while a caller waited"):
            await waiting


@virtually
async def test_a_failing_background_task_is_told_to_who_waits() -> None:
    stage = Stage(runner=False)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        waiting = asyncio.ensure_future(scheduler.get_results(1))
        await asyncio.sleep(1.0)
        await stage.bus.delete(stage.topology.results.name)
        started = now()
        with pytest.raises(ExceptionGroup):
            await waiting
        assert now() - started < 1.0
        with pytest.raises(ExceptionGroup):
            await scheduler.stop()


@virtually
async def test_a_results_stream_shorter_than_the_saved_offset_is_an_error_and_no_hang() -> None:
    stage = Stage(runner=False)
    stage.scheduler.dispatcher.results_offset = 1000
    await stage.bus.connect()
    with pytest.raises(ExceptionGroup) as caught:
        await stage.scheduler.start()
    assert caught.value.subgroup(FatalError) is not None
    assert "results stream from offset 1000" in str(caught.value.exceptions[0])


@virtually
async def test_a_batch_queue_is_unbound_first_and_deleted_a_second_later() -> None:
    stage = Stage()
    events: list[tuple[str, float]] = []
    unbind, delete = stage.bus.unbind, stage.bus.delete

    async def unbinds(queue: Any) -> None:
        events.append(("unbind", now()))
        await unbind(queue)

    async def deletes(name: str) -> None:
        events.append(("delete", now()))
        await delete(name)

    stage.bus.unbind, stage.bus.delete = unbinds, deletes  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2), 1)
        assert len(await scheduler.get_results(1)) == 2
        returned = now()
        assert len(stage.batch_queues()) == 1
        await asyncio.sleep(3.0)
        (first, unbound), (second, deleted) = events
        assert (first, second) == ("unbind", "delete")
        assert deleted - unbound >= 1.0
        assert abs(returned - unbound) < 0.5, "nobody waits for the second"
        assert not stage.batch_queues()


@virtually
async def test_a_connection_lost_while_experiences_are_read_costs_time_only() -> None:
    stage = Stage(seconds=by_number({1: 3.0}))
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(3, repeat=2), 1)
        first, some = await scheduler.get_results(1, min_num=1)
        stage.broker.drop(stage.bus, delay=2.0)
        rest, more = await scheduler.get_results(1)
        assert len(first + rest) == 3
        rids = [one.eid.rid for one in some + more]
        assert len(rids) == len(set(rids)) == 6


@virtually
async def test_a_part_that_does_not_decode_is_parked_and_stops_nothing() -> None:
    stage = Stage()
    publish = stage.runner.bus.publish

    async def spoils(exchange: str, key: str, mail: Any, **how: Any) -> bool:
        from dataclasses import replace

        if mail.kind == "experience_part" and not stage.runner.done:
            mail = replace(mail, body=mail.body[:-3])
        return await publish(exchange, key, mail, **how)

    stage.runner.bus.publish = spoils  # type: ignore[method-assign]
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2), 1)
        statuses, experiences = await scheduler.get_results(1)
        assert len(statuses) == 2
        assert len(experiences) < 2
        assert await stage.bus.depth(stage.topology.dead.name) == 2 - len(experiences)


# -- the wrappers


@virtually
async def test_run_with_retry_gives_each_caller_its_own_also_in_a_batch_that_is_under_way() -> None:
    async with Stage(seconds=lambda task_slice: 1.0).up() as scheduler:
        runners = [RunnerWrapper(n, None, [], scheduler.config, scheduler=scheduler) for n in range(3)]
        task = Task(repeat_times=16, raw_task={"n": 5})
        scheduler.schedule(tasks(2), 4)
        wrapped = [TaskWrapper(task, 4, run_id_base=4 * n, repeat_times=4) for n in range(3)]
        under_way = [asyncio.ensure_future(one.run_with_retry(w)) for one, w in zip(runners, wrapped, strict=True)]
        await asyncio.sleep(0.5)
        statuses, _ = await scheduler.get_results(4)
        assert len(statuses) == 2, "what others run is nobody else's result"
        done = await asyncio.gather(*under_way)
        for n, (status, experiences, runner) in enumerate(done):
            assert isinstance(status, Status)
            assert (status.ok, status.completed_runs) == (True, 4)
            assert (runner, status.runners) == (0, ["runner-0"]), "the runner that did the work"
            assert [one.eid.run for one in experiences] == [4 * n + k for k in range(4)]
            assert {one.eid.batch for one in experiences} == {4}
        assert task.repeat_times == 16, "the caller's task is not changed"


@pytest.mark.parametrize(
    ("handle", "runner", "said"),
    [("runner-7", "runner-3", "runner-3"), (7, "runner-3", 3), (7, "gpu-host", "gpu-host")],
)
@virtually
async def test_run_with_retry_names_the_runner_in_the_form_of_the_handle(handle: Any, runner: str, said: Any) -> None:
    stage = Stage()
    stage.runner.name = runner
    async with stage.up() as scheduler:
        one = RunnerWrapper(handle, None, [], scheduler.config, scheduler=scheduler)
        assert (await one.run_with_retry(TaskWrapper(tasks(1)[0], 1)))[2] == said


@virtually
async def test_run_with_retry_says_when_it_was_not_done() -> None:
    stage = Stage("explorer.batch_timeout=30", "explorer.max_timeout=10", runner=False)
    async with stage.up() as scheduler:
        one = RunnerWrapper("runner-7", None, [], scheduler.config, scheduler=scheduler)
        status, experiences, runner = await one.run_with_retry(TaskWrapper(tasks(1)[0], 1, repeat_times=2))
        assert (status.ok, status.total_runs, experiences, runner) == (False, 2, [], "runner-7")
        assert "30 s" in str(status.message)


@virtually
async def test_a_caller_who_goes_away_leaves_nothing_behind() -> None:
    async with Stage(runner=False).up() as scheduler:
        one = RunnerWrapper("runner-7", None, [], scheduler.config, scheduler=scheduler)
        waiting = asyncio.ensure_future(one.run_with_retry(TaskWrapper(tasks(1)[0], 1)))
        await asyncio.sleep(1.0)
        assert scheduler.has_step(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not scheduler.has_step(1)
        assert scheduler.dispatcher.open_tickets == []


@virtually
async def test_restart_runner_asks_that_runner() -> None:
    stage = Stage(runner=False)
    async with stage.up() as scheduler:
        ears = stage.topology.listener("runner-3", "x", "control", "*.runner-3")
        await stage.bus.declare(ears)
        feed = await stage.bus.consume(ears)
        one = RunnerWrapper(3, None, [], scheduler.config, scheduler=scheduler)
        one.restart_runner("it is slow")  # documented as a plain call
        event = decode((await anext(feed)).body, ControlEvent)
        assert (event.verb, event.target, event.reason) == ("restart", "runner-3", "it is slow")
        await one.close()
        await feed.close()
