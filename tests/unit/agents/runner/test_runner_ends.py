"""How a slice is ended that nobody waits for, whose runner has to end, or that does not end; on MemoryBus, in virtual
time."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.runner.harness import Models, lived, parts, results, unanswered
from tests.unit.agents.world import World, a_slice, an_outcome, experience, kill, send_slice
from trinity_agents.runner.agent import MAX_STUCK, STUCK_AFTER, Runner
from trinity_agents.runner.agent import main as runner_main
from trinity_agents.runner.slice_executor import STOP_PATIENCE
from trinity_mq.experience import Experience
from trinity_mq.messages import ControlEvent, TaskSlice
from trinity_mq.rollout.run_results import RunResults
from trinity_mq.rollout.status import SliceOutcome
from trinity_mq.runtime.deliveries import CrashLog, envelope
from trinity_mq.runtime.errors import RecycleRequested, RestartRequested, first_leaf
from trinity_mq.testing.virtual_time import VirtualTimeLoop

LOOP = VirtualTimeLoop


class Stepwise:
    """In place of WorkflowRunner and ProcessPool: finishes ``done`` runs at once and hangs in the next.

    ``deaf``: not even cancelling ends it, for so many seconds.
    """

    def __init__(self, done: int = 1, deaf: float = 0.0) -> None:
        self.done, self.deaf, self.began, self.cancelled = done, deaf, 0, 0

    async def run_slice(self, task_slice: TaskSlice, models: Models, results: RunResults) -> SliceOutcome:
        self.began += 1
        for run in range(self.done):
            results.keep(run, [experience(task_slice.task_id, run)], {"reward": 1.0})
        until = asyncio.get_running_loop().time() + self.deaf
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            while (left := until - asyncio.get_running_loop().time()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    continue
            raise
        raise AssertionError

    async def run(self, task_slice: TaskSlice, config: object, models: Models, results: RunResults) -> SliceOutcome:
        return await self.run_slice(task_slice, models, results)

    async def close(self) -> None:
        """Nothing to close."""

    @staticmethod
    def blocks(task_slice: TaskSlice) -> bool:
        return True


def make(world: World, does: Any, name: str = "runner-0", **how: Any) -> Runner:
    roles = {"workflows": does, "isolated": does, **how}
    return Runner(world.config, bus=world.bus(), topology=world.topology, agent_id=name, **roles)


def cause(task: asyncio.Task[None]) -> BaseException:
    error = task.exception()
    assert error is not None
    return first_leaf(error)


# -- nobody waits any more


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("keep", "done", "outcome"), [(False, 1, None), (True, 1, "partial"), (True, 0, "cancelled")], ids=str
)
async def test_a_running_slice_whose_ticket_is_no_longer_listed_is_cancelled_within_a_second(
    keep: bool, done: int, outcome: str | None, isolated: bool
) -> None:
    world = World()
    does = Stepwise(done)
    runner = make(world, does)
    await send_slice(world, a_slice(opened_beat=10, keep_partial=keep))
    if isolated:
        world.held_back("tasks.train", 1)
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 11, open=["t1", "t2"])
        await asyncio.sleep(5)
        assert (does.began, does.cancelled) == (1, 0)
        await world.beat("explorer", "explorer-0", 12, open=["t2"])
        await asyncio.sleep(0.5)
        assert does.cancelled == 1
        assert world.wire[-1] == "acked tasks.train"
        assert runner.detail().cancelled == 1
        assert runner.detail().running == 0
    assert [(result.outcome, result.runs, result.parts) for result in results(world)] == (
        [] if outcome is None else [(outcome, [0][:done], done)]
    )
    assert [each.eid.run for mail in parts(world) for each in Experience.deserialize_many(mail.body)] == (
        [0] if keep and done else []
    )
    assert unanswered(world) == 0


@pytest.mark.parametrize("is_closed", [False, True])
async def test_what_was_cut_off_is_published_until_its_ticket_is_closed(is_closed: bool) -> None:
    """The ticket is not listed any more, and still waited for: a returned part is no reason to drop it."""
    world = World()
    runner, queue = make(world, Stepwise()), world.topology.batch_queue(1, "t1")
    await send_slice(world, a_slice(opened_beat=10, keep_partial=True))
    async with world.living(runner):
        await (world.outside.delete(queue.name) if is_closed else world.outside.unbind(queue))
        await world.beat("explorer", "explorer-0", 12, open=[])
        await asyncio.sleep(1)
        assert (len(results(world)), runner.detail().late) == (is_closed, is_closed)
        if not is_closed:
            await world.outside.declare(queue)
        await asyncio.sleep(1)
    assert [result.outcome for result in results(world)] == ["late" if is_closed else "partial"]


# -- what does not end


@pytest.mark.parametrize("keep", [False, True])
async def test_a_workflow_that_ignores_its_cancellation_is_left_behind(keep: bool) -> None:
    world = World("runner.concurrency=1")
    does = Stepwise(deaf=30)
    runner = make(world, does)
    await send_slice(world, a_slice(opened_beat=10, keep_partial=keep))
    async with world.living(runner):
        await world.beat("explorer", "explorer-0", 12, open=["t2"])
        await asyncio.sleep(STOP_PATIENCE + 0.2)
        assert len(results(world)) == int(keep)
        assert world.wire[-1] == "acked tasks.train"
        await send_slice(world, a_slice("t2", opened_beat=10))
        await asyncio.sleep(1)
        assert does.began == 2  # its slot is free
        await world.beat("explorer", "explorer-0", 13, open=["t2"])
        assert runner.detail().stuck == 1
        await asyncio.sleep(30)
        await world.beat("explorer", "explorer-0", 14, open=[])
        assert runner.detail().stuck == 0
        await asyncio.sleep(1)
    assert len(results(world)) == int(keep)


async def test_a_slice_that_goes_on_after_its_time_is_ended_with_what_it_has() -> None:
    world = World()
    await send_slice(world, a_slice(slice_timeout=20.0))
    async with world.living(make(world, Stepwise(deaf=40))):
        await asyncio.sleep(20 + 3 * STOP_PATIENCE)
        (result,) = results(world)
        assert (result.outcome, result.runs, result.parts) == ("partial", [0], 1)
        assert "exceeded its time limit" in str(result.message)
        await asyncio.sleep(50)
    assert len(results(world)) == 1


async def test_too_many_stuck_workflows_end_the_runner_which_gives_back_what_it_holds() -> None:
    stuck = MAX_STUCK + 1
    world = World("runner.drain_timeout=5", f"runner.concurrency={stuck + 1}")
    ended: list[int] = []
    runner = make(world, Stepwise(done=0, deaf=60), end_process=ended.append)
    for task in range(stuck):
        await send_slice(world, a_slice(task=task, slice_timeout=20.0))
    await send_slice(world, a_slice(task=stuck))
    task = asyncio.create_task(runner.run())
    await asyncio.wait([task], timeout=20 + 4 * STOP_PATIENCE + STUCK_AFTER + 10)
    error = cause(task)
    assert type(error) is RestartRequested
    assert f"{stuck} abandoned workflows are still running (at most {MAX_STUCK} may)" in str(error)
    assert ended == [75]
    assert unanswered(world) == 1
    await kill(*(other for other in asyncio.all_tasks() if other is not asyncio.current_task()))
    assert [result.outcome for result in results(world)] == ["failed"] * stuck


# -- the runner ends


@pytest.mark.parametrize("keep", [False, True])
async def test_a_preempted_runner_leaves_the_runs_it_has_where_they_are_wanted(keep: bool) -> None:
    world = World("runner.drain_timeout=5")
    runner = make(world, Stepwise())
    await lived(world, runner, a_slice(keep_partial=keep))
    assert 5 < asyncio.get_running_loop().time() < 8
    assert [(result.outcome, result.runs) for result in results(world)] == ([("partial", [0])] if keep else [])
    assert unanswered(world) == int(not keep)


async def test_after_so_many_slices_it_is_started_again() -> None:
    world = World("runner.recycle_after=3", "runner.concurrency=1", "runner.drain_timeout=5")

    class AtOnce(Stepwise):
        async def run_slice(self, task_slice: TaskSlice, models: Models, results: RunResults) -> SliceOutcome:
            await asyncio.sleep(1)
            return SliceOutcome(runs=[0, 1], metrics=[{}, {}])

    runner = make(world, AtOnce())
    for task in range(5):
        await send_slice(world, a_slice(task=task, deliver="none"))
    task = asyncio.create_task(runner.run())
    await asyncio.wait([task], timeout=60)
    assert isinstance(cause(task), RecycleRequested)
    assert "runner.recycle_after" in str(cause(task))
    # what had been delivered by then was finished
    assert [result.outcome for result in results(world)] == ["finished"] * len(results(world))
    assert 3 <= len(results(world)) <= 4
    assert len(results(world)) + unanswered(world) == 5


# -- what is given back in good order says nothing about the slice


class Finishes(Stepwise):
    """Finishes at once."""

    async def run_slice(self, task_slice: TaskSlice, models: Models, results: RunResults) -> SliceOutcome:
        self.began += 1
        return an_outcome(task_slice)


@pytest.mark.parametrize("ends", ["drained", "restarted"])
async def test_a_slice_given_back_in_good_order_more_often_than_the_limit_is_not_poisoned(ends: str) -> None:
    world = World("runner.drain_timeout=1", "broker.delivery_limit=2")
    last = Finishes()
    await send_slice(world, a_slice())
    for number in range(5):
        runner = make(world, Stepwise(0), f"runner-{number}")
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(0.2)
        assert runner.detail().running == 1
        if ends == "drained":
            runner.drain()
            await task
        else:
            event = ControlEvent(verb="restart", target=runner.id)
            await world.outside.publish(world.topology.exchange("control"), f"restart.{runner.id}", envelope(event))
            await asyncio.wait([task], timeout=10)
            assert isinstance(cause(task), RestartRequested)
        (waiting,) = world.stored("tasks.train")
        assert (waiting.message_id, waiting.deliveries_before) == ("t1-0-0", 0)
        assert waiting.headers["given-back"] == number + 1
    isolated = Stepwise()
    await lived(world, make(world, last, "runner-9", isolated=isolated))
    assert [(result.outcome, result.returned) for result in results(world)] == [("finished", 5)]
    assert isolated.began == 0, "what was given back in good order is no suspect"
    assert (last.began, unanswered(world), world.stored("dead")) == (1, 0, [])


async def test_a_runner_that_dies_between_giving_back_and_acknowledging_costs_a_second_run_at_most() -> None:
    """Both copies come, under the same message id: a runner that has reported one recognises the other, and of results
    by two runners the explorer takes the first.
    """
    world = World("runner.drain_timeout=1")
    first, second = make(world, Stepwise(0)), make(world, Finishes(), "runner-1")
    await send_slice(world, a_slice())
    publish = first.bus.publish

    async def publish_and_die(exchange: str, key: str, envelope: Any, **how: Any) -> bool:
        stored = await publish(exchange, key, envelope, **how)
        if envelope.kind == "task_slice":
            first.bus.disconnect("killed")
        return stored

    first.bus.publish = publish_and_die  # type: ignore[method-assign]
    task = asyncio.create_task(first.run())
    await asyncio.sleep(0.2)
    first.drain()
    await asyncio.sleep(2)
    waiting = world.stored("tasks.train")
    assert [each.message_id for each in waiting] == ["t1-0-0"] * 2
    assert sorted(each.deliveries_before for each in waiting) == [0, 1]
    await lived(world, second)
    await kill(task)
    assert [(result.outcome, result.runner) for result in results(world)] == [("finished", "runner-1")]
    assert (second.detail().duplicates, unanswered(world)) == (1, 0)


async def test_a_runner_without_the_broker_leaves_giving_back_to_it() -> None:
    world = World("runner.drain_timeout=1")
    runner = make(world, Stepwise(0))
    await send_slice(world, a_slice())
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(0.2)
    world.broker.drop(runner.bus, delay=None)
    runner.drain()
    await asyncio.wait([task], timeout=60)
    await kill(task)
    (waiting,) = world.stored("tasks.train")
    assert (waiting.deliveries_before, waiting.headers.get("given-back")) == (1, None)


async def test_a_slice_that_killed_the_runners_of_an_agent_is_known_to_its_next_process(tmp_path: Path) -> None:
    """Where the process of its own does not contain a crash, the broker's count is no evidence of one: the note is."""
    world = World("broker.delivery_limit=3")
    notes = tmp_path / "runner-0.at-work.json"
    await send_slice(world, a_slice())
    world.held_back("tasks.train", 1)
    for _ in range(2):
        runner = make(world, Stepwise(0), crash_notes=CrashLog(notes))
        task = asyncio.create_task(runner.run())
        await asyncio.sleep(1)
        left = notes.read_bytes()
        await kill(task)
        notes.write_bytes(left)  # a process that dies leaves it as it is
    async with world.living(make(world, Stepwise(0), crash_notes=CrashLog(notes))):
        await asyncio.sleep(1)
    assert [result.outcome for result in results(world)] == ["poisoned"]
    assert not notes.exists()


# -- lanes


async def test_evaluation_has_slots_of_its_own() -> None:
    world = World("runner.concurrency=2")
    does = Stepwise()
    for task in range(6):
        await send_slice(world, a_slice(task=task))
    task = asyncio.create_task(make(world, does).run())
    await asyncio.sleep(1)
    assert does.began == 2
    for number in range(6):
        await send_slice(world, a_slice("t2", task=number, lane="eval", deliver="none"))
    await asyncio.sleep(1)
    assert does.began == 4
    await kill(task)


def test_environment_variables_are_set_before_anything_of_a_workflow_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World('runner.env={"TMQ_TEST_VARIABLE": "set"}')
    seen: list[str | None] = []
    monkeypatch.setenv("TMQ_TEST_VARIABLE", "not yet")

    def daemon(*arguments: object) -> int:
        seen.append(os.environ.get("TMQ_TEST_VARIABLE"))
        return 0

    monkeypatch.setattr("trinity_agents.runner.agent.run_daemon", daemon)
    try:
        assert runner_main(world.config) == 0
    finally:
        gc.unfreeze()
    assert seen == ["set"]
