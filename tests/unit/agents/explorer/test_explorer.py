"""The explorer's promises (docs/protocol.md, docs/learning.md): whole runs on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.watched import WatchedSimulation, late_operators
from tests.unit.agents.world import Over, RunOn, beside, failure, killed_when
from trinity_agents.explorer import loop as exploration
from trinity_agents.explorer.agent import Explorer
from trinity_agents.explorer.training_batches import MANIFEST_TRIES
from trinity_agents.operator.agent import Operator
from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.bus import Binding, Queue
from trinity_mq.bus.base import Envelope
from trinity_mq.bus.memory.bus import MemoryBus
from trinity_mq.bus.topology import DROPPED
from trinity_mq.messages import BatchClosed, BatchReady, Progress, RunEnd, SubmissionOutcome, TaskBody, TaskSlice
from trinity_mq.observability.report.text import make_report
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import FatalError, RestartRequested
from trinity_mq.telemetry import MetricsWriter
from trinity_mq.testing.fakes import FakeEngine
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop

REPLIES = Queue(name="tmq.sim.replies.submit.test")
SHORT = ("explorer.stall_timeout=60", "explorer.batch_timeout=60", "explorer.max_timeout=10")


def check_history(sim: Simulation, batches: int) -> None:
    """Every batch decided once, in order, no experience twice, no manifest ever changed."""
    trainer = sim.trainer.loop
    assert trainer.progress == batches
    history = lineage(sim.folder / "history", trainer.generation, batches)
    assert [entry["batch"] for entry in history] == list(range(1, batches + 1))
    assert len({entry["ticket"] for entry in history}) == batches
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(set(uids)) == len(uids)
    manifests: dict[str, set[str]] = collections.defaultdict(set)
    for manifest in sim.published(BatchClosed):
        manifests[manifest.ticket].add(manifest.model_dump_json())
    assert all(len(versions) == 1 for versions in manifests.values())
    assert len(manifests) == batches


def has_slices(sim: Simulation, batch: int | str) -> Callable[[], bool]:
    return lambda: any(task_slice.batch == batch for task_slice in sim.published(TaskSlice))


def restarted(
    sim: Simulation, when: Callable[[], Any], *, then: float = 0.0, pause: float = 1.0, step: float = 0.01
) -> Callable[[], Any]:
    """An explorer that is killed when a condition holds or a coroutine ends, or some seconds then, and started again
    after a pause.
    """

    return lambda: killed_when(when, sim.make_explorer, then=then, pause=pause, step=step)


@pytest.mark.parametrize("after", [round(0.23 * n, 2) for n in range(1, 20)])
def test_killed_at_any_moment_and_started_again(tmp_path: Path, after: float) -> None:
    sim = Simulation(tmp_path, batches=4, step_seconds=0.3)
    run_virtually(sim.run(explorer=restarted(sim, lambda: True, then=after)), limit=3000)
    check_history(sim, 4)
    assert sim.evaluated_steps().count(4) == 1
    assert sorted(set(sim.evaluated_steps())) == [0, 2, 4]
    assert sim.state().finished
    given = [each.task.raw_task["n"] for each in sim.published(TaskSlice) if each.lane == "train"]
    assert sorted(set(given)) == list(range(8)), "the taskset goes on where it was"


def test_killed_between_manifest_and_answers_it_follows_what_was_consumed_meanwhile(tmp_path: Path) -> None:
    """Its Progress comes while nobody lives to hear it; a batch that is followed for ever would end no run."""
    sim = Simulation(tmp_path, ("explorer.operator_deadline=5",), batches=2, step_seconds=0.01)
    run_virtually(sim.run(explorer=restarted(sim, lambda: bool(sim.published(BatchClosed)), pause=30.0)), limit=200)
    check_history(sim, 2)


async def test_a_progress_that_comes_while_submitters_are_answered_counts(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("explorer.operator_deadline=5",), batches=1, taskset=None)
    sim.holds = lambda who, mail: 60.0 if mail.kind == "submission_outcome" else 0.0
    async with beside(sim.run()):
        client = await sim.client()
        await client.declare(REPLIES)
        await sim.submit(1, reply_to=REPLIES.name)
    assert len(sim.published(BatchClosed)) == 1


def test_a_slice_of_a_ticket_saved_but_not_published_is_published_after_the_restart(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=1)
    sim.holds = lambda who, mail: 1e5 if mail.kind == "task_slice" and who == "explorer-0" else 0.0
    run_virtually(sim.run(explorer=restarted(sim, lambda: bool(sim.where("publish", "task_slice")))), limit=1000)
    check_history(sim, 1)


@pytest.mark.parametrize("moment", ["declared ahead", "being declared ahead", "saved", "bound"])
def test_killed_around_the_queue_that_is_declared_ahead(tmp_path: Path, moment: str) -> None:
    """Batch 2 has the queue that was declared ahead of it: whatever of it is there, or of its ticket, is enough."""
    stuck, ahead, killed_buses = asyncio.Event(), list[str](), list[Any]()

    async def stops(reached: bool) -> None:
        if reached and not stuck.is_set():
            stuck.set()
            await asyncio.sleep(1e5)

    class Stopping(MemoryBus):
        async def declare(self, *queues: Queue) -> None:
            name = queues[0].name
            if ".batch." in name and not queues[0].bindings:
                await super().declare(*queues)
                ahead.append(name)
                await stops(moment == "being declared ahead")
                return
            if name in ahead:
                await stops(moment == "saved")
            await super().declare(*queues)

        async def publish(self, exchange: str, key: str, mail: Any, **how: Any) -> bool:
            if key == "train.2":
                await stops(moment == "bound")
            return await super().publish(exchange, key, mail, **how)

        async def delete(self, name: str) -> None:
            if self not in killed_buses:  # a process that is killed deletes nothing
                await super().delete(name)

    sim = RunOn(tmp_path, batches=3, connection=Stopping)

    async def when() -> None:
        if moment == "declared ahead":
            await until(lambda: bool(ahead), 0.01)
        else:
            await stuck.wait()
        killed_buses.append(sim.explorer.bus)

    run_virtually(sim.run(explorer=restarted(sim, when)), limit=1000)
    check_history(sim, 3)
    tickets = {manifest.ticket for manifest in sim.published(BatchClosed)}
    taken = {name.rsplit(".", 1)[1] for name in ahead} & tickets
    assert (ahead[0].rsplit(".", 1)[1] in tickets) == (moment in {"saved", "bound"}), "a saved ticket keeps its queue"
    assert len(taken) >= 1, "the next life has spare ones too"


def test_an_interrupted_evaluation_is_resumed_and_not_begun_anew(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 5.0 if task_slice.lane == "eval" else 0.1)
    tasks = [TaskBody(workflow="none", is_eval=True, raw_task={"n": n}) for n in range(3)]
    sim.eval_sets = {"held": tasks[:2], "other": tasks[2:]}
    run_virtually(sim.run(explorer=restarted(sim, has_slices(sim, "2/held"), then=2.0, step=0.5)), limit=1000)
    batches = collections.Counter(
        task_slice.batch for task_slice in sim.published(TaskSlice) if task_slice.lane == "eval"
    )
    assert batches == {"0/held": 2, "0/other": 1, "2/held": 2, "2/other": 1}
    assert sim.evaluated_steps() == [0, 2]
    assert sim.values("eval/held/version/min") == [(0, 0.0), (2, 2.0)]


def test_a_restart_keeps_the_version_of_an_evaluation_that_is_due(tmp_path: Path) -> None:
    """Due is what belongs to the version of then: the gate is held from the first moment of the new life."""
    sim = Simulation(tmp_path, batches=4, runner_seconds=lambda task_slice: 20.0 if task_slice.lane == "eval" else 0.1)
    run_virtually(sim.run(explorer=restarted(sim, has_slices(sim, "2/held"), pause=0.1)), limit=1000)
    assert dict(sim.values("eval/held/version/min"))[2] == 1.0
    assert sim.evaluated_steps() == [0, 2, 4]


ACTING = {"task_slice", "batch_closed", "submission_outcome", "run_end", "batch_ready"}
"""Kinds that only the acting explorer sends; operators send the last one too."""


def sent_by(sim: WatchedSimulation, name: str) -> list[str]:
    return [act.subject for act in sim.acts if (act.who, act.what) == (name, "publish") and act.subject in ACTING]


@pytest.mark.parametrize("ids", [("explorer-0", "explorer-1"), ("explorer-1", "explorer-0")])
def test_two_explorers_exclude_each_other_and_the_second_takes_over(tmp_path: Path, ids: tuple[str, str]) -> None:
    sim = WatchedSimulation(tmp_path, batches=5)

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(sim.make_explorer(ids[0]).run())
            await asyncio.sleep(1.0)
            group.create_task(sim.make_explorer(ids[1]).run())
            await asyncio.sleep(4.0)
            waiting = sim.explorers[1]
            assert waiting.exploration is None
            assert waiting.state == "idle"
            assert sent_by(sim, ids[0])
            assert sent_by(sim, ids[1]) == [], "one without the lock opens nothing"
            assert await killed(first)

    run_virtually(sim.run(explorer=both), limit=1000)
    check_history(sim, 5)
    tasks = [each.task.raw_task["n"] for each in sim.published(TaskSlice) if each.lane == "train"]
    assert sorted(tasks) == list(range(10)), "it goes on in the taskset where the first one was, not where it began"


@pytest.mark.parametrize("ids", [("explorer-0", "explorer-1"), ("explorer-1", "explorer-0")])
@pytest.mark.parametrize("trainers", [("trainer-0", "trainer-1"), ("trainer-1", "trainer-0")])
def test_a_run_ends_with_others_standing_by(tmp_path: Path, ids: tuple[str, str], trainers: tuple[str, str]) -> None:
    """What a waiting agent says of itself must not hide what the acting one says."""
    sim = Simulation(tmp_path, batches=2)

    async def two(make: Callable[[str], Any], names: tuple[str, str]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(make(names[0]).run())
            await asyncio.sleep(0.5)
            group.create_task(make(names[1]).run())

    run_virtually(
        sim.run(explorer=lambda: two(sim.make_explorer, ids), trainer=lambda: two(sim.make_trainer, trainers)),
        limit=300,
    )
    assert sim.evaluated_steps() == [0, 2]
    assert sim.trainers[0].loop.progress == 2
    assert sim.trainers[1].loop.generation == 0


async def test_it_tells_the_end_to_an_agent_that_is_cut_off_and_does_not_see_the_folder(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2)
    was_away: list[bool] = []

    async def far_away() -> None:
        runner = sim.make_runner()
        task = asyncio.create_task(runner.run())
        await until(lambda: sim.trainer.loop.progress == 2)
        sim.broker.drop(runner.bus, delay=7.0)  # type: ignore[arg-type]
        await until(lambda: sim.state().finished)
        was_away.append(not runner.bus.usable)
        await task

    async with beside(sim.run(runners=far_away)):
        await sim.make_runner("runner-1").run()
    assert was_away == [True]


@pytest.mark.parametrize("at", [0.5, 2.0, 3.1, 5.0])
@pytest.mark.parametrize("trouble", ["explorer", "trainer", "everybody", "alarm"])
def test_a_connection_lost_or_an_alarm_costs_time_only(tmp_path: Path, at: float, trouble: str) -> None:
    sim = Simulation(
        tmp_path,
        ("explorer.batch_timeout=10", "explorer.eval_timeout=10", "explorer.max_timeout=3"),
        batches=3,
        runner_seconds=lambda task_slice: 1.0,
    )

    async def cut() -> None:
        await asyncio.sleep(at)
        if trouble == "alarm":
            sim.broker.block()
            times = [ticket.time_left for ticket in _tickets(sim.explorer)]
            await asyncio.sleep(60.0)
            assert [ticket.time_left for ticket in _tickets(sim.explorer)] == times, "the clocks stand still"
            sim.broker.unblock()
            return
        clients = {"explorer": [sim.explorer.bus], "trainer": [sim.trainer.bus], "everybody": sim.broker.clients}
        for bus in clients[trouble]:
            sim.broker.drop(bus, delay=30.0)  # type: ignore[arg-type]

    run_virtually(sim.run(beside=cut), limit=1000)
    check_history(sim, 3)
    assert not any(values.get("rollout/slices/cancelled") for _, values in sim.reports)
    assert sorted(sim.evaluated_steps()) == [0, 2, 3]


class IdleOperator(Agent):
    """Lives, and takes no manifest."""

    role = "operator"

    async def serve(self) -> None:
        self.set_state("idle", "a closed batch")
        await self.woken.until(lambda: self.peers.explorer.finished)


def test_a_closed_batch_that_an_idle_operator_does_not_take_is_published_again_then_failed(tmp_path: Path) -> None:
    sim = Simulation(
        tmp_path, ("explorer.operator_deadline=10", "explorer.max_consecutive_empty=100"), batches=3, operators=0
    )
    idle = IdleOperator(sim.config, bus=sim.bus(), topology=sim.topology, agent_id="operator-0")
    run_virtually(sim.run(beside=idle.run), limit=1000)
    assert (sim.trainer.loop.progress, sim.trainer.loop.step) == (3, 0)
    closed = collections.Counter(manifest.ticket for manifest in sim.published(BatchClosed))
    assert sorted(closed.values()) == [3, 3, 3]
    check_history(sim, 3)
    assert {one.state for one in sim.published(BatchReady)} == {"failed"}
    assert {one.outcome for one in sim.published(Progress)} == {"failed"}


class LateOperator(Operator):
    """Lives and loads a model for minutes: its state is "starting"."""

    async def serve(self) -> None:
        await asyncio.sleep(300)
        await super().serve()


@pytest.mark.parametrize(("interval", "late"), [(1, "not there"), (4, "not there"), (1, "starting")])
def test_closed_batches_wait_in_their_queue_while_no_operator_works(tmp_path: Path, interval: int, late: str) -> None:
    """A minute's operator_deadline and three tries of it, and nothing is lost in 700 seconds."""
    sim = Simulation(tmp_path, (f"synchronizer.sync_interval={interval}",), batches=8, operators=0)

    async def operator() -> None:
        if late == "starting":
            await LateOperator(sim.config, bus=sim.bus(), topology=sim.topology, agent_id="operator-0").run()
            return
        await asyncio.sleep(700)
        await sim.make_operator().run()

    run_virtually(sim.run(beside=operator), limit=3000)
    assert sim.learners[0].steps == list(range(1, 9))
    assert len(sim.published(BatchClosed)) == 8, "each manifest is published once"
    check_history(sim, 8)


def test_batches_that_queue_behind_a_slow_operator_are_not_lost(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, ("explorer.operator_deadline=5", "synchronizer.sync_interval=4"), batches=4)
    sim.holds = late_operators(lambda batch: (MANIFEST_TRIES + 1) * 5.0)
    run_virtually(sim.run(), limit=1000)
    assert {one.outcome for one in sim.published(Progress)} == {"trained"}


@pytest.mark.parametrize(
    ("lives", "waits_for"),
    [
        pytest.param(False, "an engine to take the weights", id="a trainer that never comes"),
        pytest.param(True, "the last batches to be consumed", id="one that dies for good before the end"),
    ],
)
def test_nothing_moves_ends_the_run_with_the_reason_and_the_state_saved(
    tmp_path: Path, lives: bool, waits_for: str
) -> None:
    sim = Simulation(tmp_path, SHORT, batches=2)

    async def trainer() -> None:
        if not lives:
            await asyncio.Event().wait()
        task = asyncio.get_running_loop().create_task(sim.make_trainer().run())
        await until(lambda: bool(sim.published(RunEnd)))
        await killed(task)

    async def explorer() -> None:
        with pytest.raises(FatalError, match=r"explorer\.stall_timeout") as caught:  # one error, no group
            await sim.make_explorer().explore()
        assert waits_for in str(caught.value)
        assert caught.value.__context__ is None
        raise Over

    failure(sim.run(trainer=trainer, explorer=explorer), Over, limit=10_000)
    assert sim.state().incarnations == 1


async def test_waiting_for_submissions_is_no_stall(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, SHORT, batches=1, taskset=None)
    async with beside(sim.run()):
        await asyncio.sleep(300)
        assert sim.explorer.state == "idle"
        await sim.submit(1)
    assert sim.trainer.loop.progress == 1


def test_a_slow_run_that_moves_is_no_stall(tmp_path: Path) -> None:
    sim = Simulation(
        tmp_path,
        SHORT,
        batches=3,
        step_seconds=35.0,
        runner_seconds=lambda task_slice: 10.0 if task_slice.lane == "eval" else 40.0,
    )
    run_virtually(sim.run(), limit=2000)
    check_history(sim, 3)


@pytest.mark.parametrize("how", ["unfinished when time is up", "all its tries failed"])
def test_a_task_without_a_result_is_given_back_once(tmp_path: Path, how: str) -> None:
    def concerns(task_slice: TaskSlice) -> bool:
        return bool(task_slice.task.raw_task.get("n") == 1)

    settings = ("explorer.batch_timeout=30", "explorer.max_timeout=10", "explorer.max_consecutive_empty=100")
    sim = Simulation(tmp_path, settings, batches=4)
    if how == "all its tries failed":
        sim.spoil = lambda task_slice: "failed" if concerns(task_slice) else None
    else:
        sim.runner_seconds = lambda task_slice: 1e4 if concerns(task_slice) else 0.1
    run_virtually(sim.run(), limit=2000)
    slices = [each for each in sim.published(TaskSlice) if each.lane == "train"]
    assert [each.batch for each in slices if concerns(each)] == [1, 2], "a second time, not a third"
    assert sorted({each.task.raw_task["n"] for each in slices}) == list(range(7))
    assert sim.trainer.loop.progress == 4


def test_tasks_given_back_after_the_last_batch_was_opened_are_counted_and_reported(tmp_path: Path) -> None:
    sim = Simulation(
        tmp_path,
        batches=3,
        spoil=lambda task_slice: "failed" if task_slice.task.raw_task.get("n") in {0, 3, 4} else None,
    )
    run_virtually(sim.run(), limit=2000)
    given = [
        (one.batch, one.task.raw_task["n"]) for one in sim.published(TaskSlice) if one.lane == "train" and one.batch
    ]
    assert sorted(given) == [(1, 0), (1, 1), (2, 0), (2, 2), (3, 3), (3, 4)]
    assert sim.values("rollout/tasks/left_over") == [(3, 2.0)], "tasks 3 and 4; task 0 was given back before"
    assert "2 unfinished tasks of the last batches" in make_report("sim", written(sim, tmp_path))


def written(sim: Simulation, folder: Path) -> Path:
    """Write the metrics that the simulation kept as a run's file."""
    writer = MetricsWriter(folder, "explorer", "explorer-0", tensorboard=False)
    for step, values in sim.reports:
        writer.write(step, values)
    writer.close()
    return folder


async def test_submissions_count_once_also_over_a_restart_and_are_answered_after_their_batch_closed(
    tmp_path: Path,
) -> None:
    sim = Simulation(tmp_path, batches=2, taskset=None, runner_seconds=lambda task_slice: 3.0)
    async with beside(sim.run(explorer=restarted(sim, has_slices(sim, 1)))):
        client = await sim.client()
        await client.declare(REPLIES)
        await until(lambda: bool(sim.explorers) and sim.explorers[0].state == "idle")
        await sim.submit(1, reply_to=REPLIES.name)
        await until(lambda: len(sim.explorers) == 2 and sim.explorers[1].exploration is not None)
        await sim.submit(1, reply_to=REPLIES.name)
        await asyncio.sleep(0.5)
        await sim.submit(2, reply_to=REPLIES.name)
    told = [one for one in await sim.replies() if isinstance(one, SubmissionOutcome)]
    assert [(one.submission_id, one.outcome, one.completed_runs, one.total_runs) for one in told] == [
        ("s1", "finished", 2, 2),
        ("s2", "finished", 2, 2),
    ]
    assert [one.batch for one in told] == [1, 2]
    kinds = [type(one).__name__ for one in sim.published(BatchClosed)]
    assert len(kinds) == 2
    check_history(sim, 2)


async def test_submitted_evaluations_have_outcomes_and_train_nothing(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=2)
    async with beside(sim.run()):
        client = await sim.client()
        await client.declare(REPLIES)
        await asyncio.sleep(1.0)
        await sim.submit(1, reply_to=REPLIES.name, is_eval=True)
    (told,) = await sim.replies()
    assert isinstance(told, SubmissionOutcome)
    assert (told.submission_id, told.outcome, told.experiences) == ("s1", "finished", 0)
    assert told.metrics["accuracy"] == 1.0
    check_history(sim, 2)
    assert not sim.state().tickets


async def test_what_no_batch_takes_any_more_is_told_so_also_when_it_comes_late(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=1, step_seconds=30.0)
    sim.runner_seconds = lambda task_slice: 60.0 if "submitted" in str(task_slice.batch) else 0.1
    async with beside(sim.run()):
        client = await sim.client()
        await client.declare(REPLIES)
        await until(has_slices(sim, 1))
        await sim.submit(1, reply_to=REPLIES.name)
        await until(lambda: bool(sim.published(RunEnd)))
        await asyncio.sleep(5.0)
        await sim.submit(2, reply_to=REPLIES.name)
        await sim.submit(3, reply_to=REPLIES.name, is_eval=True)
    told = {one.submission_id: one.outcome for one in await sim.replies() if isinstance(one, SubmissionOutcome)}
    assert told == {"s1": "cancelled", "s2": "cancelled", "s3": "finished"}
    assert not sim.state().pending


@pytest.mark.parametrize("after", [0.3, 1.5, 2.2, 3.5, 4.4, 5.2, 5.6, None])
def test_drained_at_any_moment_it_saves_and_the_next_start_goes_on(tmp_path: Path, after: float | None) -> None:
    """None: while the last batches are trained, it does not evaluate early."""
    sim = Simulation(tmp_path, ("runner.drain_timeout=2",), batches=3, step_seconds=20.0 if after is None else 1.0)

    async def explorer() -> None:
        first = sim.make_explorer()
        async with asyncio.TaskGroup() as group:
            group.create_task(first.run())
            await (until(lambda: bool(sim.published(RunEnd))) if after is None else asyncio.sleep(after))
            await asyncio.sleep(1.0 if after is None else 0.0)
            first.drain()
        assert after is not None or sim.state().due == []
        if first.exploration is not None and first.exploration.state.finished:
            return
        await sim.make_explorer().run()

    run_virtually(sim.run(explorer=explorer), limit=1000)
    check_history(sim, 3)
    assert sorted(sim.evaluated_steps()) == [0, 2, 3]
    assert dict(sim.values("eval/held/version/min"))[3] == 3.0, "the last evaluation is of the final weights"


@pytest.mark.parametrize(
    ("settings", "sets", "steps"),
    [
        pytest.param((), {}, [], id="no sets"),
        pytest.param((), {"held": []}, [0, 2], id="an empty set"),
        pytest.param(("explorer.eval_on_startup=false",), None, [2], id="not at startup"),
    ],
)
def test_a_run_with_less_to_evaluate_ends(
    tmp_path: Path, settings: tuple[str, ...], sets: dict[str, list[TaskBody]] | None, steps: list[int]
) -> None:
    sim = Simulation(tmp_path, settings, batches=2)
    sim.eval_sets = sim.eval_sets if sets is None else sets
    run_virtually(sim.run(), limit=1000)
    check_history(sim, 2)
    assert sim.evaluated_steps() == steps
    assert [end.batches for end in sim.published(RunEnd)] == [2]


# -- the engine


class MortalEngine(FakeEngine):
    """Dies when told and comes back empty."""

    async def die(self, seconds: float = 5.0) -> None:
        self.snapshot = replace(self.snapshot, alive=False, state="loading", version=None)
        self.on_change()
        await asyncio.sleep(seconds)
        self.snapshot = replace(self.snapshot, alive=True, state="empty")
        self.on_change()


def strict(sim: Simulation) -> Callable[[TaskSlice], str | None]:
    """A slice pinned to a version that the engine does not hold fails, as a real one does."""
    return lambda task_slice: "failed" if task_slice.pinned not in {None, sim.engine.snapshot.version} else None


async def test_an_engine_that_dies_during_an_evaluation_is_synced_again_and_the_evaluation_pinned_anew(
    tmp_path: Path,
) -> None:
    engine = MortalEngine()
    sim = Simulation(
        tmp_path, batches=4, engine=engine, runner_seconds=lambda task_slice: 10.0 if task_slice.lane == "eval" else 0.1
    )
    sim.spoil = strict(sim)
    async with beside(sim.run()):
        await until(has_slices(sim, "2/held"))
        await engine.die()
    check_history(sim, 4)
    assert engine.served == sorted(engine.served)
    assert engine.served.count((1, 2)) == 1, "the try that was put off is the one that is done"
    assert sim.evaluated_steps() == [0, 2, 4]
    assert not any(value for _, value in sim.values("eval/held/failed_runs"))


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("step", [0, 2])
async def test_an_engine_that_dies_during_a_sync(tmp_path: Path, at: float, step: int) -> None:
    engine = MortalEngine(receive_seconds=1.0)
    sim = Simulation(tmp_path, ("synchronizer.sync_timeout=5",), batches=3, engine=engine)
    async with beside(sim.run()):
        await until(
            lambda: bool(sim.trainers) and sim.trainer.loop.step == step and sim.trainer.loop.gate.phase == "entering",
            step=0.001,
        )
        await asyncio.sleep(at)
        await engine.die(2.0)
    check_history(sim, 3)
    assert engine.served == sorted(engine.served)
    assert sim.trainer.loop.gate.aborts >= 1
    assert sim.evaluated_steps() == [0, 2, 3]


def test_weights_lost_in_the_middle_of_a_try_show_after_it(tmp_path: Path) -> None:
    """The engine was replaced by an empty one while its host stood in a try that then came to nothing."""
    engine = MortalEngine()
    sim = Simulation(tmp_path, ("synchronizer.sync_timeout=5",), batches=3, engine=engine)

    async def refuses(timeout: float) -> None:
        if len(engine.served) == 2 and engine.snapshot.state == "current":
            engine.snapshot = replace(engine.snapshot, state="empty", version=None)
            raise RuntimeError("the engine was started anew")

    engine.pause = refuses  # type: ignore[method-assign]
    run_virtually(sim.run(), limit=1000)
    check_history(sim, 3)
    assert sim.trainer.loop.gate.aborts == 1


def _tickets(explorer: Explorer) -> list[Any]:
    return list(explorer.exploration.state.tickets.values()) if explorer.exploration else []


def test_a_trainer_that_recomputes_steps_after_a_kill_is_no_stall(tmp_path: Path) -> None:
    """Between its checkpoint and where it was killed only the trainer's own counters move."""
    sim = Simulation(tmp_path, SHORT, batches=12, step_seconds=10.0)

    run_virtually(
        sim.run(trainer=lambda: killed_when(lambda: sim.trainer.loop.progress == 10, sim.make_trainer)), limit=10_000
    )
    assert [len(learner.steps) for learner in sim.learners] == [10, 12], "100 s of steps were done again"
    assert sim.state().finished


async def test_dropped_dead_letters_are_counted_over_the_run(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=4)

    async def drop(count: int) -> None:
        client = await sim.client()
        for number in range(count):
            # as the broker moves it: any body, under the routing key that the queue's declaration says
            letter = Envelope(body=b"\xff", kind="unknown", message_id=f"dead-{number}")
            assert await client.publish(sim.topology.exchange("control"), DROPPED, letter)
        await client.close()

    async def counted() -> None:
        await until(lambda: sim.explorer.detail().opened > 0)
        await drop(3)
        await until(lambda: sim.state().dropped_dead == 3)

    def resumed() -> bool:
        loop = sim.explorer.exploration if len(sim.explorers) == 2 else None
        return loop is not None and loop.dispatcher.is_caught_up

    async with beside(sim.run(explorer=restarted(sim, counted, pause=0.0))):
        await until(resumed)
        await drop(2)
        await until(lambda: sim.explorer.detail().dropped_dead == 5)
    assert sim.topology.dead.dead_letter_routing_key == DROPPED
    assert sim.topology.dead.dead_letter_exchange == sim.topology.exchange("control")


def open_tickets(sim: WatchedSimulation) -> list[Any]:
    explorer = sim.explorer.exploration if sim.explorers else None
    return [one for one in explorer.state.tickets.values() if one.lane == "train"] if explorer is not None else []


def is_open(sim: WatchedSimulation) -> Callable[[], bool]:
    """Whether the slices of a batch are published."""
    return lambda: any(ticket.published for ticket in open_tickets(sim))


def test_open_is_save_then_queue_then_slices_then_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue is deleted later, and an evaluation has none, no manifest, and is never ready."""
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 5.0)
    sim.watch_saves(monkeypatch)
    run_virtually(sim.run(), limit=300)
    check_history(sim, 2)
    trained = sim.tickets("batch_closed")
    assert len(trained) == len(sim.where("publish", "batch_closed")) == 2, "once each, unless somebody dies"
    for ticket in trained:
        unpublished = sim.saves(ticket, lambda state: not state.published)
        published = sim.saves(ticket, lambda state: state.published)
        (declared,) = sim.where("declare", f"batch.{ticket}")
        sent, confirmed = sim.where("publish", "task_slice", ticket), sim.where("confirmed", "task_slice", ticket)
        assert len(sent) == len(confirmed) == 2
        assert unpublished[0] < declared < sent[0]
        assert confirmed[-1] < published[0]
        assert sim.acts[published[0]].time - sim.acts[confirmed[-1]].time < 1.0, "at once, not with the first outcome"
        (unbound,), (deleted,) = (sim.where(what, f"batch.{ticket}") for what in ("unbind", "delete"))
        assert sim.acts[deleted].time - sim.acts[unbound].time >= 1.0
    lanes = {task_slice.ticket: task_slice.lane for task_slice in sim.published(TaskSlice)}
    assert sorted(lanes.values()) == ["eval", "eval", "train", "train"]
    declarations = {act.subject for act in sim.acts if act.what == "declare" and act.subject.startswith("batch.")}
    assert declarations == {f"batch.{ticket}" for ticket in trained}
    for kind in (BatchClosed, BatchReady, Progress):
        assert {message.ticket for message in sim.published(kind)} == set(trained)


# -- close


def test_close_is_save_then_unbind_then_manifest_then_answers_then_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submission is acknowledged once saved and long before."""
    sim = WatchedSimulation(tmp_path, batches=1, taskset=None, runner_seconds=lambda task_slice: 60.0)
    sim.watch_saves(monkeypatch)

    async def scene() -> None:
        await (await sim.client()).declare(REPLIES)
        await sim.submit(1, reply_to=REPLIES.name)

    run_virtually(sim.run(beside=scene), limit=300)
    (acked,) = sim.where("acked", "submitted")
    taken = [place for place in sim.where("saved") if "s1" in sim.acts[place].subject.split(",")]
    (ticket,) = sim.tickets("batch_closed")
    fixed = sim.saves(ticket, lambda one: one.manifest is not None)
    (unbound,) = sim.where("unbind", f"batch.{ticket}")
    (sent,), (confirmed,) = (sim.where(what, "batch_closed", ticket) for what in ("publish", "confirmed"))
    (answered,), (told,) = (sim.where(what, "submission_outcome", ticket) for what in ("publish", "confirmed"))
    without = [place for place in sim.where("saved") if place > fixed[0] and ticket not in sim.acts[place].state]
    assert fixed[0] < unbound < sent < confirmed < answered < told < without[0]
    assert taken[0] < acked < fixed[0]
    assert sim.acts[sent].time - sim.acts[acked].time > 50.0
    mail = sim.acts[answered].mail
    assert mail is not None
    assert (mail.correlation_id, sim.acts[sent].mail.message_id) == ("c1", f"closed-{ticket}")  # type: ignore[union-attr]
    (outcome,) = asyncio.run(sim.replies())
    assert isinstance(outcome, SubmissionOutcome)


@pytest.fixture
def _declared_often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exploration.KEEP_QUEUES_INTERVAL <= 24 * 3600
    monkeypatch.setattr(exploration, "KEEP_QUEUES_INTERVAL", 5.0)


@pytest.mark.usefixtures("_declared_often")
@pytest.mark.parametrize("at", ["unbind", "batch_closed"])
def test_a_ticket_with_a_manifest_is_never_declared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Killed behind the saved manifest, and kept waiting by the daily round: neither brings the queue back."""
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 3.0)
    sim.watch_saves(monkeypatch)
    sim.holds = lambda who, mail: 30.0 if mail.kind == "batch_closed" and who == "explorer-0" else 0.0

    async def fixed() -> None:
        if at == "unbind":
            await until(lambda: any(t.manifest is not None for a in sim.acts for t in a.state.values()), 0.0001)
        else:
            await until(lambda: bool(sim.where("publish", "batch_closed")))
            await asyncio.sleep(20.0)

    run_virtually(sim.run(explorer=restarted(sim, fixed)), limit=1000)
    check_history(sim, 2)
    for ticket in sim.tickets("batch_closed"):
        first = sim.saves(ticket, lambda one: one.manifest is not None)[0]
        assert not [place for place in sim.where("declare", f"batch.{ticket}") if place > first]


@pytest.mark.usefixtures("_declared_often")
def test_open_queues_are_declared_again_at_start_and_every_day(tmp_path: Path) -> None:
    """Publishing does not refresh their expiry."""
    sim = WatchedSimulation(tmp_path, batches=1, runner_seconds=lambda task_slice: 40.0)
    run_virtually(sim.run(explorer=restarted(sim, is_open(sim), then=2.0)), limit=500)
    (ticket,) = sim.tickets("batch_closed")
    declared = [sim.acts[place] for place in sim.where("declare", f"batch.{ticket}")]
    second = [act.time for act in declared if act.who == "explorer-0'"]
    assert [act.who for act in declared[:2]] == ["explorer-0", "explorer-0'"]
    mark, *_ = sim.where("confirmed", "mark", who="explorer-0'")
    assert second[0] - sim.acts[mark].time < 1.0
    assert len(second) >= 6
    assert second[1] - second[0] <= 5.1
    assert {round(later - before) for before, later in itertools.pairwise(second[1:])} == {5}


async def test_a_queue_that_was_deleted_is_not_brought_back_by_a_reconnect(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=1, runner_seconds=lambda task_slice: 5.0)
    seen: list[str] = []
    async with beside(sim.run()):
        await until(is_open(sim))
        name = sim.topology.batch_queue(1, open_tickets(sim)[0].ticket).name
        await (await sim.client()).delete(name)
        sim.broker.drop(sim.explorer.bus, delay=1.0)  # type: ignore[arg-type]
        await asyncio.sleep(2.0)
        seen.extend(queue for queue in sim.broker.queues if queue == name)
    assert seen == []
    assert sim.trainer.loop.progress == 1


async def test_a_restarted_explorer_decides_nothing_and_lets_no_time_pass_before_its_mark(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2, runner_seconds=lambda task_slice: 8.0)
    sim.holds = lambda who, mail: 20.0 if mail.kind == "mark" and who == "explorer-0'" else 0.0
    left: list[float] = []

    async def published() -> None:
        await until(is_open(sim))
        await asyncio.sleep(1.5)
        left.append(open_tickets(sim)[0].time_left)

    async with beside(sim.run(explorer=restarted(sim, published))):
        await until(lambda: len(sim.explorers) == 2 and sim.explorer.exploration is not None)
        await until(lambda: bool(open_tickets(sim)))
        known = open_tickets(sim)[0].time_left
        await until(lambda: bool(sim.where("publish", "mark", who="explorer-0'")))
        await asyncio.sleep(19.0)
        left.extend([known, open_tickets(sim)[0].time_left])
    check_history(sim, 2)
    assert left[1] == left[2], "time passes only once it has caught up"
    (mark,) = sim.where("confirmed", "mark", who="explorer-0'")
    sent = [act.subject for act in sim.acts[:mark] if act.who == "explorer-0'" and act.what == "publish"]
    declared = [act.subject for act in sim.acts[:mark] if act.who == "explorer-0'" and act.subject.startswith("batch.")]
    assert sent == ["mark"]
    assert declared == []


def test_a_restarted_explorer_reads_results_from_where_it_stood(tmp_path: Path) -> None:
    """Outcomes that came while nobody lived are taken in; those taken in before are not asked for again."""
    sim = WatchedSimulation(tmp_path, batches=3, runner_seconds=lambda task_slice: 2.0)
    run_virtually(sim.run(explorer=restarted(sim, has_slices(sim, 2), pause=30.0)), limit=500)
    check_history(sim, 3)
    slices = [(one.ticket, one.task_id, one.run_base) for one in sim.published(TaskSlice)]
    assert len(slices) == len(set(slices))
    assert sim.state().results_offset > 0  # type: ignore[operator]


def test_an_explorer_that_lost_its_lock_stops_acting_and_writes_no_state(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=60, runner_seconds=lambda each: 100.0 if each.lane == "train" else 0.1)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_explorer("explorer-0").run())
        await until(is_open(sim))
        await asyncio.sleep(1.0)
        before = sim.explorers[0].exploration
        assert before is not None
        sim.broker.drop(sim.explorers[0].bus, delay=30.0)  # type: ignore[arg-type]
        second = loop.create_task(sim.make_explorer("explorer-1").run())
        dropped = loop.time()
        await asyncio.sleep(25.0)
        with pytest.raises(RestartRequested):
            await before.save()
        assert sim.state().incarnations == 2
        await asyncio.wait([first])
        assert loop.time() - dropped == pytest.approx(30.0, abs=0.1), "at once, not when it is to save something"
        back = len(sim.acts)
        with pytest.raises(ExceptionGroup) as caught:
            first.result()
        assert caught.value.subgroup(RestartRequested) is not None
        await asyncio.sleep(150.0)
        assert [act for act in sim.acts[back:] if act.who == "explorer-0"] == []
        assert sent_by(sim, "explorer-1")
        await killed(second)
        raise Over

    failure(sim.run(explorer=scene), Over, limit=500)


async def test_every_message_may_come_twice(tmp_path: Path) -> None:
    """A publish whose confirm was lost is repeated under its id; every reader drops repeats by it."""
    sim = WatchedSimulation(tmp_path, batches=4)
    sim.times_published = 2
    async with beside(sim.run()):
        await (await sim.client()).declare(REPLIES)
        await asyncio.sleep(0.5)
        await sim.submit(1, reply_to=REPLIES.name)
    check_history(sim, 4)
    assert sorted(set(sim.evaluated_steps())) == [0, 2, 4]
    assert sim.learners[0].steps == [1, 2, 3, 4]
    given = [each.task.raw_task for each in sim.published(TaskSlice) if each.lane == "train"]
    assert sum("s" in task for task in given) == 2, "one submission, its slice twice"


def test_message_ids_are_derived_so_that_repeats_are_known(tmp_path: Path) -> None:
    sim = WatchedSimulation(tmp_path, batches=2)

    sim.holds = lambda who, mail: 5.0 if mail.kind == "batch_closed" and who == "explorer-0" else 0.0
    run_virtually(sim.run(explorer=restarted(sim, lambda: bool(sim.where("publish", "batch_closed")))), limit=300)
    mails = [act.mail for act in sim.acts if act.what == "publish"]
    closed = [mail for mail in mails if mail is not None and mail.kind == "batch_closed"]
    assert {mail.message_id for mail in closed} == {f"closed-{mail.headers['ticket']}" for mail in closed}
    assert len(closed) == 3, "one was repeated by the second life"
    slices = [mail for mail in mails if mail is not None and mail.kind == "task_slice"]
    assert len({mail.message_id for mail in slices}) == len(slices) == len(sim.published(TaskSlice))
    assert all(mail.message_id.startswith(str(mail.headers["ticket"])) for mail in slices)
    chunks = [mail for mail in mails if mail is not None and mail.kind == "experience_chunk"]
    assert chunks
    for mail in chunks:
        assert mail.message_id == "-".join(str(mail.headers[name]) for name in ("ticket", "op", "n"))


async def test_a_tap_that_takes_everything_changes_nothing(tmp_path: Path) -> None:
    """With it nothing is ever unroutable: what comes after its batch was closed is lost on the tap, and not missed."""
    sim = WatchedSimulation(
        tmp_path,
        (
            "explorer.batch_timeout=30",
            "explorer.max_timeout=10",
            "explorer.max_consecutive_empty=100",
            "explorer.unfinished=drop",
        ),
        batches=3,
        runner_seconds=lambda task_slice: 45.0 if task_slice.task.raw_task.get("n") == 1 else 0.1,
        step_seconds=20.0,
    )
    async with beside(sim.run()):
        bindings = tuple(Binding(exchange, "#") for exchange in sim.topology.exchanges)
        await (await sim.client()).declare(Queue(name="somebodys-tap", bindings=bindings))
    check_history(sim, 3)
    manifests = {one.batch: one for one in sim.published(BatchClosed)}
    assert manifests[1].outcomes == {"finished": 1, "cancelled": 1}
    assert [accepted.task_id for accepted in manifests[1].accepted] == [0]
    late = [one for one in sim.published(TaskSlice) if one.task.raw_task.get("n") == 1]
    assert len(late) == 1
    assert {one.outcome for one in sim.published(Progress)} == {"trained"}
