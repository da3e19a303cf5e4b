"""Several batches to a train step: whole runs on MemoryBus in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity_agents.operator.chain_run import ChainRun
from trinity_agents.simulation import Simulation, kill_and_replace_trainer
from trinity_agents.trainer.history import lineage
from trinity_mq.messages import BatchClosed, Progress
from trinity_mq.testing.virtual_time import run_virtually

TWO = "trainer.batches_per_step=2"
WORLDS = [
    ("synchronizer.sync_interval=2", "synchronizer.sync_offset=0"),
    ("synchronizer.sync_interval=2", "synchronizer.sync_offset=1"),
    ("synchronizer.sync_interval=4", "synchronizer.sync_offset=0"),
    ("synchronizer.sync_style=trainer_driven", "synchronizer.pipeline_depth=1"),
    ("synchronizer.sync_style=explorer_driven", "synchronizer.pipeline_depth=1", "synchronizer.sync_interval=1"),
    ("synchronizer.sync_style=fully_async", "synchronizer.pipeline_depth=3", "synchronizer.sync_interval=2"),
]


@pytest.mark.parametrize("settings", WORLDS, ids=str)
@pytest.mark.parametrize("batches", [1, 6, 7])
def test_two_batches_make_a_step_and_the_last_takes_what_is_left(
    tmp_path: Path, settings: tuple[str, ...], batches: int
) -> None:
    sim = Simulation(tmp_path, (TWO, *settings), batches=batches)
    run_virtually(sim.run(), limit=1000)
    steps = -(-batches // 2)
    assert (sim.trainer.loop.progress, sim.config.train_steps) == (batches, steps)
    assert sim.learners[-1].steps == list(range(1, steps + 1))
    assert sim.engine.served[-1] == (1, steps), "the final weights are served"
    assert [(one.progress, one.step) for one in sim.published(Progress)] == [
        (number, (number + 1) // 2) for number in range(1, batches + 1)
    ], "each batch is progress, of the step that it was part of"
    history = lineage(tmp_path / "history", 1, batches)
    assert {entry["batch"] for entry in history} == set(range(1, batches + 1))
    assert [entry["step"] for entry in history] == [(number + 1) // 2 for number in range(1, batches + 1)]
    assert len({uid for entry in history for uid in entry["uids"]}) == 4 * batches


@pytest.mark.parametrize("after", [round(0.4 * n, 2) for n in range(1, 10)])
@pytest.mark.parametrize("settings", [WORLDS[0], WORLDS[3]], ids=str)
def test_a_trainer_killed_in_between_takes_the_same_batches_together_again(
    tmp_path: Path, settings: tuple[str, ...], after: float
) -> None:
    overrides = (TWO, "trainer.save_interval=2", "synchronizer.sync_timeout=5", *settings)
    sim = Simulation(tmp_path, overrides, batches=5, step_seconds=0.3)

    run_virtually(sim.run(trainer=kill_and_replace_trainer(sim, after)), limit=3000)
    history = lineage(tmp_path / "history", sim.trainer.loop.generation, 5)
    assert [entry["progress"] for entry in history] == [1, 2, 3, 4, 5]
    assert [entry["step"] for entry in history] == [1, 1, 2, 2, 3]
    uids = [uid for entry in history for uid in entry["uids"]]
    assert len(set(uids)) == len(uids) == 20


def test_a_failed_batch_is_progress_and_its_neighbour_is_a_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ChainRun.process

    async def failing(self: ChainRun, manifest: BatchClosed, parts: Any) -> Any:
        if manifest.batch in {2, 5, 6}:
            raise ValueError("not this one")
        return await process(self, manifest, parts)

    monkeypatch.setattr(ChainRun, "process", failing)
    sim = Simulation(tmp_path, (TWO, *WORLDS[0]), batches=6)
    run_virtually(sim.run(), limit=3000)
    found = [(one.batch, one.outcome, one.step) for one in sim.published(Progress)]
    assert found == [
        (1, "trained", 1),
        (2, "failed", 1),
        (3, "trained", 2),
        (4, "trained", 2),
        (5, "failed", 2),
        (6, "failed", 2),
    ]
    assert sim.learners[-1].steps == [1, 2]
