"""``trinity-mq debug workflow`` as a person gives it: an engine of its own, no broker, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
START_SECONDS = 300.0

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(700)]


def debug_one_task(folder: Path, config: Path = EXAMPLE) -> dict[str, Any]:
    """Debug one task, check what is told of it, and return the answer of its only call."""
    done = subprocess.run(
        [sys.executable, "-m", "trinity_mq.cli.main", "debug", "workflow", str(config), "--task", "3", "--json"],
        env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["task", "call", "experience", "end"]
    task, call, experience, end = events
    assert (task["number"], task["task"]["raw_task"]["question"]) == (3, call["request"]["messages"][0]["content"])
    [choice] = call["choices"]
    assert experience["logprobs"] == pytest.approx(choice["logprobs"], abs=1e-6)
    assert experience["versions"] == [[0, 0, 0]]
    assert end["ok"]
    ours = [path.name for path in folder.iterdir() if path.name.startswith(("tmq", "runs"))]  # torch has a cache too
    assert ours == [], "no run folder, no files of the engine"
    return dict(choice)


def test_one_task_without_a_broker(tmp_path: Path) -> None:
    debug_one_task(tmp_path)
