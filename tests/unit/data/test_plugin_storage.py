"""A storage of the user's own, in one file: tasks and training data are read from it, and experiences are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import ConfigError, ExplorerOutputConfig, TasksetConfig, load_config
from trinity_mq.config.buffer import ExperienceBufferConfig
from trinity_mq.data import TasksetError, open_taskset
from trinity_mq.data.records import read_records
from trinity_mq.data.storage import SinkError, open_output
from trinity_mq.experience import EID, Experience
from trinity_mq.runtime.plugins import UnknownNameError

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
