"""The run that a command is given: by its file, its folder or its name, with settings; while it runs and afterwards."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.config import Config, ConfigError, load_config
from trinity_mq.errors import CommandError
from trinity_mq.targets.connection import find_target
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.targets.target import load_target_configuration

CONFIG = "name: base\nmodel: {tiny: {}}\nbuffer: {total_steps: 4}\nbroker: {blob_store: /b}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration and the folder of a run that was named on the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRINITY_MQ_BROKER_URL", raising=False)
    (tmp_path / "c.yaml").write_text(CONFIG)
    folder = RunFolder(load_config("c.yaml", ["name=mine", "buffer.total_steps=5"]))
    with folder.locked():
        folder.write_configuration()
    (folder.path / "broker").mkdir()
    write_metrics(folder.path, *({"role": "trainer", "step": step, "time": 1000.0 + step} for step in range(1, 4)))
    return tmp_path


def write_metrics(folder: Path, *lines: dict[str, object]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def words(target: str, *overrides: str, broker: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(target=target, overrides=overrides, broker=broker)


@pytest.mark.parametrize("target", [["mine"], ["runs/mine"], ["c.yaml", "name=mine"]])
def test_file_folder_and_name_are_the_same_run(here: Path, target: list[str]) -> None:
    found = find_target(words(*target))
    assert found.folder is not None
    assert (found.run, found.folder.path, found.broker.blob_store) == ("mine", here / "runs" / "mine", "file:///b")
    assert found.broker.url is None, "its private broker does not run, and can be started"
    assert find_target(words(*target, "broker.url=amqp://h/")).broker.url == "amqp://h/"
    assert find_target(words(*target), "/c").broker.blob_store == "file:///c"
    assert load_target_configuration(words(*target, "buffer.total_steps=9")).buffer.total_steps == 9
    if target == ["runs/mine"]:
        other = load_target_configuration(words("runs/mine", "name=other"))
        assert (other.path, other.buffer.total_steps) == (Path("runs/other"), 5), "a pattern for it"
        (here / "runs" / "mine").rename(here / "moved")
        assert load_target_configuration(words("moved")).path == here / "moved"


def test_a_name_without_a_folder_needs_a_broker(here: Path) -> None:
    with pytest.raises(CommandError, match=r"no broker is known for run 'gone'.*; runs here: mine \(`trinity-mq list`"):
        find_target(words("gone"))
    found = find_target(words("gone", broker="amqp://h/"))
    assert (found.run, found.broker.url, found.folder) == ("gone", "amqp://h/", None)
    assert find_target(words("gone", "broker.url=amqp://h/")).broker.url == "amqp://h/"
    with pytest.raises(CommandError, match="no broker is known for run 'base'"):
        find_target(words("c.yaml"))


def test_the_broker_of_a_run_that_was_killed_is_not_taken_for_one(here: Path) -> None:
    folder = RunFolder(load_config("c.yaml", ["name=mine"]))
    folder.save_broker_url("amqp://lives/")
    assert find_target(words("mine")).broker.url is None
    with folder.locked():
        assert find_target(words("mine")).broker.url == "amqp://lives/"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nobody", "'nobody' is neither a file nor a run's folder, and there is no runs/nobody; give a YAML file"),
        ("runs", "runs holds no config.yaml, so it is not a run's folder; runs here: mine"),
        ("buffer.total_steps=3", "is a setting; name the run before it"),
        ("nobody.yaml", "nobody.yaml: cannot be read: No such file or directory"),
    ],
)
def test_what_names_no_run_is_explained(here: Path, capsys: pytest.CaptureFixture[str], target: str, said: str) -> None:
    (here / "runs.d").mkdir()
    target = target if target != "runs" else str(here / "runs")
    assert main(["validate", target]) == 2
    assert said in capsys.readouterr().err


def test_status_answers_from_the_folder_of_a_run_that_does_not_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", "mine"]) == 1
    out = capsys.readouterr().out
    assert "run mine: 3 steps" in out
    assert f"this run is stopped; `trinity-mq run {here}/runs/mine` resumes it" in out
    RunFolder(load_config("c.yaml", ["name=mine"])).mark_finished()
    monkeypatch.setenv("TRINITY_MQ_BROKER_URL", "amqp://127.0.0.1:1/")  # is not asked
    for target in (["mine"], ["c.yaml", "name=mine"]):
        assert main(["status", *target]) == 0
        assert "this run has finished" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "why"])
def test_without_a_target_the_run_that_was_started_last_is_taken(
    here: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Also where another one has metrics of later, or lies deeper; a setting is not taken for a target."""
    later = RunFolder(load_config("c.yaml", ["name=later", "run_dir=runs/group/later"]))
    with later.locked():
        later.write_configuration()
    (later.path / "broker").mkdir()
    os.utime(here / "runs" / "mine" / "config.yaml", (1000, 1000))
    for given in ([], ["buffer.total_steps=7"]):
        assert main([command, *given]) == 1
        out, err = capsys.readouterr()
        assert err == "the newest run, runs/group/later:\n"
        assert "this run is stopped" in out
    os.utime(later.config_file, (900, 900))
    (here / "runs" / "mine" / "broker").rmdir()  # it ran on a broker that this shell does not know
    assert main([command, "broker.blob_store=null"]) == 1
    assert "newest run, runs/mine:" in capsys.readouterr().err
    RunFolder(load_config("c.yaml", ["name=mine"])).mark_finished()
    assert main([command]) == 0
    assert "this run has finished" in capsys.readouterr().out
    shutil.rmtree(here / "runs")
    assert main([command]) == 2
    assert f"no run has left a folder below {here}/runs" in capsys.readouterr().err


def test_a_task_for_a_run_that_does_not_run_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "mine", "--task", '{"raw_task": {}}']) == 2
    assert "run 'mine' is stopped" in capsys.readouterr().err
    RunFolder(load_config("c.yaml", ["name=mine"])).mark_finished()
    assert main(["submit", "mine", "--task", '{"raw_task": {}}']) == 2
    assert "run 'mine' has finished and takes no more tasks" in capsys.readouterr().err


def test_list_shows_the_runs_below_a_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = here / "runs" / "more" / "second"
    deep.mkdir(parents=True)
    write_metrics(
        deep,
        {"role": "trainer", "step": 2, "time": 1.0, "rollout/reward/mean": 0.25, "eval/held_out/accuracy/mean@1": 0.5},
    )
    (deep / "finished").touch()
    with RunFolder(load_config("c.yaml", ["name=mine"])).locked():
        assert main(["list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "step", "accuracy", "reward", "last", "metric", "folder"]
    assert first.split()[:5] == ["mine", "runs", "3/5", "-", "-"]
    assert first.endswith(f"runs{os.sep}mine")
    assert second.split()[:5] == ["second", "finished", "2/?", "0.500", "0.250"]
    assert main(["list", "runs/mine"]) == 0
    assert "mine  stopped  3/5" in capsys.readouterr().out
    (here / "no-runs").mkdir()
    (here / "no-runs" / "config.yaml").write_text("of: something else")
    assert main(["list", "no-runs"]) == 1
    assert "no run has left a folder below" in capsys.readouterr().err
    assert main(["list", "none"]) == 2


# -- the folder of a run


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
    with pytest.raises(ConfigError, match=r"remove it to continue\n.*config.yaml:1: model.no_such_key"):
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


def test_a_run_of_an_older_release_says_which_names_mean_something_else(tmp_path: Path) -> None:
    tasks = {"path": "t.jsonl", "workflow": "async_math_workflow", "reward_fn": "countdown_reward"}
    first = config(tmp_path, buffer={"batch_size": 4, "total_steps": 7, "taskset": tasks})
    folder = RunFolder(first)
    assert folder.write_configuration() == []
    (folder.path / "names").unlink()  # as release 0.2 left it
    said = [
        "buffer.taskset.workflow: async_math_workflow is now Trinity-RFT's; release 0.2's is named "
        "async_math_answer_workflow",
        "buffer.taskset.reward_fn: countdown_reward is now Trinity-RFT's; release 0.2's is named countdown",
    ]
    assert sorted(folder.write_configuration()) == sorted(said)
    assert folder.write_configuration() == [], "once"
