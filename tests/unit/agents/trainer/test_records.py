"""Training on records: positions that survive kills, records that cannot be used, and a real trainer in mode train."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.simulation import killed
from trinity_agents.trainer.agent import Trainer
from trinity_agents.trainer.history import lineage
from trinity_agents.trainer.sources.records import Records, RecordSource, open_records
from trinity_mq.bus import Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.data.errors import TasksetError
from trinity_mq.engines.generation.text import TextCodec
from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.models import ensure_model_folder
from trinity_mq.runtime.process import is_run_over
from trinity_mq.telemetry import MetricsWriter, read_metrics
from trinity_mq.testing.fakes import FakeChannel, FakeLearner
from trinity_mq.testing.virtual_time import run_virtually
from trinity_mq.training.checkpoints.checkpoint import find_checkpoints

SFT = {
    "name": "sft",
    "mode": "train",
    "model": {"tiny": {}, "max_model_len": 16, "max_prompt_tokens": 8, "max_response_tokens": 4},
    "algorithm": {"algorithm_type": "sft"},
    "trainer": {"save_interval": 3},
}


def config_of(folder: Path, data: dict[str, Any], *overrides: str, **buffer: Any) -> Config:
    experience_buffer = {"name": "rows", "storage_type": "file", "schema_type": "sft", **data}
    sections = {**SFT, "buffer": {**buffer, "trainer_input": {"experience_buffer": experience_buffer}}}
    return load_config({**sections, "run_dir": str(folder / "run")}, overrides)


def numbered(config: Config, count: int) -> RecordSource:
    """Return a source of experiences whose one response token is their index."""

    def rows(indexes: Any) -> tuple[list[Experience], dict[str, float]]:
        return [Experience(tokens=[0, index], prompt_length=1) for index in indexes], {}

    buffer = config.buffer
    return RecordSource(
        buffer.trainer_input.experience_buffer,
        Records(count, "numbers", rows),
        seed=config.seed,
        size=buffer.batch_size,
        batches=buffer.total_steps,
        epochs=buffer.total_epochs,
    )


def seen(batch: Any) -> list[int]:
    return [int(one.tokens[-1]) for one in batch.experiences]


def codec_of(config: Config) -> TextCodec:
    return TextCodec.load(ensure_model_folder(config.model, config.path / "model", 0))


async def test_records_that_cannot_be_used_are_counted_and_the_others_are_trained_on(tmp_path: Path) -> None:
    rows = [
        {"question": "1=", "answer": "1"},
        {"question": "2=", "answer": "\u00e9"},
        {"question": "3=", "answer": "3"},
    ]
    rows += [{"question": "4=", "answer": "4" * 30}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(tmp_path, {"path": str(tmp_path / "rows.jsonl")}, batch_size=4, total_steps=1)
    batch = await open_records(config, codec_of(config)).next()
    assert sorted(one.index or 0 for one in batch.experiences) == [0, 2]
    assert batch.metrics == {"data/unfit_records": 1.0, "data/too_long": 1.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "1=", "answer": "\u00e9"}, "none of the first 1 records of .* can be used; record 0 the text"),
        ({"question": "1=", "answer": "4" * 30}, "does not fit into model.max_model_len 16"),
        ({"prompt": "1=", "answer": "4"}, "has nothing at 'question'.*set format.prompt_key"),
    ],
)
def test_data_of_which_nothing_can_be_used_end_the_start(tmp_path: Path, row: dict[str, str], said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = config_of(tmp_path, {"path": str(tmp_path / "rows.jsonl")}, total_steps=1)
    with pytest.raises(TasksetError, match=said):
        open_records(config, codec_of(config))


async def test_experiences_that_were_recorded_are_read_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "recorded"
    folder.mkdir()
    for number in range(3):
        one = Experience(tokens=[1, 2, number], prompt_length=1, logprobs=[-0.5, -0.5], advantages=[1.0, 1.0])
        (folder / f"batch-{number}.tmqx").write_bytes(ExperienceBatch.of([one]).encode())
    data = {"path": str(folder), "schema_type": "experience", "selector": "sequential"}
    config = config_of(tmp_path, data, "algorithm={algorithm_type: grpo}", batch_size=2, total_epochs=1)
    source = open_records(config, codec_of(config))
    assert seen(await source.next()) == [0, 1]
    source.consumed()
    assert seen(await source.next()) == [2]
    assert source.ended == 2
    (folder / "batch-1.tmqx").write_bytes(b"rubbish")
    with pytest.raises(TasksetError, match=r"batch-1.tmqx holds no experiences.*convert-experiences"):
        open_records(config, codec_of(config))
    empty = config_of(tmp_path, {**data, "path": str(tmp_path / "run")}, "algorithm={algorithm_type: grpo}")
    with pytest.raises(TasksetError, match=r"holds no .tmqx file"):
        open_records(empty, codec_of(config))


RECORDS = [f"{key}={json.dumps(value)}" for key, value in SFT.items()] + [
    'buffer.trainer_input.experience_buffer={"storage_type": "file", "schema_type": "sft", "path": "x"}'
]
REPLAY = ["buffer.trainer_input.replay.share=0.34"]
EXPERTS = {"solved": {"storage_type": "synthetic", "path": "max3", "schema_type": "sft"}}
MIX = [
    "algorithm={algorithm_type: mix, repeat_times: 2}",
    f"buffer.trainer_input.auxiliary_buffers={json.dumps(EXPERTS)}",
]
TWO = ["trainer.batches_per_step=2"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([*RECORDS, "buffer.trainer_input={}"], "mode is train and .*storage_type stream"),
        ([*RECORDS, "mode=both"], "storage_type is file and mode both"),
        ([*RECORDS, *TWO], "trainer.batches_per_step is 2 in mode train"),
        (
            [*RECORDS, "algorithm.algorithm_type=grpo"],
            "schema_type is sft, and algorithm_type grpo has no loss for it.*sft_is",
        ),
        ([*RECORDS, "buffer.trainer_input.experience_buffer.path=''"], "needs a path"),
        (
            [*RECORDS, "buffer.trainer_input.experience_buffer.storage_type=stream"],
            "schema_type is sft and storage_type stream",
        ),
        (
            [*RECORDS, "buffer.trainer_input.experience_buffer={storage_type: synthetic, path: ops3}"],
            "schema_type experience reads .tmqx files",
        ),
        ([*REPLAY, "mode=explore"], "replay.share is 0.34 in mode explore, and only rollouts that are trained on"),
        (
            [*REPLAY, "algorithm.algorithm_type=gpg"],
            "algorithm_type gpg does not compare the policy with the policy that sampled",
        ),
        ([*REPLAY, "algorithm.anchor=old"], "data may be 16 train steps old"),
        (["buffer.trainer_input.replay.share=1"], "buffer.trainer_input.replay.share: "),
        ([*REPLAY, "buffer.trainer_input.replay.decay=.inf"], "buffer.trainer_input.replay.decay: "),
        ([*MIX, "algorithm.algorithm_type=grpo"], "algorithm_type grpo imitates nothing: take mix or mix_chord"),
        ([*MIX, "mode=explore"], "in mode explore, and experts are added to rollouts"),
        ([*MIX, "buffer.trainer_input.auxiliary_buffers.solved.schema_type=dpo"], "'solved' has schema_type dpo"),
        (
            [*MIX, "buffer.trainer_input.auxiliary_buffers.more={storage_type: file, path: x, schema_type: sft}"],
            "solved, more, wanted at most one",
        ),
        ([*TWO, "synchronizer.sync_interval=3"], "does not divide synchronizer.sync_interval 3"),
        ([*TWO, "synchronizer.sync_style=fully_async", "synchronizer.pipeline_depth=0"], "Raise pipeline_depth to 1"),
    ],
    ids=str,
)
def test_settings_of_training_data_that_contradict_each_other_say_so(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"model": {"tiny": {}}}, settings)


class Remembering(FakeLearner):
    """Notes what it was given, step by step."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.seen: dict[int, list[int]] = {}

    async def step(self, experiences: Any, step_number: int) -> dict[str, float]:
        self.seen[step_number] = [int(one.tokens[-1]) for one in experiences]
        return await super().step(experiences, step_number)


def test_a_trainer_that_is_killed_again_and_again_trains_on_what_one_left_alone_does(tmp_path: Path) -> None:
    def trainer(config: Config, broker: MemoryBroker, learner: Remembering) -> Trainer:
        topology = Topology.of(config)
        return Trainer(
            config,
            bus=MemoryBus(broker, topology, config=config.broker),
            topology=topology,
            agent_id="trainer-0",
            learner=learner,
            channel=FakeChannel(),
            metrics=MetricsWriter(config.path, "trainer", "trainer-0", tensorboard=False),
            source=numbered(config, 10),
        )

    async def trained(config: Config, lives: list[float]) -> Remembering:
        broker, learner = MemoryBroker(), Remembering()
        for seconds in lives:
            life = asyncio.create_task(trainer(config, broker, learner).run())
            await asyncio.sleep(seconds)
            assert await killed(life)
        await trainer(config, broker, learner).run()
        return learner

    whole, cut = (config_of(tmp_path / name, {"path": "x"}, batch_size=4, total_epochs=3) for name in ("whole", "cut"))
    wanted = run_virtually(trained(whole, []))
    found = run_virtually(trained(cut, [2.4, 3.7, 0.5, 4.9]))
    assert wanted.seen == found.seen
    assert sorted(index for batch in wanted.seen.values() for index in batch) == sorted([*range(10)] * 3)
    assert is_run_over(cut.path)
    newest = find_checkpoints(cut.path / "checkpoints")[0][0]
    assert newest.state.progress == 8
    entries = lineage(cut.path / "history", newest.state.generation, 8)
    assert [entry["outcome"] for entry in entries] == ["trained"] * 8
    assert len({newest.state.run_id, None}) == 2
    assert max(line["step"] for line in read_metrics(cut.path / "metrics.jsonl")) == 8

    async def again() -> None:
        learner = Remembering()
        await trainer(cut, MemoryBroker(), learner).run()
        assert learner.seen == {}, "a run that is over has nothing left to do"

    run_virtually(again())
