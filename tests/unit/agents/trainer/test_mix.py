"""Expert answers beside rollouts: a fixed number a step, each once an epoch wherever the trainer is killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.agents.trainer.lives import begun_at, lived
from trinity_agents.simulation import Simulation
from trinity_agents.trainer.history import lineage
from trinity_agents.trainer.sources.mix import MixSource, experts_per_step
from trinity_agents.trainer.sources.records import Records, RecordSource
from trinity_mq.config import ExperienceBufferConfig
from trinity_mq.experience import Experience
from trinity_mq.testing.fakes import FakeLearner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import find_checkpoints

EXPERTS = {"solved": {"storage_type": "synthetic", "path": "max3", "schema_type": "sft"}}
MIX = (
    "algorithm={algorithm_type: mix, repeat_times: 2}",
    f"buffer.trainer_input.auxiliary_buffers={json.dumps(EXPERTS)}",
    "trainer.save_interval=3",
)
COUNT = 7


def experts(size: int) -> RecordSource:
    def rows(indexes: Sequence[int]) -> tuple[list[Experience], dict[str, float]]:
        return [Experience(tokens=[0, index], prompt_length=1, index=index) for index in indexes], {}

    data = ExperienceBufferConfig(storage_type="file", path="x", schema_type="sft", selector="sequential")
    return RecordSource(data, Records(COUNT, "numbers", rows), seed=0, size=size, batches=1 << 40)


class Remembering(FakeLearner):
    """Notes the experts of each step."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.experts: dict[int, list[int]] = {}
        self.rollouts: dict[int, int] = {}

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        marked = [one for one in experiences if one.info.get("is_expert")]
        experts = [one.index or 0 for one in marked]
        assert self.experts.setdefault(step_number, experts) == experts, "a step made again has the same ones"
        self.rollouts[step_number] = len(experiences) - len(marked)
        return await super().step(experiences, step_number)


def mixed(folder: Path, seed: int | None = None, **options: Any) -> tuple[Simulation, Remembering]:
    """Run with a trainer that is killed behind checkpoints, at moments drawn with ``seed``; None: never."""
    sim, learner = Simulation(folder, MIX, batches=9, **options), Remembering()

    def trainer() -> Any:
        made = sim.make_trainer(learner=learner)
        source = made.loop.source
        made.loop.source = MixSource(source, experts(experts_per_step(sim.config)))
        return made

    async def run() -> None:
        if seed is None:
            await trainer().run()
        else:
            await lived(sim, trainer, seed)

    run_virtually(sim.run(trainer=run), limit=5000)
    return sim, learner


def test_every_step_has_the_same_number_and_the_rollouts_pace(tmp_path: Path) -> None:
    sim, learner = mixed(tmp_path)
    assert experts_per_step(sim.config) == 1, "a fifth of a step with four rollouts"
    assert learner.rollouts == dict.fromkeys(range(1, 10), 4)
    assert [learner.experts[step] for step in range(1, 10)] == [[n % COUNT] for n in range(9)]
    newest = find_checkpoints(tmp_path / "checkpoints")[0][0].state
    uids = [uid for entry in lineage(tmp_path / "history", newest.generation, 9) for uid in entry["uids"]]
    assert len(set(uids)) == len(uids) == 9 * 5


def test_killed_anywhere_each_expert_comes_once_an_epoch(tmp_path: Path) -> None:
    for seed in range(5):
        sim, learner = mixed(tmp_path / str(seed), seed)
        first, *again = begun_at(sim)
        assert first is None
        assert all(again), f"each life goes on from a checkpoint, not from {again}"
        trained = [learner.experts[step] for step in sorted(learner.experts)]
        assert trained == [[n % COUNT] for n in range(9)]


def test_a_batch_without_rollouts_takes_none(tmp_path: Path) -> None:
    def spoil(task_slice: Any) -> str | None:
        return "failed" if task_slice.batch in {2, 5} else None

    _, learner = mixed(tmp_path, spoil=spoil)
    assert Counter(index for step in learner.experts.values() for index in step) == Counter(range(COUNT))
