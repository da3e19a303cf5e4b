from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.errors import CommandError
from trinity_mq.targets.run_folder import RunFolder


def config(path: Path, **sections: Any) -> Config:
    return load_config({"name": "r", "run_dir": str(path), "model": {"tiny": {}}, **sections})


def test_the_resolved_configuration_is_what_agents_read(tmp_path: Path) -> None:
    given = config(tmp_path, seed=3, runner={"env": {"KEY": "a\\${b}"}}, broker={"url": "amqp://u:secret@h/"})
    folder = RunFolder(given)
    with folder.locked():
        assert folder.write_configuration() == []
    assert "secret" not in folder.config_file.read_text()
    read = load_config(folder.config_file)
    assert read.path == tmp_path
    assert read.model_copy(update={"broker": given.broker}) == given


def test_changes_are_told_except_of_places(tmp_path: Path) -> None:
    RunFolder(config(tmp_path)).write_configuration()
    changed = config(tmp_path, buffer={"total_steps": 7, "batch_size": 4}, broker={"url": "amqp://h/"})
    assert RunFolder(changed).changes() == ["buffer.batch_size: 32 -> 4", "buffer.total_steps: None -> 7"]
    assert RunFolder(changed).write_configuration() == ["buffer.batch_size: 32 -> 4", "buffer.total_steps: None -> 7"]
    assert RunFolder(changed).write_configuration() == []


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"tiny": {"hidden_size": 32}}}, "model.tiny.hidden_size: 64 -> 32"),
        ({"model": {"model_path": "/m"}}, "model.model_path: None -> '/m'"),
        ({"algorithm": {"repeat_times": 4}}, "algorithm.repeat_times: 8 -> 4"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"buffer": {"batch_size": 4}}, "buffer.batch_size: 32 -> 4"),
    ],
)
def test_what_checkpoints_and_the_order_of_tasks_depend_on_needs_another_run(
    tmp_path: Path, sections: dict[str, Any], key: str
) -> None:
    RunFolder(config(tmp_path)).write_configuration()
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"with another name .* or start over with --fresh") as caught:
        RunFolder(config(tmp_path, **sections)).write_configuration()
    assert key in str(caught.value)
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_an_old_configuration_may_lack_settings_and_is_named_if_it_is_unreadable(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    folder.write_configuration()
    data = yaml.safe_load(folder.config_file.read_text())
    del data["algorithm"]["entropy_decay"]
    folder.config_file.write_text(yaml.safe_dump(data))
    assert folder.write_configuration() == []
    folder.config_file.write_text("model: {no_such_key: 1}")
    with pytest.raises(ConfigError, match=r"remove it to continue\n.*config.yaml: model.no_such_key"):
        folder.write_configuration()
    below = RunFolder(config(folder.config_file / "run"))
    with pytest.raises(CommandError, match="cannot be used"), below.locked():
        pytest.fail("not locked")


def test_one_process_a_folder(tmp_path: Path) -> None:
    program = f"""
import fcntl, os, sys
fd = os.open({str(tmp_path / "lock")!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.write(fd, str(os.getpid()).encode())
print("locked", flush=True)
sys.stdin.read()
"""
    folder = RunFolder(config(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CommandError, match=f"in use by process {other.pid}"), folder.locked():
            pytest.fail("not locked")
        other.kill()
    with folder.locked():
        assert folder.holder() == os.getpid()
    assert folder.holder() is None


def test_finished_and_broker_marks(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    assert not folder.finished
    folder.mark_finished()
    assert folder.finished
    assert folder.saved_broker_url() is None
    folder.save_broker_url("amqp://u:p@h/")
    assert folder.saved_broker_url() == "amqp://u:p@h/"
    assert stat.S_IMODE((tmp_path / "broker.url").stat().st_mode) == 0o600
    folder.remove_broker_url()
    folder.remove_broker_url()
    assert folder.saved_broker_url() is None
