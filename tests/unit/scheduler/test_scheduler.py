"""The documented Scheduler (deliver="caller") on MemoryBus in virtual time, with a runner of the test kit."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.waiting import until
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.bus.topology import batch_key
from trinity_mq.config import Config, load_config
from trinity_mq.dispatch.dispatcher import WINDOW
from trinity_mq.dispatch.timeouts import UsableClock
from trinity_mq.messages import (
    BatchClosed,
    ControlEvent,
    Deliver,
    Heartbeat,
    TaskResult,
    TaskResults,
    TaskSlice,
    decode,
    decode_any,
)
from trinity_mq.models.inference import EngineSnapshot
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.scheduler.scheduled_tickets import CompletedTask
from trinity_mq.scheduling import RunnerWrapper, Scheduler, Status, TaskWrapper
from trinity_mq.testing.fakes import FakeRunner
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually
from trinity_mq.transport.blobs import StoreUnavailable
from trinity_mq.workflows import Task

LOOP = VirtualTimeLoop


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


def by_number(seconds: dict[int, float]) -> Callable[[TaskSlice], float]:
    return lambda task_slice: seconds.get(task_slice.task.raw_task["n"], 0.1)


async def announce(stage: Stage, beat: Heartbeat) -> None:
    """Publish a heartbeat and return once the scheduler has received it."""
    await stage.runner.bus.publish(stage.topology.exchange("telemetry"), f"beat.{beat.role}.{beat.id}", envelope(beat))
    await until(lambda: bool(stage.scheduler.peers.alive(beat.role)))


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("wait_after_min", [500, 9])
async def test_the_wait_for_more_than_enough_never_exceeds_the_timeout(wait_after_min: int) -> None:
    overrides = ("explorer.over_rollout.ratio=0.5", f"explorer.over_rollout.wait_after_min={wait_after_min}")
    async with Stage(*overrides, seconds=by_number({0: 8.0, 1: 9.5, 2: 400.0})).up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        started = now()
        statuses, _ = await scheduler.get_results(1, min_num=1, timeout=10.0)
        assert 10.0 <= now() - started < 11.0
        assert len(statuses) == 2, "one more was done in time"
        assert not scheduler.has_step(1), "the rest was cut off"


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


async def test_results_of_tickets_of_another_scheduler_are_not_late() -> None:
    stage = Stage()
    async with stage.up() as scheduler:
        about: dict[str, Any] = {"batch": 1, "ticket": "another", "task_id": 0, "attempt": "a", "outcome": "failed"}
        result = TaskResult(**about)
        for message in (result, result.model_copy(update={"outcome": "late"}), TaskResults(results=[result])):
            await stage.runner.bus.publish(stage.topology.exchange("results"), batch_key(1), envelope(message))
        await scheduler.dispatcher.read_to_end()
        assert scheduler.dispatcher.late_results == 0


def slowly_published(stage: Stage) -> list[TaskSlice]:
    """Have each slice take a second to be published; return those whose publish has begun."""
    sent: list[TaskSlice] = []
    publish = stage.bus.publish

    async def slowly(exchange: str, key: str, mail: Any, **how: Any) -> bool:
        if mail.kind == "task_slice":
            sent.append(decode(mail.body, TaskSlice))
            await asyncio.sleep(1.0)
        return await publish(exchange, key, mail, **how)

    stage.bus.publish = slowly  # type: ignore[method-assign]
    return sent


async def test_slices_go_out_in_the_order_of_their_tickets_and_evaluations_do_not_wait() -> None:
    stage = Stage(runner=False)
    sent = slowly_published(stage)
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


async def test_what_is_aborted_while_it_is_published_goes_no_further() -> None:
    stage = Stage(runner=False)
    sent = slowly_published(stage)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(2000), 1)
        await asyncio.sleep(1.5)
        await scheduler.abort_batch(1)
        before = len(sent)
        await asyncio.sleep(20.0)
        assert 0 < len(sent) == before < 2000
        assert not stage.batch_queues()


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


async def test_who_waits_hears_of_a_stop() -> None:
    async with Stage(runner=False).up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        waiting = asyncio.ensure_future(scheduler.get_results(1))
        await asyncio.sleep(1.0)
        await scheduler.stop()
        with pytest.raises(RuntimeError, match="stopped while a caller waited"):
            await waiting


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


async def test_a_results_stream_shorter_than_the_saved_offset_is_an_error_and_no_hang() -> None:
    stage = Stage(runner=False)
    stage.scheduler.dispatcher.results_offset = 1000
    await stage.bus.connect()
    with pytest.raises(ExceptionGroup) as caught:
        await stage.scheduler.start()
    assert caught.value.subgroup(FatalError) is not None
    assert "results stream from offset 1000" in str(caught.value.exceptions[0])


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
async def test_run_with_retry_names_the_runner_in_the_form_of_the_handle(handle: Any, runner: str, said: Any) -> None:
    stage = Stage()
    stage.runner.name = runner
    async with stage.up() as scheduler:
        one = RunnerWrapper(handle, None, [], scheduler.config, scheduler=scheduler)
        with capture_logs() as logs:
            status, _, runner_id = await one.run_with_retry(TaskWrapper(tasks(1)[0], 1))
        assert (status.ok, runner_id) == (True, said)
        assert f"run by {runner} instead of runner-7: all runners share one queue" in str(status.message)
        assert [entry["runner"] for entry in logs if entry["event"] == "run_by_another_runner"] == ["runner-7"]


@pytest.mark.parametrize("error", [StoreUnavailable("the store is away"), TimeoutError()], ids=repr)
async def test_run_with_retry_leaves_no_ticket_after_an_error(error: Exception) -> None:
    stage = Stage()

    async def fails(*which: Any) -> None:
        raise error

    async with stage.up() as scheduler:
        scheduler._collector.ensure = fails  # type: ignore[method-assign]
        runner = RunnerWrapper(0, None, [], scheduler.config, scheduler=scheduler)
        with pytest.raises(type(error)):
            await runner.run_with_retry(TaskWrapper(tasks(1)[0], 1))
        assert not scheduler.has_step(1)
        await asyncio.sleep(3.0)
        assert stage.batch_queues() == []


async def test_run_with_retry_says_when_it_was_not_done() -> None:
    stage = Stage("explorer.batch_timeout=30", "explorer.max_timeout=10", runner=False)
    async with stage.up() as scheduler:
        one = RunnerWrapper("runner-7", None, [], scheduler.config, scheduler=scheduler)
        status, experiences, runner = await one.run_with_retry(TaskWrapper(tasks(1)[0], 1, repeat_times=2))
        assert (status.ok, status.total_runs, experiences, runner) == (False, 2, [], "runner-7")
        assert "30 s: no runner of the run 'sched' is alive" in str(status.message)


@pytest.mark.parametrize("clear", [True, False])
async def test_tasks_that_nobody_takes_are_returned_with_the_reason(clear: bool) -> None:
    async with Stage(runner=False).up() as scheduler:
        scheduler.schedule(tasks(2, repeat=3), 1)
        scheduler.schedule([Task(is_eval=True)], "1/gsm8k")
        reason = r"no runner of the run 'sched' is alive on this broker.*trinity-mq runner CONFIG"
        with capture_logs() as logs:
            statuses, experiences = await scheduler.get_results(1, timeout=20.0, clear_timeout_tasks=clear)
            assert experiences == []
            assert [(one.ok, one.completed_runs, one.total_runs) for one in statuses] == [(False, 0, 3)] * 2 * clear
            assert all(re.search("not done within 20 s: " + reason, str(one.message)) for one in statuses)
            assert scheduler.has_step(1) is not clear
        warnings = [(one["event"], one["tasks"]) for one in logs if re.search(reason, one.get("reason", ""))]
        assert warnings == [("tasks_wait", 3), ("tasks_not_done", 2)], "once while it waits, once at the end"
        with pytest.raises(TimeoutError, match=reason):
            await scheduler.wait_all(timeout=5.0)
        assert [one.ok for one in await scheduler.get_statuses("1/gsm8k")] == []
        assert (await scheduler.get_results(1)) == ([], [])


async def test_an_abort_while_the_broker_is_asked_for_waiting_slices_returns_nothing() -> None:
    stage = Stage(runner=False)
    depth = stage.bus.depth

    async def aborted_meanwhile(queue: str) -> int | None:
        await stage.scheduler.abort_batch(1)
        return await depth(queue)

    async with stage.up() as scheduler:
        scheduler.schedule(tasks(1), 1)
        await asyncio.sleep(1.0)
        stage.bus.depth = aborted_meanwhile  # type: ignore[method-assign]
        assert await scheduler.get_results(1, timeout=0.5) == ([], [])


async def test_an_abort_while_experiences_are_read_returns_nothing() -> None:
    stage = Stage()
    async with stage.up() as scheduler:
        ensure = scheduler._collector.ensure

        async def aborted_meanwhile(*which: Any) -> None:
            await ensure(*which)
            await scheduler.abort_batch(1)

        scheduler._collector.ensure = aborted_meanwhile  # type: ignore[method-assign]
        scheduler.schedule(tasks(2), 1)
        assert await scheduler.get_results(1) == ([], [])
        assert not scheduler.has_step(1)


async def test_slices_that_share_a_message_are_all_counted_as_pending() -> None:
    async with Stage(runner=False).up() as scheduler:
        scheduler.dispatcher._group_size = lambda ticket: 16  # type: ignore[method-assign]
        scheduler.schedule(tasks(32), 1)
        message = r"32 were left: 32 pending, 0 running; no runner .*, and 2 messages with slices wait"
        with pytest.raises(TimeoutError, match=message):
            await scheduler.wait_all(timeout=5.0)


async def test_tasks_whose_runners_have_no_engine_are_returned_with_the_reason() -> None:
    stage = Stage(seconds=lambda task_slice: 1e4)
    async with stage.up() as scheduler:
        await announce(
            stage, Heartbeat(role="runner", id="runner-0", seq=1, incarnation="r", lease=1e6, state="working")
        )
        scheduler.schedule(tasks(1), 1)
        statuses, _ = await scheduler.get_results(1, timeout=30.0)
        assert [one.ok for one in statuses] == [False]
        assert "no rollout engine of the run 'sched' is alive" in str(statuses[0].message)

        engine = EngineSnapshot("engine", alive=True, state="current", url="http://127.0.0.1:9", name="n").detail()
        beat = Heartbeat(role="engine", id="engine", seq=1, incarnation="e", lease=1e6, state="working", detail=engine)
        await announce(stage, beat)
        scheduler.schedule(tasks(1), 2)
        assert await scheduler.get_results(2, timeout=30.0) == ([], []), "it is only slow"


@pytest.mark.parametrize("batch", ["x", True, "3.5/x", "", "/3", "3abc", 1.0, None])
async def test_a_batch_id_without_an_integer_is_refused(batch: Any) -> None:
    async with Stage().up() as scheduler:
        with pytest.raises(ValueError, match=r"batch_id is .*wanted an integer or a string that starts with one"):
            scheduler.schedule(tasks(1), batch)
        runner = RunnerWrapper(0, None, [], scheduler.config, scheduler=scheduler)
        with pytest.raises(ValueError, match="batch_id"):
            await runner.run_with_retry(TaskWrapper(tasks(1)[0], batch))
        for good in (0, 123, "123", "123/my_task", "4/a.b/c", "5 spaced"):
            scheduler.schedule(tasks(1), good)
            assert len((await scheduler.get_results(good))[0]) == 1


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


async def test_a_scheduler_without_an_agent_beats_and_lists_what_is_open() -> None:
    stage = Stage(runner=False)
    beats: list[tuple[float, Heartbeat]] = []
    loop = asyncio.get_running_loop()
    other = stage.another()
    for bus in (stage.bus, other):
        await bus.connect()
    ears = stage.topology.listener("ears", "x", "telemetry", "beat.scheduler.#")
    await other.declare(ears)
    scheduler = stage.scheduler

    async def hears() -> None:
        async with await other.consume(ears) as feed:
            async for delivery in feed:
                beat = decode_any(delivery.body)
                assert isinstance(beat, Heartbeat)
                beats.append((loop.time(), beat))

    hearing = asyncio.ensure_future(hears())
    await scheduler.start()
    ticket = scheduler.schedule([Task(), Task()], 1)
    await asyncio.sleep(5.0)
    aborted = loop.time()
    await scheduler.abort_batch(1)
    await asyncio.sleep(0.5)
    async with await other.consume(stage.topology.tasks_train) as feed:
        task_slice = decode((await anext(feed)).body, TaskSlice)
    listing = [
        (when, beat) for when, beat in beats if beat.id == task_slice.explorer and beat.seq >= task_slice.opened_beat
    ]
    before = [beat.detail.open for when, beat in listing if when < aborted]
    assert len(before) >= 2, "every two seconds"
    assert all(listed == [ticket] for listed in before)
    when, beat = next(one for one in listing if one[0] >= aborted)
    assert when - aborted < 0.2
    assert (beat.role, beat.detail.open) == ("scheduler", [])
    assert task_slice.explorer.startswith("scheduler-")
    assert task_slice.keep_partial
    await scheduler.stop()
    hearing.cancel()


async def test_deadlines_stand_still_while_the_broker_is_away() -> None:
    stage = Stage(runner=False)
    loop = asyncio.get_running_loop()
    await stage.bus.connect()
    clock = UsableClock(stage.bus)
    started = loop.time()
    loop.call_later(1.0, lambda: stage.broker.drop(stage.bus, delay=20.0))
    with pytest.raises(TimeoutError):
        async with clock.timeout(5.0):
            await asyncio.sleep(1000)
    assert 25.0 <= loop.time() - started < 25.5
    stage.broker.drop(stage.bus, delay=7.0)
    started = loop.time()
    with pytest.raises(TimeoutError):
        async with clock.timeout(1.0):
            await asyncio.sleep(1000)
    assert 8.0 <= loop.time() - started < 8.5, "also one that begins meanwhile"
    async with clock.timeout(1.0):
        await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)


# -- the documented done callback: once for each scheduled task, whatever becomes of it


def told(stage: Stage) -> list[CompletedTask]:
    """What the callback of the stage's scheduler is told."""
    heard: list[CompletedTask] = []

    class Watched(Scheduler):
        def task_done_callback(self, async_task: CompletedTask) -> None:
            heard.append(async_task)

    stage.scheduler = Watched(stage.config, bus=stage.bus)
    return heard


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


async def test_tasks_cut_off_or_aborted_are_told_once_as_cancelled() -> None:
    stage = Stage(seconds=by_number({1: 500.0, 2: 500.0}))
    heard = told(stage)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(3), 1)
        await scheduler.get_results(1, timeout=5)
        scheduler.schedule(tasks(2), 2)
        await asyncio.sleep(1)
        await scheduler.abort_batch(2)
        await scheduler.abort_batch(2)
    ends = {(done.batch_id, done.task_id): done for done in heard}
    assert len(ends) == len(heard) == 5
    assert {key for key, done in ends.items() if done.cancelled()} == {(1, 1), (1, 2), (2, 1)}
    assert ends[1, 0].result().ok
    with pytest.raises(asyncio.CancelledError, match="task 2 of batch 1 was cut off"):
        ends[1, 2].result()


async def test_a_task_cut_off_whose_finished_runs_are_kept_has_a_status() -> None:
    stage = Stage(
        "explorer.over_rollout.return_partial_tasks=true",
        "explorer.max_repeat_times_per_runner=1",
        seconds=lambda task_slice: 500.0 if task_slice.run_base else 0.1,
    )
    heard = told(stage)
    async with stage.up() as scheduler:
        scheduler.schedule(tasks(1, repeat=2), 1)
        statuses, _ = await scheduler.get_results(1, timeout=5)
    assert [(done.cancelled(), done.result()) for done in heard] == [(False, statuses[0])]
    assert (statuses[0].completed_runs, statuses[0].total_runs) == (1, 2)


async def test_a_callback_that_fails_is_logged_and_stops_nothing() -> None:
    class Failing(Scheduler):
        def task_done_callback(self, async_task: CompletedTask) -> None:
            raise ArithmeticError("mine")

    stage = Stage()
    stage.scheduler = Failing(stage.config, bus=stage.bus)
    with capture_logs() as logs:
        async with stage.up() as scheduler:
            scheduler.schedule(tasks(3), 1)
            assert len((await scheduler.get_results(1))[0]) == 3
    failures = [line for line in logs if line["event"] == "task_done_callback_failed"]
    assert sorted((line["batch"], line["task"]) for line in failures) == [(1, 0), (1, 1), (1, 2)]


class Bulk(Stage):
    """A scheduler, and a runner that answers with outcomes alone, one after the other."""

    def __init__(self) -> None:
        super().__init__(runner=False)
        self.other = self.another()
        self.most_tasks = 0
        """Most asyncio tasks that lived at once."""
        self.queues: set[str] = set()
        self.declared = 0

    def play(self, count: int, deliver: Deliver = "caller") -> tuple[int, float]:
        """Have ``count`` tasks done; return how many statuses came and how long it took."""

        async def main() -> tuple[int, float]:
            await self.bus.connect()
            await self.other.connect()
            await self.scheduler.start()
            declare = self.bus.declare

            async def counts(*queues: Any) -> None:
                self.declared += len(queues)
                await declare(*queues)

            self.bus.declare = counts  # type: ignore[method-assign]
            started = asyncio.get_running_loop().time()
            self.scheduler.schedule([Task(raw_task={"n": n}) for n in range(count)], 1, deliver=deliver)
            answering = asyncio.ensure_future(self.answer(count))
            statuses, _ = await self.scheduler.get_results(1)
            await answering
            seconds = asyncio.get_running_loop().time() - started
            assert not self.scheduler.has_step(1)
            await self.scheduler.stop()
            return len(statuses), seconds

        return run_virtually(main(), limit=1e5)

    async def answer(self, count: int) -> None:
        async with await self.other.consume(self.topology.tasks_train, prefetch=64) as feed:
            for _ in range(count):
                delivery = await anext(feed)
                task_slice = decode(delivery.body, TaskSlice)
                result = TaskResult(
                    batch=1, ticket=task_slice.ticket, task_id=task_slice.task_id, attempt=f"a{task_slice.task_id}",
                    outcome="finished", runs=[0], metrics=[{"reward": 1.0}],
                )  # fmt: skip
                await self.other.publish(self.topology.exchange("results"), batch_key(1), envelope(result))
                await delivery.ack()
                self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
                self.queues |= self.broker.queues.keys()


def lines_executed(work: Callable[[], object]) -> Counter[str]:
    """Return how many lines of the packages dispatch and scheduler ``work`` executed, by module."""
    found: Counter[str] = Counter()

    def line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            found[frame.f_code.co_filename.rsplit("/", 1)[1]] += 1
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if re.search("/trinity_mq/(dispatch|scheduler)/", frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def test_ten_thousand_tasks_make_no_queue_and_no_asyncio_task_each() -> None:
    bulk = Bulk()
    statuses, _ = bulk.play(10_000)
    assert statuses == 10_000
    assert sum(".batch." in name for name in bulk.queues) == 2, "its own, and a spare one for the next ticket"
    assert bulk.declared == 2
    assert not any(".batch." in name for name in bulk.broker.queues), "both are deleted at the stop"
    assert bulk.most_tasks < WINDOW + 30


@pytest.mark.parametrize("deliver", ["caller", "none"])
def test_ten_times_the_tasks_are_ten_times_the_work(deliver: Deliver) -> None:
    few = lines_executed(lambda: Bulk().play(200, deliver))
    many = lines_executed(lambda: Bulk().play(2000, deliver))
    assert sum(few.values()) > 200 * 20, "it looks at the right files"
    for module, lines in many.items():
        assert lines < 13 * max(few[module], 200), f"{module}: {few[module]} lines for 200 tasks, {lines} for 2000"
