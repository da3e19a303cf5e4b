"""A batch that operators could not do, repaired and given back (``trinity-mq dead replay``): trained on once with a
later batch if it is fresh enough, else counted; whole runs on MemoryBus in virtual time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.experience import Experience
from trinity_mq.messages import BatchReady, Progress
from trinity_mq.operations.dead_letters import republish_batches
from trinity_mq.operators import ExperienceOperatorV1
from trinity_mq.operators.base import Processed
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually

BROKEN = 2
CHAIN = f'operator.operators=[{{"name": "{__name__}.Choosy"}}]'
BATCHES = 8


class Choosy(ExperienceOperatorV1):
    """Fails on one batch until it is repaired."""

    repaired = False

    async def process(self, exps: list[Experience]) -> Processed:
        if exps[0].eid.batch == BROKEN and not self.repaired:
            raise ArithmeticError("not this one")
        return exps, {}


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    Choosy.repaired = False
    with capture_logs() as found:
        yield found


def a_run(folder: Path, *overrides: str, batches: int = BATCHES) -> Simulation:
    return Simulation(
        folder, (CHAIN, "broker.delivery_limit=2", "trainer.save_interval=1", *overrides), batches=batches
    )


async def replayed(sim: Simulation, after: int = BROKEN) -> None:
    """Repair the operator and give the batch back once so many batches are progress."""
    await until(lambda: bool(sim.trainers) and sim.trainer.loop.progress >= after)
    Choosy.repaired = True
    bus = await sim.client()
    given, trouble, _ = await republish_batches(bus, sim.topology, {str(BROKEN)})
    assert (len(given), trouble) == (1, [])
    await bus.close()


def history(sim: Simulation, batches: int = BATCHES) -> list[dict[str, Any]]:
    return lineage(sim.folder / "history", sim.trainer.loop.generation, batches)


def repaired_lines(sim: Simulation, batches: int = BATCHES) -> list[dict[str, Any]]:
    return [entry for entry in history(sim, batches) if entry.get("repaired")]


def trained_uids(sim: Simulation) -> Counter[str]:
    return Counter(uid for entry in history(sim) for uid in entry["uids"])


FRESH = "synchronizer.max_staleness=9"


@pytest.mark.parametrize("after", [BROKEN, BROKEN + 3])
def test_fresh_enough_it_is_trained_on_once_and_costs_no_step(tmp_path: Path, after: int) -> None:
    sim = a_run(tmp_path, FRESH)
    run_virtually(sim.run(beside=lambda: replayed(sim, after)), limit=1000)
    assert {one.batch: one.outcome for one in sim.published(Progress)} == {
        batch: "failed" if batch == BROKEN else "trained" for batch in range(1, BATCHES + 1)
    }
    (line,) = repaired_lines(sim)
    assert (line["batch"], line["outcome"], len(line["uids"])) == (BROKEN, "trained", 4)
    assert line["progress"] > after
    assert set(trained_uids(sim).values()) == {1}
    assert len(trained_uids(sim)) == 4 * BATCHES
    assert sim.trainer.loop.step == sum(len(learner.steps) for learner in sim.learners) == BATCHES - 1
    assert sim.values("sample/repaired_batches") == [(line["progress"], 1.0)]
    assert dict(sim.values("sample/experiences"))[line["progress"]] == 8.0
    assert dict(sim.values("sample/staleness/max"))[line["progress"]] >= after - BROKEN
    assert sim.dead_letters() == []


def test_too_old_it_is_counted_and_never_trained_on(tmp_path: Path) -> None:
    sim = a_run(tmp_path, "synchronizer.sync_offset=0", "synchronizer.max_staleness=1")
    run_virtually(sim.run(beside=lambda: replayed(sim, BROKEN + 3)), limit=1000)
    (line,) = repaired_lines(sim)
    assert (line["batch"], line["outcome"], line["uids"]) == (BROKEN, "dropped", [])
    assert dict(sim.values("sample/dropped_stale_groups"))[line["progress"]] == 2.0
    assert sim.values("sample/repaired_batches") == [(line["progress"], 0.0)]
    assert len(trained_uids(sim)) == 4 * (BATCHES - 1)
    assert all(one.outcome == "trained" for one in sim.published(Progress) if one.batch != BROKEN), "the others are not"


class Slow(FakeLearner):
    def __init__(self) -> None:
        super().__init__(0.7)


@pytest.mark.parametrize("save_interval", [1, 3])
@pytest.mark.parametrize("life", [1.1, 1.5, 2.2, 3.7])
def test_a_trainer_that_is_killed_over_and_over_trains_on_it_once(
    tmp_path: Path, life: float, save_interval: int
) -> None:
    sim = a_run(
        tmp_path,
        FRESH,
        f"trainer.save_interval={save_interval}",
        "synchronizer.sync_offset=1",
        "explorer.max_consecutive_empty=8",
    )
    lives = 0

    async def trainers() -> None:
        nonlocal lives
        while True:
            lives += 1
            one = asyncio.get_running_loop().create_task(sim.make_trainer(learner=Slow()).run())
            await asyncio.wait([one], timeout=life * lives)
            if not await killed(one):
                return

    run_virtually(sim.run(trainer=trainers, beside=lambda: replayed(sim)), limit=1000)
    assert lives > 1
    (line,) = repaired_lines(sim)
    assert line["batch"] == BROKEN
    assert set(trained_uids(sim).values()) == {1}
    # killed in the very step in which it is trained on, it is given up: told, and in a dead letter
    given_up = {entry["ticket"] for entry in history(sim) if entry["outcome"] == "skipped"}
    assert line["outcome"] == ("skipped" if line["ticket"] in given_up else "trained")
    assert {letter["ticket"] for letter in sim.dead_letters()} == given_up
    assert len(trained_uids(sim)) == 4 * (BATCHES - len(given_up))


class DiesOnSize(FakeLearner):
    """Does not survive a step with more than one batch."""

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        if len(experiences) > 4:
            raise RuntimeError("killed by this batch")
        return await super().step(experiences, step_number)


def test_one_that_kills_the_trainer_is_given_up_and_the_batch_it_came_with_is_not(tmp_path: Path) -> None:
    sim = a_run(tmp_path, FRESH)

    async def trainers() -> None:
        with pytest.raises(ExceptionGroup):
            await sim.make_trainer(learner=DiesOnSize(0.5)).run()
        await sim.make_trainer(learner=DiesOnSize(0.5)).run()

    run_virtually(sim.run(trainer=trainers, beside=lambda: replayed(sim)), limit=1000)
    (line,) = repaired_lines(sim)
    assert (line["batch"], line["outcome"], line["uids"]) == (BROKEN, "skipped", [])
    (letter,) = sim.dead_letters()
    assert letter["ticket"] == line["ticket"]
    assert letter["batch"] == BROKEN
    assert "did not survive 1 start on" in str(letter["dead-reason"])
    assert len(trained_uids(sim)) == 4 * (BATCHES - 1)
    assert sim.trainer.loop.step == BATCHES - 1


class DiesOnBatch(FakeLearner):
    """Does not survive a step on one batch until what is wrong with it is repaired."""

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        if not Choosy.repaired and any(one.eid.batch == BROKEN for one in experiences):
            raise MemoryError
        return await super().step(experiences, step_number)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_batch_that_trainers_did_not_survive_can_be_replayed(tmp_path: Path, restarted: bool) -> None:
    """Restarted: from a checkpoint before all of this, by a trainer that finds both sets on the stream."""
    sim = Simulation(tmp_path, (FRESH, "trainer.save_interval=50"), batches=BATCHES)
    Choosy.repaired = False

    async def trainers() -> None:
        for _ in range(2):
            with pytest.raises(ExceptionGroup):
                await sim.make_trainer(learner=DiesOnBatch(0.5)).run()
        if restarted:
            third = asyncio.get_running_loop().create_task(sim.make_trainer(learner=DiesOnBatch(0.5)).run())
            await until(lambda: len(sets()) == 2)
            await killed(third)
        await sim.make_trainer(learner=DiesOnBatch(0.5)).run()

    def sets() -> set[str]:
        return {one.op for one in sim.published(BatchReady) if one.batch == BROKEN}

    run_virtually(sim.run(trainer=trainers, beside=lambda: replayed(sim)), limit=1000)
    assert [letter["kind"] for letter in sim.dead_letters()] == ["batch_ready"] * restarted
    assert len(sets()) == 2, "what was published again is a set of its own"
    (line,) = repaired_lines(sim)
    assert (line["batch"], line["outcome"], len(line["uids"])) == (BROKEN, "trained", 4)
    assert [entry["outcome"] for entry in history(sim) if entry["batch"] == BROKEN] == ["skipped", "trained"]
    assert set(trained_uids(sim).values()) == {1}
    assert len(trained_uids(sim)) == 4 * BATCHES


def test_with_no_batch_after_it_it_is_said_that_it_was_not_used(tmp_path: Path, logs: list[Any]) -> None:
    sim = a_run(tmp_path, FRESH, batches=BROKEN)
    run_virtually(sim.run(beside=lambda: replayed(sim)), limit=1000)
    assert repaired_lines(sim, BROKEN) == []
    assert sim.values("sample/unused_repaired_batches") == [(BROKEN, 1.0)]
    (said,) = (entry for entry in logs if entry["event"] == "repaired_batches_unused")
    assert said["batches"] == [BROKEN]
