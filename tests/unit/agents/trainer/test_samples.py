from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.unit.agents.world import experience
from trinity_agents.trainer.batch_result import TrainSamples, chosen
from trinity_mq.experience import ExperienceBatch
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLog, SampleLogReader


def batch(tasks: int, runs: int) -> ExperienceBatch:
    return ExperienceBatch.of([experience(task, run) for task in range(tasks) for run in range(runs)])


def test_whole_groups_are_kept_and_the_same_for_the_same_step() -> None:
    every = batch(6, 4)
    found = chosen(every, 8, 3)
    assert found == chosen(every, 8, 3)
    assert len(found) == 8
    tids = every.ids("tid")
    for tid in {tids[number] for number in found}:
        assert sum(tids[number] == tid for number in found) == 4
    assert len({tuple(chosen(every, 8, seed)) for seed in range(10)}) > 1, "not always the same tasks"


def test_a_group_that_is_larger_than_wanted_is_kept_whole() -> None:
    assert len(chosen(batch(3, 9), 4, 0)) == 9


async def test_they_are_read_again(tmp_path: Path) -> None:
    samples, every = TrainSamples(tmp_path, 4, 2**20), batch(2, 2)
    await samples.keep(7, [every, batch(0, 0)])
    samples.close()
    [record] = SampleLogReader(tmp_path / SAMPLES_FOLDER).read()
    assert record.step == 7
    assert ExperienceBatch.decode(record.body) == every


async def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    await TrainSamples(tmp_path, 0, 2**20).keep(1, [batch(2, 2)])
    assert not (tmp_path / SAMPLES_FOLDER).exists()


async def test_a_full_disk_ends_the_samples_and_not_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(self: SampleLog, step: int, body: bytes) -> None:
        tries.append(step)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SampleLog, "append", full)
    samples = TrainSamples(tmp_path, 4, 2**20)
    await samples.keep(1, [batch(2, 2)])
    await samples.keep(2, [batch(2, 2)])
    assert tries == [1]
