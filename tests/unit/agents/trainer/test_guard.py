"""A trainer whose guard stops the training: the batch is kept, for a look and for the next start."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.agents.trainer.test_trainer import outcomes
from tests.unit.agents.world import failure, leaf
from trinity_agents.simulation import Simulation
from trinity_agents.trainer.history import lineage
from trinity_mq.cli.main import main
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.messages import Progress
from trinity_mq.models import ensure_model_folder
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import StepAttempts
from trinity_mq.training.guard import TrainingStopped
from trinity_mq.training.learner import TorchLearner


class Faulty(TorchLearner):
    """Finds advantages that are no numbers in the batches named, as a broken estimator would leave them."""

    faulty: Sequence[int] = ()

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        given = list(experiences)
        for one in given:
            if one.eid.batch in self.faulty:
                one.advantages = torch.full((one.response_length,), math.nan)
        return await super().step(given, step_number)

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [0.0] * (len(tokens) - 1)  # what the fake engine answers


FOUND_FAULTY = (3, 4, 5, 6, 7, 8)
"""Batches with the fault: the training stops at the seventh, the fifth of them."""


@pytest.mark.parametrize("save_interval", [1, 2, 50])
def test_the_batch_at_which_the_training_stops_is_trained_after_a_restart_and_once(
    tmp_path: Path, save_interval: int, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"trainer.save_interval={save_interval}", "synchronizer.max_staleness=9")
    sim = Simulation(tmp_path, overrides, batches=10)
    model = ensure_model_folder(sim.config.model, tmp_path / "model", 0)
    errors: list[str] = []

    def learner(faulty: Sequence[int]) -> Any:
        made = Faulty(sim.config, model, 10)
        made.faulty = faulty
        return made

    async def trainers() -> None:
        for _ in range(4):  # more than the starts after which a batch that kills trainers is skipped
            with pytest.raises(ExceptionGroup) as caught:
                await sim.make_trainer(learner=learner(FOUND_FAULTY)).run()
            errors.append(str(leaf(caught.value, TrainingStopped)))
            assert sim.trainer.loop.progress == 6
            await asyncio.sleep(1)
        await sim.make_trainer(learner=learner(FOUND_FAULTY[:4])).run()

    run_virtually(sim.run(trainer=trainers), limit=10_000)
    assert outcomes(sim) == {n: "skipped" if n in FOUND_FAULTY[:4] else "trained" for n in range(1, 11)}
    assert sim.dead_letters() == []

    history = lineage(tmp_path / "history", sim.trainer.loop.generation, 10)
    assert [entry["progress"] for entry in history] == list(range(1, 11))
    assert [entry["outcome"] for entry in history] == [outcomes(sim)[n] for n in range(1, 11)]
    assert [entry["step"] for entry in history] == [1, 2, 2, 2, 2, 2, 3, 4, 5, 6]
    uids = Counter(uid for entry in history for uid in entry["uids"])
    assert set(uids.values()) == {1}
    assert len(uids) == 6 * 4
    told = Counter((one.generation, one.batch) for one in sim.published(Progress))
    assert all(count == 1 for count in told.values())
    assert {batch for generation, batch in told if generation <= 4} <= set(range(1, 7))
    (ticket,) = (entry["ticket"] for entry in history if entry["batch"] == 7)
    assert StepAttempts(tmp_path / "checkpoints").starts(ticket) == 0

    assert len(errors) == 4
    file = tmp_path / "stopped" / "batch-7.tmqx"
    assert "5 optimizer steps in a row were skipped (nonfinite_loss 5)" in errors[0]
    assert "Batch 7 is not counted: the next start of the trainer reads it again" in errors[0]
    command = f"trinity-mq inspect {file} --tokenizer {model}"
    assert f"`{command}`" in errors[0]
    kept = ExperienceBatch.decode(file.read_bytes())
    assert sorted(kept.ids("uid")) == sorted(uid for entry in history for uid in entry["uids"] if entry["batch"] == 7)
    assert list(file.parent.iterdir()) == [file]
    capsys.readouterr()
    assert main([*command.split()[1:], "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["uid"] for one in shown] == kept.ids("uid")


def test_a_disk_without_room_does_not_hide_why_the_training_stopped(tmp_path: Path) -> None:
    sim = Simulation(tmp_path, ("trainer.guard.max_consecutive_skips=1",), batches=2)
    model = ensure_model_folder(sim.config.model, tmp_path / "model", 0)
    (tmp_path / "stopped").write_text("no folder")

    async def trainer() -> None:
        learner: Any = Faulty(sim.config, model, 2)
        learner.faulty = (1,)
        await sim.make_trainer(learner=learner).run()

    text = str(failure(sim.run(trainer=trainer), TrainingStopped, limit=1000))
    assert "1 optimizer steps in a row were skipped" in text
    assert "could not be written" in text
