"""What becomes of one batch."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity_agents.trainer.batch_result import StepResult, TrainSamples, chosen, drop_stale_groups, staleness, train_on
from trinity_agents.trainer.decisions import MAX_STARTS
from trinity_agents.trainer.sources.base import BatchResult, Source, TrainBatch
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
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLog, SampleLogReader
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import StepAttempts


class Learner:
    """Keeps what it was given."""

    def __init__(self, attempts: StepAttempts, optimizer_steps: float = 1.0, critic_steps: float = 0.0) -> None:
        self.attempts, self.optimizer_steps, self.critic_steps = attempts, optimizer_steps, critic_steps
        self.given: list[list[tuple[int | str, int]]] = []
        self.noted: list[int] = []
        self.more: dict[str, float] = {}

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        self.given.append([(one.eid.task, step_number) for one in experiences])
        self.noted.append(self.attempts.starts("t"))
        steps = {"actor/optimizer_steps": self.optimizer_steps, "critic/optimizer_steps": self.critic_steps}
        return steps | self.more


def batch(*steps: int, state: str = "ready") -> TrainBatch:
    """A batch of one experience a task, each sampled by the weights of one of these steps."""
    experiences = [
        Experience(
            eid=EID(batch=1, task=task, run=0),
            tokens=torch.tensor([3, 4], dtype=torch.int32),
            prompt_length=1,
            logprobs=torch.zeros(1),
            versions=[(0, 1, step)],
        )
        for task, step in enumerate(steps)
    ]
    return TrainBatch(1, "t", "o", state, ExperienceBatch.of(experiences), reason="why")  # type: ignore[arg-type]


async def judged(
    folder: Path, one: TrainBatch, learner: Learner | None = None
) -> tuple[BatchResult, StepResult, Learner]:
    folder.mkdir(exist_ok=True)
    attempts = StepAttempts(folder) if learner is None else learner.attempts
    learner = learner or Learner(attempts)
    result = await train_on(one, 5, learner=learner, attempts=attempts, max_staleness=2)  # type: ignore[arg-type]
    assert one.result is not None
    return one.result, result, learner


async def test_what_is_fit_is_trained_on_and_the_rest_told(tmp_path: Path) -> None:
    one = batch(5, 2, 3)
    verdict, step, learner = await judged(tmp_path, one)
    assert (verdict.outcome, verdict.reason, verdict.stale_tasks, verdict.kills) == ("trained", None, [1], False)
    assert learner.given == [[(0, 6), (2, 6)]]
    assert [e.eid.task for e in one.experiences] == [0, 2], "what was trained on is what is left"
    assert step.metrics["sample/dropped_stale_groups"] == 1.0
    assert learner.noted == [1], "noted before the step"
    assert learner.attempts.starts("t") == 0, "and forgotten after it"


@pytest.mark.parametrize("state", ["ready", "empty", "failed", "gone"])
async def test_nothing_fit_is_no_step(tmp_path: Path, state: str) -> None:
    verdict, _, learner = await judged(tmp_path, batch(2, 1) if state == "ready" else batch(state=state))
    assert learner.given == []
    if state == "ready":
        assert (verdict.outcome, verdict.stale_tasks) == ("dropped", [0, 1])
    else:
        assert (verdict.outcome, verdict.reason) == (state, "why")


async def test_the_tasks_of_groups_that_are_too_old_are_told_once_each_if_they_have_a_number(tmp_path: Path) -> None:
    experiences = batch(5, 0, 0, 1).experiences.to_list()
    for experience, (task, run) in zip(experiences, [(7, 0), (7, 1), (0, 0), ("by name", 0)], strict=True):
        experience.eid.task, experience.eid.run = task, run
    verdict, _, _ = await judged(tmp_path, TrainBatch(1, "t", "o", "ready", ExperienceBatch.of(experiences)))
    assert (verdict.outcome, verdict.stale_tasks, verdict.dropped) == ("dropped", [0, 7], 4)


@pytest.mark.parametrize(
    ("skipped", "outcome", "reason"),
    [
        ({}, "skipped", "no optimizer step was possible"),
        ({"empty": 2.0, "mismatch": 0.0}, "empty", "no token to train on"),
        (
            {"empty": 1.0, "mismatch": 1.0, "nonfinite_loss": 2.0},
            "skipped",
            "the guard let no optimizer step through (mismatch, nonfinite_loss)",
        ),
    ],
)
async def test_a_batch_without_a_token_is_empty_and_one_that_the_guard_refused_is_not(
    tmp_path: Path, skipped: dict[str, float], outcome: str, reason: str
) -> None:
    learner = Learner(StepAttempts(tmp_path), 0.0)
    learner.more = {f"actor/skipped_{name}": count for name, count in skipped.items()}
    verdict, _, _ = await judged(tmp_path, batch(5), learner)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


async def test_a_step_of_the_critic_alone_is_trained_on_and_makes_no_version(tmp_path: Path) -> None:
    verdict, step, _ = await judged(tmp_path, batch(5), Learner(StepAttempts(tmp_path), 0.0, 1.0))
    assert (verdict.outcome, verdict.reason, step.stepped) == ("trained", None, False)
    assert step.metrics["sample/skipped_step"] == 0.0  # the critic stepped: nothing is lost


async def test_what_trainers_did_not_survive_is_left_alone_and_stays_on_record(tmp_path: Path) -> None:
    attempts = StepAttempts(tmp_path)
    for _ in range(MAX_STARTS):
        attempts.begin(["t"])
    verdict, _, learner = await judged(tmp_path, batch(5), Learner(attempts))
    assert (verdict.outcome, verdict.kills, learner.given) == ("skipped", True, [])
    assert attempts.starts("t") == MAX_STARTS


async def test_batches_are_joined_and_selected_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A train step's batches may be gigabytes: half a second without a heartbeat was seen."""
    threads: list[int] = []
    for name in ("columns", "select"):
        method = getattr(ExperienceBatch, name)

        def noted(self: ExperienceBatch, *arguments: Any, method: Any = method) -> Any:
            threads.append(threading.get_ident())
            return method(self, *arguments)

        monkeypatch.setattr(ExperienceBatch, name, noted)
    one = batch(5, 4)
    one.others = [batch(4, 5)]
    verdict, _, learner = await judged(tmp_path, one)
    assert (verdict.outcome, len(learner.given[0])) == ("trained", 4)
    assert len(threads) >= 4, "two batches are joined, and what is left of each is selected"
    assert threading.get_ident() not in threads


# -- stale data goes by whole groups


def aged(task: int, run: int, *steps: int) -> Experience:
    """An experience whose tokens were sampled at these steps, one token each."""
    return Experience(
        eid=EID(batch=1, task=task, run=run),
        tokens=[3, *range(4, 4 + max(1, len(steps)))],
        prompt_length=1,
        logprobs=[0.0] * max(1, len(steps)),
        versions=[(n, 1, step) for n, step in enumerate(steps)] or None,
    )


@pytest.mark.parametrize(("steps", "age"), [((5, 3, 4), 3), ((9,), 0), ((), 0)])
def test_the_oldest_token_decides_and_nothing_is_younger_than_zero(steps: tuple[int, ...], age: int) -> None:
    assert staleness(aged(0, 0, *steps).versions, 6) == age


def fresh_of(experiences: list[Experience], step: int, limit: int) -> tuple[ExperienceBatch, dict[str, float]]:
    return drop_stale_groups([TrainBatch(1, "t", "o", "ready", ExperienceBatch.of(experiences))], step, limit)


def test_one_old_run_takes_its_whole_group_along_and_no_other() -> None:
    kept, metrics = fresh_of([aged(0, 0, 4), aged(0, 1, 1, 4), aged(1, 0, 3), aged(1, 1, 4)], 4, 2)
    assert [(e.eid.task, e.eid.run) for e in kept] == [(1, 0), (1, 1)]
    assert metrics == {
        "sample/dropped_stale_groups": 1.0,
        "sample/dropped_stale_experiences": 2.0,
        "sample/experiences": 2.0,
        "sample/staleness/mean": 0.5,
        "sample/staleness/max": 1.0,
        "sample/staleness/groups/mean": 1.0,
    }
    kept, metrics = fresh_of([aged(0, 0, 0)], 4, 3)
    assert (len(kept), metrics["sample/experiences"], "sample/staleness/max" in metrics) == (0, 0.0, False)


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12),
    now=st.integers(0, 9),
    limit=st.integers(0, 5),
)
def test_what_is_kept_is_fit_and_what_is_dropped_has_an_unfit_one_in_its_group(
    steps: list[tuple[int, int]], now: int, limit: int
) -> None:
    experiences = [aged(task, run, step) for run, (task, step) in enumerate(steps)]
    kept, metrics = fresh_of(experiences, now, limit)
    assert metrics["sample/experiences"] + metrics["sample/dropped_stale_experiences"] == len(experiences)
    unfit = {e.eid.task for e in experiences if staleness(e.versions, now) > limit}
    assert {e.eid.run for e in kept} == {e.eid.run for e in experiences if e.eid.task not in unfit}


# -- samples of what is trained on


def every(tasks: int, runs: int) -> ExperienceBatch:
    return ExperienceBatch.of([aged(task, run) for task in range(tasks) for run in range(runs)])


def test_whole_groups_are_kept_and_the_same_for_the_same_step() -> None:
    rows, tids = chosen(every(6, 4), 8, 3), every(6, 4).ids("tid")
    assert rows == chosen(every(6, 4), 8, 3)
    assert sorted(Counter(tids[row] for row in rows).values()) == [4, 4]
    assert len({tuple(chosen(every(6, 4), 8, seed)) for seed in range(10)}) > 1, "not always the same tasks"
    assert len(chosen(every(3, 9), 4, 0)) == 9, "a group that is larger than wanted is kept whole"


@pytest.mark.parametrize("count", [4, 0])
async def test_samples_are_read_again_and_none_are_kept_where_none_are_wanted(tmp_path: Path, count: int) -> None:
    samples, kept = TrainSamples(tmp_path, count, 2**20), every(2, 2)
    await samples.keep(7, [kept, every(0, 0)])
    samples.close()
    assert (tmp_path / SAMPLES_FOLDER).exists() == bool(count)
    records = SampleLogReader(tmp_path / SAMPLES_FOLDER).read() if count else []
    assert [(one.step, ExperienceBatch.decode(one.body)) for one in records] == [(7, kept)] * bool(count)


async def test_a_full_disk_ends_the_samples_and_not_the_trainer(tmp_path: Path) -> None:
    (tmp_path / SAMPLES_FOLDER).mkdir()
    samples = TrainSamples(tmp_path, 4, 2**20)
    with mock.patch.object(SampleLog, "append", side_effect=OSError(errno.ENOSPC, "No space left")) as append:
        await samples.keep(1, [every(2, 2)])
        await samples.keep(2, [every(2, 2)])
    assert append.call_count == 1


# -- a step that kills the trainer costs what kills, and not its company


TOPOLOGY = Topology("r")
BATCHES = 8
REPLAY = {"name": "r", "model": {"tiny": {}}, "buffer": {"batch_size": 2, "trainer_input": {"replay": {"share": 0.7}}}}
CONFIG = load_config(REPLAY | {"algorithm": {"algorithm_type": "grpo", "repeat_times": 2}})


class Dies(BaseException):
    """SIGKILL in a step."""


class DyingLearner:
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
        self._broker, self.learner = MemoryBroker(), DyingLearner(kills)
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
            body = Experience.serialize_many([an_experience(batch, task, run) for task in range(2) for run in range(2)])
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


def an_experience(batch: int, task: int, run: int) -> Experience:
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
