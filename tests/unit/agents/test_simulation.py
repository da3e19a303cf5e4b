"""The pacing of docs/learning.md: whole runs on MemoryBus in virtual time, with a fake learner, engine and
runners."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.unit.agents.watched import WatchedSimulation, late_operators
from tests.unit.agents.world import failure
from tests.virtual import virtually
from trinity_agents.simulation import Simulation, kill_and_replace_trainer
from trinity_agents.trainer.history import lineage
from trinity_mq.runtime.errors import FatalError
from trinity_mq.testing.virtual_time import run_virtually


def expected_commits(batches: int, interval: int) -> list[int]:
    """Steps whose weights are committed: the first, every interval, the last."""
    return sorted({0, *range(interval, batches + 1, interval), batches})


@pytest.mark.parametrize(("interval", "offset"), list(itertools.product(range(1, 5), range(5))))
def test_every_interval_and_offset_ends_with_the_expected_commits(tmp_path: Path, interval: int, offset: int) -> None:
    sim = Simulation(
        tmp_path, (f"synchronizer.sync_interval={interval}", f"synchronizer.sync_offset={offset}"), batches=9
    )
    run_virtually(sim.run(), limit=1000)
    assert [step for _, step in sim.engine.served] == expected_commits(9, interval)
    assert sim.learners[0].steps == list(range(1, 10))
    assert max(age for _, age in sim.values("sample/staleness/max")) <= interval - 1 + offset
    assert sim.trainer.loop.gate.aborts == 0


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


@pytest.mark.parametrize("step_seconds", [0.01, 30.0])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_much_faster_or_slower_trainer(tmp_path: Path, step_seconds: float, offset: int) -> None:
    sim = Simulation(tmp_path, (f"synchronizer.sync_offset={offset}",), step_seconds=step_seconds)
    run_virtually(sim.run(), limit=3000)
    assert sim.learners[0].steps == [1, 2, 3, 4, 5, 6]


def test_operators_that_finish_out_of_order(tmp_path: Path) -> None:
    settings = ("synchronizer.sync_interval=4", "synchronizer.sync_offset=4")
    sim = WatchedSimulation(tmp_path, settings, batches=8, operators=3)
    sim.holds = late_operators(lambda batch: 20.0 if batch % 3 == 1 else 0.0)
    run_virtually(sim.run(), limit=3000)
    history = lineage(tmp_path / "history", 1, 8)
    assert [entry["batch"] for entry in history] == list(range(1, 9))


def test_no_runners_for_an_hour(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("explorer.batch_timeout=1600",))

    async def late() -> None:
        await asyncio.sleep(3600)
        await sim.make_runner().run()

    run_virtually(sim.run(runners=late), limit=10_000)
    assert sim.learners[0].steps == [1, 2, 3, 4, 5, 6]
    assert not any(values.get("rollout/slices/cancelled") for _, values in sim.reports)


@pytest.mark.parametrize("after", [round(0.15 * n, 2) for n in range(1, 24)])
def test_trainer_killed_between_any_two_events_and_resumed(tmp_path: Path, after: float) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=2", "synchronizer.sync_timeout=5"), batches=5, step_seconds=0.3)

    run_virtually(sim.run(trainer=kill_and_replace_trainer(sim, after)), limit=3000)
    trainer = sim.trainer.loop
    assert trainer.progress == 5
    history = lineage(tmp_path / "history", trainer.generation, 5)
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len({entry["ticket"] for entry in history}) == 5
    assert len(set(uids)) == len(uids) == 20
    assert [label for label, _ in sim.values("eval/held/version/min")].count(5) == 1
    assert sim.engine.served == sorted(sim.engine.served)


@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven", "fully_async"])
@virtually
async def test_a_finished_run_goes_on_when_it_is_started_again_with_more_batches(tmp_path: Path, style: str) -> None:
    settings = (f"synchronizer.sync_style={style}", "synchronizer.sync_interval=2")
    first = Simulation(tmp_path, settings, batches=3)
    more = Simulation(tmp_path, settings, batches=7, broker=first.broker)
    await first.run()
    await asyncio.sleep(60.0)
    await more.run()
    entries = lineage(tmp_path / "history", more.trainer.loop.generation, 7)
    assert sorted(entry["batch"] for entry in entries) == list(range(1, 8))
    assert [entry["progress"] for entry in entries] == list(range(1, 8))
    assert first.evaluated_steps()[-1] == 3
    assert more.evaluated_steps()[-1] == 7
    assert more.state().finished
    assert (more.trainer.loop.finished, more.trainer.loop.progress) == (True, 7)


@virtually
async def test_a_finished_run_that_is_started_again_as_it_was_has_nothing_to_do(tmp_path: Path) -> None:
    first = Simulation(tmp_path, batches=2)
    again = Simulation(tmp_path, batches=2, broker=first.broker)
    await first.run()
    await asyncio.sleep(60.0)
    await again.run()
    assert again.learners[0].steps == []
    assert again.state().opened == 2
