"""A step that kills the trainer costs what kills, and not its company: other batches, replayed groups, experts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_agents.trainer.batch_result import train_on
from trinity_agents.trainer.sources.base import Source
from trinity_agents.trainer.sources.mix import MixSource
from trinity_agents.trainer.sources.records import Records, RecordSource
from trinity_agents.trainer.sources.replay import ReplaySource
from trinity_agents.trainer.sources.stream import StreamSource
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import ExperienceBufferConfig, load_config
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.messages import BatchReady
from trinity_mq.runtime.deliveries import EXPERIENCES, envelope
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import StepAttempts

TOPOLOGY = Topology("r")
BATCHES = 8
REPLAY = {"name": "r", "model": {"tiny": {}}, "buffer": {"batch_size": 2, "trainer_input": {"replay": {"share": 0.7}}}}
CONFIG = load_config(REPLAY | {"algorithm": {"algorithm_type": "grpo", "repeat_times": 2}})


class Dies(BaseException):
    """SIGKILL in a step."""


class Learner:
    """Dies of a step that the test names by its groups; notes those that it survives."""

    def __init__(self, kills: Callable[[list[str]], bool]) -> None:
        self._kills = kills
        self.steps: list[list[str]] = []

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        groups = list(dict.fromkeys(ExperienceBatch.of(experiences).ids("tid")))
        if self._kills(groups):
            raise Dies
        self.steps.append(groups)
        return {"actor/optimizer_steps": 1.0}


class Trainers:
    """Lives of a trainer on one stream and in one folder; each begins at the last checkpoint."""

    def __init__(
        self,
        folder: Path,
        kills: Callable[[list[str]], bool],
        *,
        wrap: Callable[[StreamSource], Source] = lambda stream: stream,
        interval: int = 1,
        **options: Any,
    ) -> None:
        self._folder, self._wrap, self._interval, self._options = folder, wrap, interval, options
        self._broker, self.learner = MemoryBroker(), Learner(kills)
        self.outcomes: dict[int, str] = {}
        self.order: list[list[int]] = []
        """Batches of the steps that the last life made or skipped."""
        self.deaths = 0

    def run(self) -> dict[int, str]:
        """Return the outcome of each batch."""
        run_virtually(self._lives(), limit=1e5)
        return self.outcomes

    def bus(self) -> MemoryBus:
        return MemoryBus(self._broker, TOPOLOGY, config=BrokerConfig())

    async def _publish(self) -> None:
        bus, exchange = self.bus(), TOPOLOGY.exchange("ready")
        await bus.connect()
        await bus.declare(*TOPOLOGY.durable)
        for batch in range(1, BATCHES + 1):
            headers: dict[str, Any] = {"ticket": f"t{batch}", "op": "o", "n": 0, "batch": batch}
            body = Experience.serialize_many([one(batch, task, run) for task in range(2) for run in range(2)])
            chunk = Envelope(body=body, kind="experience_chunk", content_type=EXPERIENCES, headers=headers)
            await bus.publish(exchange, "x", chunk)
            ready = BatchReady(batch=batch, ticket=f"t{batch}", op="o", chunks=1, experiences=4)
            await bus.publish(exchange, "x", envelope(ready))

    async def _lives(self) -> None:
        await self._publish()
        saved = json.dumps(None)
        while sum(map(len, self.order)) < BATCHES:
            saved = await self._live(saved)
            assert self.deaths < 20, f"it dies again and again: {self.outcomes}"

    async def _live(self, saved: str) -> str:
        attempts, bus = StepAttempts(self._folder), self.bus()
        await bus.connect()
        source = self._wrap(StreamSource(bus, TOPOLOGY, "trainer-0", starts=attempts.starts, **self._options))
        state = json.loads(saved)
        if state is not None:
            source.restore(state["source"])
        self.order = [] if state is None else state["order"]
        reading = asyncio.create_task(source.run())
        learner: Any = self.learner
        try:
            while sum(map(len, self.order)) < BATCHES:
                batch = await source.next()
                await train_on(batch, 0, learner=learner, attempts=attempts, max_staleness=1 << 30)
                source.consumed()
                step = batch.parts
                self.outcomes |= {part.batch: part.result.outcome for part in step if part.result is not None}
                self.order.append([part.batch for part in step])
                if len(self.order) % self._interval == 0:
                    saved = json.dumps({"source": source.state(), "order": self.order})
        except Dies:
            self.deaths += 1
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return saved


def one(batch: int, task: int, run: int) -> Experience:
    return Experience(
        eid=EID(batch=batch, task=task, run=run),
        tokens=torch.tensor([3, 4]),
        prompt_length=1,
        logprobs=torch.zeros(1),
        reward=float(run),
        advantages=torch.tensor([run - 0.5]),
    )


def of_batch(*batches: int) -> Callable[[list[str]], bool]:
    return lambda groups: any(group.startswith(f"{batch}/") for group in groups for batch in batches)


def skipped(outcomes: dict[int, str]) -> list[int]:
    assert sorted(outcomes) == list(range(1, BATCHES + 1))
    return sorted(batch for batch, outcome in outcomes.items() if outcome != "trained")


def replaying(stream: StreamSource) -> Source:
    return ReplaySource(stream, CONFIG)


def mixing(stream: StreamSource) -> Source:
    def rows(indexes: Sequence[int]) -> tuple[list[Experience], dict[str, float]]:
        return [Experience(tokens=[3, 4], prompt_length=1, index=index) for index in indexes], {}

    data = ExperienceBufferConfig(storage_type="file", path="x", schema_type="sft", selector="sequential")
    return MixSource(stream, RecordSource(data, Records(100, "numbers", rows), seed=0, size=1, batches=1 << 40))


@pytest.mark.parametrize("interval", [1, 3, 100])
@pytest.mark.parametrize("in_batch_order", [True, False])
@pytest.mark.parametrize("deadly", [[3], [2, 3], [4, 5], [1, 8]])
def test_of_several_batches_in_a_step_only_those_that_kill_are_skipped(
    tmp_path: Path, deadly: list[int], in_batch_order: bool, interval: int
) -> None:
    trainers = Trainers(
        tmp_path, of_batch(*deadly), interval=interval, batches_per_step=4, in_batch_order=in_batch_order
    )
    assert skipped(trainers.run()) == deadly
    assert [batch for step in trainers.order for batch in step] == list(range(1, BATCHES + 1)), "in their order"
    assert all(len({(batch - 1) // 4 for batch in step}) == 1 for step in trainers.order), "steps end where they did"


def test_a_step_that_was_killed_once_is_made_of_the_same_batches_again(tmp_path: Path) -> None:
    lives: list[list[str]] = []

    def kills(groups: list[str]) -> bool:
        lives.append(groups)
        return len(lives) == 2

    trainers = Trainers(tmp_path, kills, wrap=replaying, batches_per_step=4)
    assert skipped(trainers.run()) == []
    assert trainers.order == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert lives[1] == lives[2]
    assert len(lives[1]) > 8, "groups are replayed too"


def test_a_batch_that_kills_is_not_replayed_and_groups_beside_it_are(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, of_batch(3), wrap=replaying)
    assert skipped(trainers.run()) == [3]
    assert trainers.deaths == 3, "twice with company and once alone"
    after = trainers.learner.steps[2]
    assert {"4/0", "4/1"} < set(after)
    assert {group.partition("/")[0] for group in after} == {"1", "2", "4"}, "what was beside it is replayed again"


@pytest.mark.parametrize("interval", [1, 100])
def test_a_group_that_kills_when_it_is_replayed_is_forgotten_and_every_batch_trained_on(
    tmp_path: Path, interval: int
) -> None:
    def kills(groups: list[str]) -> bool:
        return "2/1" in groups and groups[0] != "2/0"

    trainers = Trainers(tmp_path, kills, wrap=replaying, interval=interval)
    assert skipped(trainers.run()) == []
    assert trainers.deaths == 2
    assert any(len(groups) > 2 for groups in trainers.learner.steps[-3:]), "others are replayed"


def test_experts_that_kill_are_passed_over_and_every_batch_trained_on(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, lambda groups: any("expert-2" in group for group in groups), wrap=mixing)
    assert skipped(trainers.run()) == []
    experts = [group.rpartition("-")[2] for groups in trainers.learner.steps for group in groups if "expert" in group]
    assert experts == ["0", "1", "3", "4", "5", "6", "7"]


def test_experts_beside_a_batch_that_kills_come_with_the_next_one(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, of_batch(3), wrap=mixing)
    assert skipped(trainers.run()) == [3]
    experts = [group.rpartition("-")[2] for groups in trainers.learner.steps for group in groups if "expert" in group]
    assert experts == ["0", "1", "2", "3", "4", "5", "6"]
