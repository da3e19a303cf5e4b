"""The checkpoints that mode bench evaluates, and what is wrong where there are none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.training.checkpoints.benchmarked import FIRST_MODEL, checksums, select_checkpoints
from trinity_mq.training.checkpoints.checkpoint import CheckpointError, CheckpointStore, TrainerProgress

SETS = [{"name": "held-out", "storage_type": "synthetic", "path": "max3"}]


def config(folder: Path, bench: dict[str, Any] | None = None, **settings: Any) -> Config:
    return load_config(
        {
            "name": "x",
            "mode": "bench",
            "run_dir": str(folder / "run"),
            "model": {"tiny": {}},
            "buffer": {"eval_tasksets": SETS},
            "bench": bench or {},
            **settings,
        }
    )


def save(folder: Path, *progress: int) -> None:
    """Save checkpoints as a trainer does."""
    store = CheckpointStore(folder / "run" / "checkpoints", 9)
    generation = store.next_generation()

    async def write(into: Path) -> str:
        (into / "weights").write_text("w")
        return f"sum of {into.name}"

    for one in progress:
        state = TrainerProgress(generation=generation, step=one, progress=one, source={})
        asyncio.run(store.save(write, state))


def test_all_of_them_in_order_after_the_first_model(tmp_path: Path) -> None:
    save(tmp_path, 5, 20, 100)
    found = select_checkpoints(config(tmp_path))
    assert list(found) == [0, 5, 20, 100]
    assert found[0] is None
    assert found[20] is not None
    assert found[20].path.name == "progress-000020"
    assert list(select_checkpoints(config(tmp_path, explorer={"eval_on_startup": False}))) == [5, 20, 100]
    assert checksums(config(tmp_path))[0] == FIRST_MODEL
    assert len(set(checksums(config(tmp_path)).values())) == 4


@pytest.mark.parametrize(
    ("wanted", "labels"), [("latest", [100]), ([100, 5], [5, 100]), ([0], [0]), ([0, 20], [0, 20])]
)
def test_some_of_them(tmp_path: Path, wanted: Any, labels: list[int]) -> None:
    save(tmp_path, 5, 20, 100)
    assert list(select_checkpoints(config(tmp_path, {"checkpoints": wanted}))) == labels


def test_what_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint to evaluate in .*run/checkpoints: give the folder"):
        select_checkpoints(config(tmp_path))
    save(tmp_path, 5, 20)
    missing = r"bench\.checkpoints: 7 not among the checkpoints in .*, which are 5, 20"
    with pytest.raises(CheckpointError, match=missing):
        select_checkpoints(config(tmp_path, {"checkpoints": [5, 7]}))
    (tmp_path / "run" / "checkpoints" / "progress-000005" / "weights").unlink()
    assert list(select_checkpoints(config(tmp_path))) == [0, 20]
    with pytest.raises(CheckpointError, match="progress-000005 is damaged"):
        select_checkpoints(config(tmp_path, {"checkpoints": [5]}))


def test_an_evaluation_is_a_run_of_its_own_beside_the_one_it_evaluates(tmp_path: Path) -> None:
    found = config(tmp_path)
    assert (found.name, found.path, found.bench.run) == ("x-bench", tmp_path / "run-bench", str(tmp_path / "run"))
    again = load_config(found.model_dump())
    assert (again.name, again.path, again.bench.run) == (found.name, found.path, found.bench.run)
    given = config(tmp_path, {"run": "elsewhere"})
    assert (given.name, given.path, given.bench.run) == ("x", tmp_path / "run", "elsewhere")
    assert len(config(tmp_path, name="n" * 40).name) == 40


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"buffer": {}}, "mode is bench and buffer.eval_tasksets is empty"),
        ({"trainer": {"nproc": 2}}, "trainer.nproc is 2 in mode bench"),
        ({"bench": {"checkpoints": [-1]}}, "bench.checkpoints"),
        ({"bench": {"checkpoints": "newest"}}, "bench.checkpoints"),
        ({"bench": 5}, "bench"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, **settings) if "bench" not in settings else load_config(
            {"mode": "bench", "model": {"tiny": {}}, "buffer": {"eval_tasksets": SETS}, **settings}
        )
