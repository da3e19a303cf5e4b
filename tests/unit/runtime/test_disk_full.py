"""A full disk: which path, what to do, and an end that is not repeated. /dev/full refuses every byte."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from trinity_mq.config import SupervisorConfig
from trinity_mq.runtime.errors import EXIT_DISK_FULL, FatalError
from trinity_mq.runtime.process import disk_full_message
from trinity_mq.runtime.processes.supervisor import ProcessEvent, ProcessSpec, Supervisor
from trinity_mq.telemetry import MetricsWriter, setup_logging

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
DAEMON = """
import errno, sys
from trinity_mq.config import load_config
from trinity_mq.runtime.serve import run_daemon


def build(bus, topology):
    raise OSError(errno.ENOSPC, "No space left on device", "runs/w/state/explorer.sqlite")


config = load_config({"name": "w", "model": {"tiny": {}}, "run_dir": sys.argv[1], "broker": {"url": "amqp://h/"}})
sys.exit(run_daemon(config, "explorer-0", "explorer", build))
"""


def test_the_path_and_what_to_do_are_said() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "runs/a/x")
    assert str(disk_full_message(error)).startswith(
        "runs/a/x: the disk is full (No space left on device); make room there"
    )
    fatal = FatalError("the history cannot be written")
    fatal.__cause__ = error
    assert disk_full_message(fatal) == disk_full_message(error)
    assert disk_full_message(OSError(errno.EACCES, "Permission denied", "runs/a/x")) is None


def test_metrics_on_a_full_disk_name_their_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to(FULL)
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    with pytest.raises(OSError, match="No space left on device") as caught:
        writer.write(1, {"a": 1.0})
    writer.close()
    assert str(disk_full_message(caught.value)).startswith(f"{path}: the disk is full")


def test_a_log_on_a_full_disk_is_one_line_and_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "runner-0.jsonl").symlink_to(FULL)
    setup_logging("runner", "runner-0", tmp_path)
    for _ in range(3):
        structlog.get_logger("x").info("slice_done", ticket="t")
    setup_logging("runner", "runner-0", None)
    assert capfd.readouterr().err == f"{tmp_path}/logs/runner-0.jsonl cannot be written: No space left on device\n"


def test_an_agent_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", DAEMON, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == EXIT_DISK_FULL
    assert done.stderr.startswith("explorer: runs/w/state/explorer.sqlite: the disk is full (No space left on device)")
    assert len(done.stderr.splitlines()) == 1


async def test_its_supervisor_does_not_start_it_again_and_says_where(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    spec = ProcessSpec(name="a", role="runner", argv=(sys.executable, "-c", f"import sys; sys.exit({EXIT_DISK_FULL})"))
    folder = tmp_path / "run" / "logs"
    await Supervisor([spec], config=SupervisorConfig(), log_dir=folder, on_event=events.append).run()
    assert [event.what for event in events] == ["started", "died", "failed"]
    assert events[-1].reason == f"a disk is full, see `df -h {tmp_path / 'run'}`: make room"
