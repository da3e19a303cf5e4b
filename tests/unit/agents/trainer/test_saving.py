"""Checkpoints that are written while training goes on, in whole runs on MemoryBus in virtual time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.agents.trainer.test_trainer import checkpoints
from tests.unit.agents.world import failure
from trinity_agents.simulation import Simulation, killed, until
from trinity_agents.trainer.history import lineage
from trinity_mq.launch.earlier_start import rewind_to_checkpoint
from trinity_mq.messages import Progress
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import CheckpointError, Writer, choose, find_by_name, find_checkpoints

WRITE_SECONDS = 20.0
KEPT = ("trainer.save_interval=2", "trainer.max_checkpoints_to_keep=9")


class Slow(FakeLearner):
    """Copies in no time, and writes for long. Notes when it does what."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(0.1)
        self.done: list[str] = []
        self.writing = 0
        self._fails_at = fails_at

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        self.done.append(f"step {step_number}")
        return await super().step(experiences, step_number)

    async def stage(self) -> Writer:
        self.done.append("copied")
        return self.save

    async def save(self, folder: Path) -> None:
        assert not self.writing, "two checkpoints were being written"
        self.writing += 1
        (folder / "weights").write_text("half")
        await asyncio.sleep(WRITE_SECONDS)
        if self._fails_at is not None and len(self.steps) >= self._fails_at:
            raise OSError(28, "No space left on device")
        (folder / "weights").write_text("whole")
        self.writing -= 1
        self.done.append("written")


def saved_lines(folder: Path, generation: int = 1) -> list[int]:
    lines = (folder / "history" / f"{generation}.jsonl").read_text().splitlines()
    return [json.loads(line)["saved"] for line in lines if '"saved"' in line]


async def with_trainer(sim: Simulation, learner: FakeLearner) -> None:
    await sim.make_trainer(learner=learner).run()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=4", "trainer.max_checkpoints_to_keep=9"), batches=6)
    learner = Slow()
    seen: list[tuple[list[int], list[int]]] = []

    async def look() -> None:
        await until(lambda: learner.writing == 1)
        assert "step 5" not in learner.done
        await until(lambda: "step 6" in learner.done)
        seen.append((checkpoints(tmp_path), saved_lines(tmp_path)))

    run_virtually(sim.run(trainer=lambda: with_trainer(sim, learner), beside=look), limit=1000)
    assert seen == [([], [])], "nothing that depends on a checkpoint was done before it was committed"
    assert checkpoints(tmp_path) == saved_lines(tmp_path) == [4, 6]
    assert [one for one in learner.done if not one.startswith("step")] == ["copied", "written"] * 2
    assert learner.done.index("step 6") < learner.done.index("written")
    blocked, written = (dict(sim.values(f"time/{name}")) for name in ("save", "write_checkpoint"))
    assert max(blocked.values()) < 1.0
    assert written == {4: pytest.approx(WRITE_SECONDS, abs=1.0), 6: pytest.approx(WRITE_SECONDS, abs=1.0)}


WAITS = ["step 1", "copied", "step 2", "written", "copied", "step 3", "written", "copied", "step 4"]


@pytest.mark.parametrize(
    ("settings", "saved", "done"),
    [
        ((), [1, 2, 3, 4], WAITS),
        (("trainer.async_save=false",), [1, 2, 3, 4], ["step 1", "written", "step 2", "written", "step 3", "written"]),
        (
            ("trainer.save_interval=2", "trainer.keep_every=3", "trainer.max_checkpoints_to_keep=1"),
            [3, 4],
            ["step 1", "step 2", "copied", "step 3", "written", "copied", "step 4"],
        ),
    ],
    ids=["in the background", "training waits", "at each multiple that stays"],
)
def test_the_next_checkpoint_waits_for_the_one_before(
    tmp_path: Path, settings: tuple[str, ...], saved: list[int], done: list[str]
) -> None:
    settings = ("trainer.save_interval=1", "trainer.max_checkpoints_to_keep=9", *settings)
    sim, learner = Simulation(tmp_path, settings, batches=4), Slow()
    run_virtually(sim.run(trainer=lambda: with_trainer(sim, learner)), limit=1000)
    assert checkpoints(tmp_path) == saved
    assert set(saved) <= set(saved_lines(tmp_path))
    assert learner.done[: len(done)] == done
    if "trainer.async_save=false" in settings:
        assert dict(sim.values("time/save"))[2] == pytest.approx(WRITE_SECONDS, abs=1.0)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_checkpoint_that_cannot_be_written_ends_the_trainer_with_the_same_error(
    tmp_path: Path, in_background: bool
) -> None:
    settings = ("trainer.save_interval=2", f"trainer.async_save={in_background}")
    sim = Simulation(tmp_path, settings, batches=6)
    learner = Slow(fails_at=4)
    text = str(failure(sim.run(trainer=lambda: with_trainer(sim, learner)), CheckpointError, limit=1000))
    assert "cannot save progress-00000" in text
    assert "No space left on device" in text
    assert checkpoints(tmp_path) == saved_lines(tmp_path), "what was committed before is whole"
    assert not list((tmp_path / "checkpoints").glob(".partial-*"))


@pytest.mark.parametrize("after", [0.0, 5.0, 19.9])
def test_killed_while_a_checkpoint_is_written_it_goes_on_from_the_one_before(tmp_path: Path, after: float) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=2", "synchronizer.sync_offset=4"), batches=8)
    learner = Slow()

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer(learner=learner).run())
        await until(lambda: checkpoints(tmp_path) == [2] and learner.writing == 1)
        await asyncio.sleep(after)
        sim.broker.drop(sim.trainer.bus, delay=None)  # type: ignore[arg-type]  # no last words
        assert await killed(first)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[1].steps[0] == 3
    entries = lineage(tmp_path / "history", 2, 8)
    uids = [uid for entry in entries for uid in entry["uids"]]
    assert [entry["batch"] for entry in entries] == list(range(1, 9))
    assert len(uids) == len(set(uids)) == 8 * 4
    assert len(sim.published(Progress)) >= 8


def test_one_that_is_asked_to_end_writes_what_it_has(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.save_interval=3", "synchronizer.sync_offset=9"), batches=9)
    learner = Slow()

    async def trainer() -> None:
        first = asyncio.get_running_loop().create_task(sim.make_trainer(learner=learner).run())
        await until(lambda: learner.writing == 1 and "step 4" in learner.done)
        sim.trainer.drain()
        await first
        assert checkpoints(tmp_path) == saved_lines(tmp_path) == [3, sim.trainer.loop.progress]
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[1].steps[0] == learner.steps[-1] + 1


# -- going back to a named one


@pytest.mark.parametrize("died", [False, True], ids=["", "killed before its first checkpoint"])
def test_a_trainer_goes_on_from_the_checkpoint_that_was_chosen(tmp_path: Path, died: bool) -> None:
    sim = Simulation(tmp_path, (*KEPT, "synchronizer.sync_offset=4"), batches=8)

    async def trainer() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(sim.make_trainer().run())
        await until(lambda: checkpoints(tmp_path) == [2, 4, 6])
        await killed(first)
        choose(tmp_path / "checkpoints", find_by_name(tmp_path / "checkpoints", "step-2"))
        if died:
            again = loop.create_task(sim.make_trainer().run())
            await until(lambda: bool(sim.trainer.loop.source.available()))
            await killed(again)
        await sim.make_trainer().run()

    run_virtually(sim.run(trainer=trainer), limit=1000)
    assert sim.learners[-1].steps == [3, 4, 5, 6, 7, 8]
    newest = find_checkpoints(tmp_path / "checkpoints")[0][0]
    assert (newest.state.generation, newest.state.progress) == (3 if died else 2, 8)
    entries = lineage(tmp_path / "history", newest.state.generation, 8)
    assert [entry["batch"] for entry in entries] == list(range(1, 9))
    assert len({uid for entry in entries for uid in entry["uids"]}) == 8 * 4


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_finished_run_goes_back_and_finishes_again(tmp_path: Path, is_damaged: bool) -> None:
    sim = Simulation(tmp_path, (*KEPT, f"run_dir={tmp_path}"), batches=8)
    run_virtually(sim.run(), limit=1000)
    assert sim.evaluated_steps() == [0, 2, 4, 6, 8]
    assert rewind_to_checkpoint(sim.config, "progress-4") == [
        "resumes from progress-000004; up to 4 later batches are trained on again"
    ]
    (tmp_path / "finished").unlink()
    again = Simulation(tmp_path, (*KEPT, f"run_dir={tmp_path}"), batches=8, broker=sim.broker)
    if is_damaged:
        (tmp_path / "checkpoints" / "progress-000004" / "weights").write_text("nine")
        text = str(failure(again.run(), CheckpointError, limit=1000))
        assert "progress-000004: weights has the checksum" in text, "nothing takes the place of a chosen checkpoint"
        assert "choose another checkpoint than progress-000004 with `trinity-mq run --from`" in text
        assert again.learners[-1].steps == []
        return
    run_virtually(again.run(), limit=1000)
    assert again.learners[-1].steps == [5, 6, 7, 8]
    assert again.evaluated_steps() == [8], "the weights at the end may be others"
    assert again.explorer.exploration.state.opened == 8, "no further batch was made"  # type: ignore[union-attr]
    assert len(lineage(tmp_path / "history", 2, 8)) == 8
