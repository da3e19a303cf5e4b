"""Mode explore: what is rolled out is written once, wherever the trainer that writes it is killed; weights stay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from trinity_agents.simulation import Simulation, killed
from trinity_agents.trainer.recorder import RecordingLearner
from trinity_mq.experience import Experience
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually

EXPLORE = ("mode=explore", "trainer.save_interval=3")


class MemorySink:
    """Keeps what was written, as files do."""

    def __init__(self) -> None:
        self.title = "memory"
        self.batches: dict[int, list[str]] = {}
        self.writes = 0

    def write(self, batch: int, experiences: Sequence[Experience]) -> None:
        found = [one.eid.rid for one in experiences]
        assert self.batches.get(batch, found) == found, "written again it is the same"
        self.batches[batch] = found
        self.writes += 1

    def close(self) -> None:
        """Nothing to close."""


class Slow(RecordingLearner):
    """Takes a second to write a batch, in which it may be killed."""

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        await asyncio.sleep(0.5)
        metrics = await super().step(experiences, step_number)
        await asyncio.sleep(0.5)
        return metrics


def explored(folder: Path, lives: Sequence[float]) -> tuple[Simulation, MemorySink]:
    sim, sink = Simulation(folder, EXPLORE, batches=9), MemorySink()

    async def trainer() -> None:
        for seconds in lives:
            life = asyncio.create_task(sim.make_trainer(learner=Slow(FakeLearner(), sink)).run())  # type: ignore[arg-type]
            await asyncio.sleep(seconds)
            await killed(life)
        await sim.make_trainer(learner=Slow(FakeLearner(), sink)).run()  # type: ignore[arg-type]

    run_virtually(sim.run(trainer=trainer), limit=5000)
    return sim, sink


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_wherever_it_is_killed_every_batch_is_written_once_and_the_engines_keep_their_weights(
    tmp_path: Path, seed: int | None
) -> None:
    dice = random.Random(seed)
    sim, sink = explored(tmp_path, [] if seed is None else [dice.uniform(0.2, 2.5) for _ in range(3)])
    assert sorted(sink.batches) == list(range(1, 10))
    assert all(len(set(runs)) == len(runs) == 4 for runs in sink.batches.values())
    assert {version[1] for version in sim.engine.served} == {0}, "one version, that of the model it began with"
    assert not (tmp_path / "final").exists()
    assert max(value for _, value in sim.values("sample/staleness/max")) == 0
    if seed is None:
        assert sink.writes == 9
        assert dict(sim.values("output/experiences")) == dict.fromkeys(range(1, 10), 4.0)
