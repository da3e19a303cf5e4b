"""Metrics on their way to services: all of them, from where the last call ended, and none kept back by another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config
from trinity_mq.observability.trackers.base import Forwarder, TrackerError
from trinity_mq.observability.trackers.process import TrackerProcess
from trinity_mq.observability.trackers.services import shown_settings
from trinity_mq.operations.validate import check_trackers
from trinity_mq.targets.run_folder import RunFolder
from trinity_mq.telemetry import METRICS_FILE

SETTINGS: dict[str, Any] = {"name": "tracked", "model": {"tiny": {}}}


class Service:
    """Keeps what it gets."""

    def __init__(self, kind: str = "one", fails: int = 0) -> None:
        self.kind, self.fails = kind, fails
        self.ids: list[str] = []
        self.values: list[tuple[int, float, Mapping[str, float]]] = []
        self.finished = 0

    def begin(self, run_id: str) -> str:
        self.ids.append(run_id)
        return run_id or f"{self.kind}-1"

    def log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        if self.fails:
            self.fails -= 1
            raise TrackerError(f"{self.kind} is away")
        self.values.append((step, seconds, values))

    def finish(self) -> str:
        self.finished += 1
        return f"at {self.kind}"

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.values]


def write(folder: Path, *steps: int, end: str = "\n") -> None:
    with (folder / METRICS_FILE).open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"time": 1.5, "role": "trainer", "agent": "t", "step": step, "a/b": step * 0.5}) + end
            )


def test_each_line_is_sent_once_also_by_a_later_process(tmp_path: Path) -> None:
    service = Service()
    write(tmp_path, 1, 2)
    first = Forwarder(tmp_path, [service])
    first.send()
    write(tmp_path, 3)
    first.send()
    assert first.finish() == ["at one"]
    write(tmp_path, 4)
    Forwarder(tmp_path, [service]).send()
    assert service.values == [(step, 1.5, {"a/b": step * 0.5}) for step in (1, 2, 3, 4)]
    assert service.ids == ["", "one-1"], "the same run goes on"


def test_what_is_no_finite_number_is_left_out(tmp_path: Path) -> None:
    line = {"time": 1.0, "step": 1, "a/x": None, "a/y": "text", "a/z": float("inf"), "a/ok": 2, "plain": 3.0}
    (tmp_path / METRICS_FILE).write_text(json.dumps(line) + "\n")
    service = Service()
    Forwarder(tmp_path, [service]).send()
    assert service.values == [(1, 1.0, {"a/ok": 2.0, "plain": 3.0})]


def test_a_service_that_is_away_is_asked_again_and_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    away, there = Service("away", fails=2), Service("there")
    write(tmp_path, 1, 2)
    forwarder = Forwarder(tmp_path, [away, there])
    forwarder.send()
    assert forwarder.problems == {"away": "away is away"}
    assert (away.steps, there.steps) == ([], [1, 2])
    forwarder.send()
    forwarder.finish()
    assert (away.steps, forwarder.problems) == ([1, 2], {})


def folder_of_a_run(tmp_path: Path, **monitor: Any) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "monitor": monitor}))
    write(folder, 1, 2, 3)
    return folder


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The real library with its store of files, in a process of its own: it starts threads that never end."""
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": "mlflow", "project": "p"}])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for _ in range(2):
        done = run_track(folder)
        assert done.returncode == 0, done.stderr
        assert "MLflow, experiment p, run " in done.stdout
    (values,) = (tmp_path / "mlruns").glob("*/*/metrics/a/b")
    assert [line.split()[1:] for line in values.read_text().splitlines()] == [["0.5", "1"], ["1.0", "2"], ["1.5", "3"]]
    (seed,) = (tmp_path / "mlruns").glob("*/*/params/seed")
    assert seed.read_text() == "0"


@pytest.mark.parametrize(
    ("kind", "pattern", "parts"),
    [
        ("wandb", "offline-run-*/*.wandb", (b"a/b", b"algorithm", b"tracked")),
        ("swanlab", "run-*/*.swanlab", (b"a/b",)),
    ],
)
def test_a_service_that_keeps_files(tmp_path: Path, kind: str, pattern: str, parts: tuple[bytes, ...]) -> None:
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": kind, "offline": True, "project": "p"}])
    done = run_track(folder)
    assert done.returncode == 0, done.stderr
    assert f"for `{kind} sync`" in done.stdout
    (file,) = (folder / "trackers" / kind).glob(pattern)
    body = file.read_bytes()
    assert all(word in body for word in parts)


def run_track(folder: Path, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "track", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **how,
    )


def test_a_service_without_a_server_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_a_run(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    done = run_track(folder, "--to", "mlflow")
    assert done.returncode == 2
    assert "set MLFLOW_TRACKING_URI to a server" in done.stderr
    assert f"is sent by `trinity-mq track {folder}`" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_service_there_is_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["track", str(folder_of_a_run(tmp_path))]) == 2
    assert "the run has no monitor.trackers: name a service with --to" in capsys.readouterr().err


def test_a_state_that_is_rubbish_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "sent.json").write_text('{"one": 3}')
    with pytest.raises(TrackerError, match=r"sent\.json is not a valid record .*: remove it to send all again"):
        Forwarder(tmp_path, [Service()])


def test_a_service_that_is_not_installed_or_named_twice_is_said_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config({**SETTINGS, "monitor": {"trackers": [{"kind": "mlflow"}]}})
    assert check_trackers(config) == []
    with pytest.raises(ConfigError, match="wanted each kind once"):
        load_config({**SETTINGS, "monitor": {"trackers": [{"kind": "mlflow"}, {"kind": "mlflow"}]}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mlflow is not installed: pip install 'trinity-mq\[mlflow\]'"):
        check_trackers(config)


def test_nothing_about_the_broker_is_shown() -> None:
    config = load_config({**SETTINGS, "broker": {"url": "amqp://me:secret@h/"}})
    assert "secret" not in json.dumps(shown_settings(config))


async def test_a_run_whose_service_is_away_ends_and_says_how_to_send_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    folder = folder_of_a_run(tmp_path, trackers=[{"kind": "mlflow"}])
    config = load_config(folder / "config.yaml", [f"run_dir={folder}"])
    process = TrackerProcess(config, RunFolder(config), said.append)
    await process.start()
    await process.end()
    (line,) = said
    assert line.startswith("metrics were not all sent to mlflow: the process ended with 2, see ")
    assert line.endswith(f"`trinity-mq track {folder}` sends the rest")
    assert "set MLFLOW_TRACKING_URI to a server" in (folder / "logs" / "track.out").read_text()
