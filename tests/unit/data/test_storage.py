"""Sinks hold each batch once however often it is written; a storage of the user's own, in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import ConfigError, ExplorerOutputConfig, TasksetConfig, load_config
from trinity_mq.config.buffer import ExperienceBufferConfig
from trinity_mq.data import TasksetError, open_taskset
from trinity_mq.data.records import read_records
from trinity_mq.data.storage import ExperienceSink, SinkError, open_output
from trinity_mq.experience import EID, Experience, ExperienceBatch, from_hf_datasets
from trinity_mq.runtime.plugins import UnknownNameError


def experiences(batch: int, count: int, reward: float = 1.0) -> list[Experience]:
    return [
        Experience(
            eid=EID(batch, task, suffix="x"),
            tokens=[1, 2, 3],
            prompt_length=1,
            logprobs=[-0.25, -0.5],
            advantages=[reward, reward],
            reward=reward,
            response_text="é",
            taskset="train",
            index=task,
        )
        for task in range(count)
    ]


def rewards(folder: Path, kind: str) -> dict[str, list[float]]:
    """Return the rewards by batch, as a reader of each kind finds them."""
    files = sorted((folder / "out").iterdir())
    if kind == "jsonl":
        return {file.stem[-1]: [json.loads(line)["reward"] for line in file.read_text().splitlines()] for file in files}
    if kind == "parquet":
        from pyarrow import parquet

        rows = {file.stem[-1]: from_hf_datasets(parquet.read_table(file).to_pylist()) for file in files}
    else:
        rows = {file.stem[-1]: ExperienceBatch.decode(file.read_bytes()).to_shared_list() for file in files}
    assert all(one.response_text == "é" and one.advantages is not None for batch in rows.values() for one in batch)
    return {batch: [one.reward or 0.0 for one in members] for batch, members in rows.items()}


def sink_of(folder: Path, kind: Any) -> ExperienceSink:
    return open_output(ExplorerOutputConfig(storage_type=kind, path=str(folder / "out")), folder)


@pytest.mark.parametrize("kind", ["body", "jsonl", "parquet"])
def test_a_batch_that_is_written_again_is_there_once(tmp_path: Path, kind: str) -> None:
    sink = sink_of(tmp_path, kind)
    sink.write(1, experiences(1, 2))
    sink.write(2, experiences(2, 1))
    sink.close()
    again = sink_of(tmp_path, kind)  # a process that was killed before its checkpoint
    again.write(2, experiences(2, 1))
    again.write(3, experiences(3, 3, 0.5))
    again.close()
    assert rewards(tmp_path, kind) == {"1": [1.0, 1.0], "2": [1.0], "3": [0.5] * 3}


def test_rows_show_what_a_dataset_is_filtered_by_and_the_default_is_a_folder_of_the_run(tmp_path: Path) -> None:
    sink_of(tmp_path, "jsonl").write(1, experiences(1, 1))
    row = json.loads((tmp_path / "out" / "batch-000001.jsonl").read_text())
    assert (row["tokens"], row["logprobs"], row["prompt_length"]) == ([1, 2, 3], [-0.25, -0.5], 1)
    assert (row["taskset"], row["index"], row["batch"], row["response_text"]) == ("train", 0, "1", "é")
    open_output(ExplorerOutputConfig(), tmp_path).write(7, experiences(7, 1))
    assert [path.name for path in (tmp_path / "experiences").iterdir()] == ["batch-000007.tmqx"]


def test_what_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkError, match="cannot be made"):
        open_output(ExplorerOutputConfig(path=str(tmp_path / "file" / "out")), tmp_path)
    with pytest.raises(SinkError, match=r"table experiences of sqlite:.* cannot be used"):
        open_output(ExplorerOutputConfig(storage_type="sql", path="sqlite:////nowhere/at/all.db"), tmp_path)


SHELF = """
from pathlib import Path
from trinity_mq.data import Storage

class Shelf(Storage):
    def read(self, config, seed):
        sign = getattr(config, "dataset_args", {}).get("sign", "?")
        for number, line in enumerate(Path(config.path).read_text().splitlines()):
            yield f"{config.path}, line {number + 1}", {"question": line.strip() + sign, "answer": str(seed)}

    def open_output(self, config, run_folder):
        return Row(run_folder / "row.txt")

class Row:
    def __init__(self, path):
        self.title, self.path = str(path), path

    def write(self, batch, experiences):
        self.path.write_text(f"{batch}: {len(experiences)}")

    def close(self):
        pass

class Empty(Storage):
    pass
"""


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shelf_storage.py").write_text(SHELF)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasks.txt").write_text("3,7=\n1,2=\n")
    return tmp_path / "tasks.txt"


def test_a_storage_in_one_file_serves_tasks_training_data_and_experiences(tmp_path: Path, shelf: Path) -> None:
    name = "shelf_storage.Shelf"
    config = TasksetConfig(storage_type=name, path=str(shelf), selector="sequential", dataset_args={"sign": "!"})
    taskset = open_taskset(config, seed=5)
    tasks = [{"question": "3,7=!", "answer": "5"}, {"question": "1,2=!", "answer": "5"}]
    assert [body.raw_task for body in taskset.all_tasks()] == tasks
    data = ExperienceBufferConfig(storage_type=name, schema_type="sft", path=str(shelf), limit=1)
    assert read_records(data)[0] == [{"question": "3,7=?", "answer": "0"}]
    sink = open_output(ExplorerOutputConfig(storage_type=name), tmp_path)
    sink.write(3, [Experience(eid=EID(3, 0), tokens=[1, 2], prompt_length=1)])
    sink.close()
    assert (tmp_path / "row.txt").read_text() == "3: 1"


def test_what_a_storage_cannot_do_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TasksetError, match="holds no records"):
        read_records(TasksetConfig(storage_type="shelf_storage.Empty", path="x"))
    with pytest.raises(SinkError, match="stores no experiences"):
        open_output(ExplorerOutputConfig(storage_type="shelf_storage.Empty"), tmp_path)
    with pytest.raises(UnknownNameError, match=r"wanted a subclass of trinity_mq\.data\.storage\.Storage"):
        read_records(TasksetConfig(storage_type="shelf_storage.Row", path="x"))
    with pytest.raises(UnknownNameError, match="did you mean 'Shelf'"):
        read_records(TasksetConfig(storage_type="shelf_storage.Shel", path="x"))
    with pytest.raises(ConfigError, match="unknown storage 'fil'; wanted file, huggingface, sql, synthetic"):
        load_config({"name": "a", "model": {"tiny": {}}, "buffer": {"taskset": {"storage_type": "fil", "path": "x"}}})
