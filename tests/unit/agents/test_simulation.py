"""The pacing and the styles of docs/learning.md: whole runs on MemoryBus in virtual time, with a fake learner, engine
and runners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.explorer.test_explorer import restarted
from tests.unit.agents.watched import WatchedSimulation, late_operators
from tests.unit.agents.world import failure, killed_when
from trinity_agents.simulation import Simulation, kill_and_replace_trainer, until
from trinity_agents.trainer.history import lineage
from trinity_mq.messages import Progress, TaskSlice
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.fakes import FakeLearner, FakeRunner
from trinity_mq.testing.virtual_time import VirtualTimeLoop, run_virtually

LOOP = VirtualTimeLoop


def test_evaluations_are_of_the_right_versions_and_the_final_one_is_done_once(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, batches=5)
    run_virtually(sim.run(), limit=1000)
    served = {label: int(version) for label, version in sim.values("eval/held/version/min")}
    assert [label for label, _ in sim.values("eval/held/version/min")] == [0, 2, 4, 5]
    assert served[0] == 0
    assert served[5] == 5
    assert served[2] == 1  # the version committed when batch 2 was closed
    for label, values in sim.reports:
        if "eval/held/version/min" in values:
            assert values["eval/held/version/min"] == values["eval/held/version/max"], label


def test_too_many_empty_batches_in_a_row_end_it_with_an_error(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, spoil=lambda task_slice: "empty" if task_slice.lane == "train" else None)
    error = failure(sim.run(), FatalError, limit=1000)
    assert isinstance(error, FatalError)
    assert "batch 3: no slice gave an experience: 2 failed. 6 slices failed: slice failed; first: task " in str(error)
    status = sim.explorers[-1].detail()
    assert status.empty is not None
    assert (status.empty.batch, status.empty.in_a_row, status.empty.limit) == (3, 3, 3)
    assert [failure.count for failure in status.failures] == [6]


@pytest.mark.parametrize("batches", [7, 3], ids=["more batches", "as it was"])
@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven", "fully_async"])
async def test_a_finished_run_goes_on_when_it_is_started_again(tmp_path: Path, style: str, batches: int) -> None:
    settings = (f"synchronizer.sync_style={style}", "synchronizer.sync_interval=2")
    first = Simulation(tmp_path, settings, batches=3)
    more = Simulation(tmp_path, settings, batches=batches, broker=first.broker)
    await first.run()
    await asyncio.sleep(60.0)
    await more.run()
    entries = lineage(tmp_path / "history", more.trainer.loop.generation, batches)
    assert sorted(entry["batch"] for entry in entries) == list(range(1, batches + 1))
    assert [entry["progress"] for entry in entries] == list(range(1, batches + 1))
    assert first.evaluated_steps()[-1] == 3
    assert [*first.evaluated_steps(), *more.evaluated_steps()][-1] == batches
    assert more.learners[0].steps == list(range(4, batches + 1))
    assert more.state().finished
    assert more.trainer.loop.progress == batches
    assert more.trainer.loop.finished == (batches > 3), "of a run that was over it has nothing to do"


# -- the styles


STYLES = ("trainer_driven", "explorer_driven", "fully_async")
ALL = ("fixed", *STYLES)


def styled(folder: Path, style: str, *overrides: str, **fields: Any) -> Simulation:
    return Simulation(folder, (f"synchronizer.sync_style={style}", *overrides), **fields)


def check_whole(sim: Simulation, batches: int) -> None:
    """All was consumed and trained on, nothing too old, and the final weights evaluated once."""
    assert sim.trainer.loop.progress == batches
    assert sim.learners[-1].steps[-1:] == [batches]
    bound = sim.config.synchronizer.effective_max_staleness
    assert max(age for _, age in sim.values("sample/staleness/max")) <= bound
    assert sim.engine.served == sorted(sim.engine.served)
    final = [values for label, values in sim.reports if label == batches and "eval/held/version/min" in values]
    assert [values["eval/held/version/min"] for values in final] == [batches]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("style", ALL)
def test_every_style_ends_with_all_trained_and_the_last_weights_served(
    tmp_path: Path, style: str, interval: int, depth: int
) -> None:
    ahead = f"synchronizer.{'sync_offset' if style == 'fixed' else 'pipeline_depth'}={depth}"
    sim = styled(tmp_path, style, f"synchronizer.sync_interval={interval}", ahead, batches=8)
    run_virtually(sim.run(), limit=1000)
    check_whole(sim, 8)
    assert sim.learners[0].steps == list(range(1, 9))
    assert sim.trainer.loop.gate.aborts == 0
    served = [step for _, step in sim.engine.served]
    if style == "explorer_driven":
        # the first one, one for each time it asked whose weights were new, the last one
        assert served[0] == 0
        assert served[-1] == 8
        assert len(served) <= 2 + (8 - 1) // interval
    else:
        assert served == sorted({0, *range(interval, 9, interval), 8})
    if style == "fixed":
        assert max(age for _, age in sim.values("sample/staleness/max")) <= interval - 1 + depth


def test_explorer_driven_opens_on_the_newest_weights_it_asked_for(tmp_path: Path) -> None:
    sim = styled(
        tmp_path, "explorer_driven", "synchronizer.sync_interval=2", "synchronizer.pipeline_depth=0", batches=6
    )
    run_virtually(sim.run(), limit=1000)
    check_whole(sim, 6)
    assert [step for _, step in sim.engine.served] == [0, 2, 4, 6]
    assert [age for _, age in sim.values("sample/staleness/max")] == [0, 1, 0, 1, 0, 1]


def test_what_was_asked_for_and_is_not_given_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    sim = styled(
        tmp_path,
        "explorer_driven",
        "synchronizer.request_timeout=50",
        "synchronizer.sync_interval=2",
        "synchronizer.pipeline_depth=1",
    )

    class SlowFromTheSecondStep(FakeLearner):
        """The explorer asks at the end of the first one."""

        async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
            self.step_seconds = 1e4 if step_number > 1 else 1.0
            return await super().step(experiences, step_number)

    error = failure(
        sim.run(trainer=lambda: sim.make_trainer(learner=SlowFromTheSecondStep()).run()), FatalError, limit=2e4
    )
    assert "requested at batch 3 within 50 s (synchronizer.request_timeout)" in str(error)
    assert "It reports: step 1, progress 1" in str(error)
    assert sim.state().opened == 2


def test_a_trainer_that_is_away_is_not_waited_for_by_the_requests_clock(tmp_path: Path) -> None:
    sim = styled(tmp_path, "explorer_driven", "synchronizer.request_timeout=50", batches=4)

    def late() -> Coroutine[Any, Any, None]:
        return killed_when(lambda: sim.trainer.loop.progress == 2, sim.make_trainer, pause=600.0)

    run_virtually(sim.run(trainer=late), limit=3000)
    check_whole(sim, 4)


@pytest.mark.parametrize(
    ("how", "steps"),
    [pytest.param("empty", 0, id="all are empty"), pytest.param("failed", 3, id="every second one is parked")],
)
@pytest.mark.parametrize("style", ALL)
def test_batches_without_experiences_do_not_stop_the_run(tmp_path: Path, style: str, how: str, steps: int) -> None:
    def spoil(task_slice: TaskSlice) -> str | None:
        return how if task_slice.lane == "train" and (how == "empty" or int(task_slice.batch) % 2 == 0) else None

    sim = styled(tmp_path, style, "explorer.max_consecutive_empty=100", spoil=spoil)
    run_virtually(sim.run(), limit=1000)
    assert (sim.trainer.loop.progress, sim.trainer.loop.step) == (6, steps)
    assert steps or len(sim.engine.served) == 1, "nothing changed: commits without a transfer"


@pytest.mark.parametrize("step_seconds", [0.01, 30.0])
@pytest.mark.parametrize("style", ALL)
def test_a_much_faster_or_slower_trainer(tmp_path: Path, style: str, step_seconds: float) -> None:
    sim = styled(tmp_path, style, step_seconds=step_seconds)
    run_virtually(sim.run(), limit=3000)
    check_whole(sim, 6)


@pytest.mark.parametrize("style", ALL)
def test_operators_that_finish_out_of_order_are_trained_on_as_they_come_but_for_fixed(
    tmp_path: Path, style: str
) -> None:
    ahead = "sync_offset=4" if style == "fixed" else "pipeline_depth=3"
    settings = (f"synchronizer.{ahead}", "synchronizer.sync_interval=4", "synchronizer.max_staleness=20")
    sim = WatchedSimulation(tmp_path, (f"synchronizer.sync_style={style}", *settings), batches=8, operators=3)
    sim.holds = late_operators(lambda batch: 20.0 if batch % 3 == 1 else 0.0)
    run_virtually(sim.run(), limit=3000)
    check_whole(sim, 8)
    order = [entry["batch"] for entry in lineage(tmp_path / "history", 1, 8)]
    assert sorted(order) == list(range(1, 9))
    assert (order == sorted(order)) == (style == "fixed")
    assert (order[0] == 1) == (style == "fixed"), "the first one was slow: the others did not wait for it"


@pytest.mark.parametrize("style", ALL)
def test_no_runners_for_many_minutes(tmp_path: Path, style: str) -> None:
    sim = styled(tmp_path, style, "explorer.batch_timeout=400", "explorer.max_timeout=100")

    async def late() -> None:
        await asyncio.sleep(900)
        await sim.make_runner().run()

    run_virtually(sim.run(runners=late), limit=10_000)
    check_whole(sim, 6)
    assert not any(values.get("rollout/slices/cancelled") for _, values in sim.reports)


MOMENTS = [("fixed", round(0.15 * n, 2)) for n in range(1, 24)]
MOMENTS += [(style, round(0.3 * n, 2)) for style in STYLES for n in range(1, 12)]


@pytest.mark.parametrize(("style", "after"), MOMENTS)
def test_trainer_killed_between_any_two_events_and_resumed(tmp_path: Path, style: str, after: float) -> None:
    sim = styled(tmp_path, style, "trainer.save_interval=2", "synchronizer.sync_timeout=5", batches=5, step_seconds=0.3)

    run_virtually(sim.run(trainer=kill_and_replace_trainer(sim, after)), limit=3000)
    assert sim.trainer.loop.progress == 5
    history = lineage(tmp_path / "history", sim.trainer.loop.generation, 5)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len({entry["ticket"] for entry in history}) == 5
    assert len(set(uids)) == len(uids) == 20
    assert [label for label, _ in sim.values("eval/held/version/min")].count(5) == 1
    assert sim.engine.served == sorted(sim.engine.served)


# -- too old


def behind(sim: Simulation, *lost: int, always: bool = False) -> None:
    """Have the runs of the tasks ``lost``, or the first ones, sampled by the very first weights, whatever the engine
    holds.
    """
    met: set[int] = set()

    async def runner(bus: Any, topology: Any) -> None:
        def spoil(task_slice: TaskSlice) -> str | None:
            number = task_slice.task.raw_task.get("n", -1)
            old = number in lost and (always or number not in met)
            met.add(number)
            now[0] = (1, 0) if old else sim.engine.snapshot.version
            return None

        now: list[Any] = [None]
        await FakeRunner(bus, topology, lambda: now[0], sim.runner_seconds, spoil).run()

    sim.runner = runner  # type: ignore[method-assign]


def tasks_done(sim: Simulation) -> list[tuple[int, int]]:
    """``(batch, number of the task)`` of every training slice published, in order."""
    task_slices = [each for each in sim.published(TaskSlice) if each.lane == "train"]
    return [(int(task_slice.batch), task_slice.task.raw_task["n"]) for task_slice in task_slices]


def test_a_group_beyond_the_bound_is_dropped_whole_before_the_step(tmp_path: Path) -> None:
    sim = styled(tmp_path, "fully_async", "synchronizer.max_staleness=2", batches=6)
    behind(sim, 8)  # the first task of batch 5
    run_virtually(sim.run(), limit=1000)
    assert dict(sim.values("sample/dropped_stale_groups")) == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 0}
    told = {int(one.batch): one for one in sim.published(Progress)}
    assert (told[5].outcome, told[5].dropped, told[5].stale_tasks) == ("trained", 2, [0])
    assert max(age for _, age in sim.values("sample/staleness/max")) <= 2
    assert sorted(number for _, number in tasks_done(sim)) == list(range(12)), "and its task is not done again"


def test_requeue_puts_its_task_at_the_head_of_the_next_batch_once(tmp_path: Path) -> None:
    settings = ("synchronizer.max_staleness=2", "synchronizer.stale=requeue", "synchronizer.pipeline_depth=0")
    sim = styled(tmp_path, "fully_async", *settings, batches=8)
    behind(sim, 8, 9)  # batch 5
    run_virtually(sim.run(), limit=1000)
    told = {int(one.batch): one for one in sim.published(Progress)}
    assert (told[5].outcome, told[5].stale_tasks) == ("dropped", [0, 1])
    assert [batch for batch, number in tasks_done(sim) if number in {8, 9}] == [5, 5, 6, 6]
    assert [number for batch, number in tasks_done(sim) if batch == 7] == [10, 11], "the others only wait"
    assert told[6].outcome == "trained"
    assert sim.trainer.loop.progress == 8


def test_a_requeued_task_that_is_too_old_again_is_dropped_for_good(tmp_path: Path) -> None:
    settings = ("synchronizer.max_staleness=1", "synchronizer.stale=requeue", "explorer.max_consecutive_empty=100")
    sim = styled(tmp_path, "fully_async", *settings, batches=9)
    behind(sim, 8, always=True)
    run_virtually(sim.run(), limit=1000)
    assert [number for _, number in tasks_done(sim)].count(8) == 2
    assert sim.trainer.loop.progress == 9


def test_requeued_tasks_survive_the_explorers_death(tmp_path: Path) -> None:
    settings = ("synchronizer.max_staleness=2", "synchronizer.stale=requeue", "synchronizer.pipeline_depth=0")
    sim = styled(tmp_path, "fully_async", *settings, batches=8)
    behind(sim, 8, 9)

    explorer = restarted(sim, lambda: any(progress.stale_tasks for progress in sim.published(Progress)))
    run_virtually(sim.run(explorer=explorer), limit=1000)
    counts = [number for _, number in tasks_done(sim)]
    assert counts.count(8) >= 2
    assert counts.count(9) >= 2
    assert sim.trainer.loop.progress == 8
    uids = [uid for entry in lineage(tmp_path / "history", 1, 8) for uid in entry["uids"]]
    assert len(uids) == len(set(uids)), "nothing is trained on twice"


def test_a_run_may_go_back_to_batch_order_after_a_restart(tmp_path: Path) -> None:
    """What was consumed out of order is on record: the trainer does not wait for it again."""
    settings = ("synchronizer.sync_style=trainer_driven", "synchronizer.pipeline_depth=4")
    sim = WatchedSimulation(tmp_path, settings, batches=8, operators=3)
    sim.holds = late_operators(lambda batch: 30.0 if batch == 2 else 0.0)

    async def trainer() -> None:
        first = sim.make_trainer()
        task = asyncio.get_running_loop().create_task(first.run())
        await until(lambda: sim.trainer.loop.progress == 3)  # 1, 3, 4
        first.drain()
        await task
        fixed = sim.config.synchronizer.model_copy(update={"sync_style": "fixed", "sync_interval": 1})
        sim.config = sim.config.model_copy(update={"synchronizer": fixed.model_copy(update={"max_staleness": 20})})
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=3000)
    order = [entry["batch"] for entry in lineage(tmp_path / "history", 2, 8)]
    assert sorted(order[:3]) != [1, 2, 3]
    assert order[3:] == sorted(set(range(1, 9)) - set(order[:3]))
