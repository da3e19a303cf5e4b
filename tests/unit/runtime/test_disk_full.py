"""A full disk: which path, what to do, and an end that is not repeated. /dev/full refuses every byte."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from trinity_mq.runtime.errors import EXIT_DISK_FULL, EXIT_FATAL, FatalError
from trinity_mq.runtime.process import disk_full_message
from trinity_mq.telemetry import MetricsWriter, setup_logging

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
DAEMON = """
import errno, sys
from trinity_mq.config import load_config
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.serve import run_daemon


def build(bus, topology):
    raise {error}


config = load_config({{"name": "w", "model": {{"tiny": {{}}}}, "run_dir": sys.argv[1], "broker": {{"url": "amqp://h/"}}}})
sys.exit(run_daemon(config, "explorer-0", "explorer", build))
"""


def run_failing_daemon(folder: Path, error: str) -> subprocess.CompletedProcess[str]:
    """Run an agent in a process of its own that fails with an error, given as an expression."""
    argv = [sys.executable, "-c", DAEMON.format(error=error), str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=dict(os.environ))


def test_the_path_and_what_to_do_are_said(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to(FULL)
    writer = MetricsWriter(tmp_path, "trainer", "trainer-0", tensorboard=False)
    with pytest.raises(OSError, match="No space left on device") as caught:
        writer.write(1, {"a": 1.0})
    writer.close()
    message = str(disk_full_message(caught.value))
    assert message.startswith(f"{path}: the disk is full (No space left on device); make room there")
    fatal = FatalError("the history cannot be written")
    fatal.__cause__ = caught.value
    assert disk_full_message(fatal) == disk_full_message(caught.value)
    assert disk_full_message(OSError(errno.EACCES, "Permission denied", "runs/a/x")) is None


def test_a_log_on_a_full_disk_is_one_line_and_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "runner-0.jsonl").symlink_to(FULL)
    setup_logging("runner", "runner-0", tmp_path)
    for _ in range(3):
        structlog.get_logger("x").info("slice_done", ticket="t")
    setup_logging("runner", "runner-0", None)
    assert capfd.readouterr().err == f"{tmp_path}/logs/runner-0.jsonl cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("FatalError('f')", EXIT_FATAL),
        ("OSError(errno.ENOSPC, 'No space left on device')", EXIT_DISK_FULL),
        ("KeyError('k')", 1),
    ],
)
def test_of_several_errors_the_error_that_a_restart_does_not_help_decides(
    tmp_path: Path, error: str, code: int
) -> None:
    done = run_failing_daemon(tmp_path, f"ExceptionGroup('g', [ValueError('v'), ExceptionGroup('inner', [{error}])])")
    assert done.returncode == code
    lines = [json.loads(line) for line in (tmp_path / "logs" / "explorer-0.jsonl").read_text().splitlines()]
    assert "agent_failed" in [line["event"] for line in lines], "the other error is in the log too"


def test_an_agent_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    path = "runs/w/state/explorer.sqlite"
    done = run_failing_daemon(tmp_path, f"OSError(errno.ENOSPC, 'No space left on device', '{path}')")
    assert done.returncode == EXIT_DISK_FULL
    assert done.stderr.startswith("explorer: runs/w/state/explorer.sqlite: the disk is full (No space left on device)")
    assert len(done.stderr.splitlines()) == 1
