"""Stages as a stranger runs them: real processes, each stage on the model of the one before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.launch.stages import model_hash

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FILE: dict[str, Any] = {
    "name": "two",
    "model": {
        "tiny": {"characters": "0123456789+-=>,<"},
        "max_model_len": 32,
        "max_prompt_tokens": 16,
        "max_response_tokens": 3,
    },
    "buffer": {
        "batch_size": 8,
        "taskset": {"name": "max3", "storage_type": "synthetic", "path": "max3", "reward_fn": "char_match"},
    },
    "stages": [
        {"stage_name": "first", "buffer": {"total_steps": 2}},
        {"stage_name": "second", "algorithm": {"algorithm_type": "gspo"}, "buffer": {"total_steps": 2}},
    ],
}


def run(folder: Path, *words: str) -> tuple[int, str]:
    file = folder / "two.yaml"
    file.write_text(yaml.safe_dump({**FILE, "run_dir": str(folder / "run")}))
    command = [sys.executable, "-m", "trinity_mq.cli.main", "run", str(file), "--plain", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_second_begins_with_the_model_of_the_first_and_finished_ones_are_not_repeated(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 0, output
    first, second = tmp_path / "run-first", tmp_path / "run-second"
    assert "stage 2 of 2, second: mode both, algorithm gspo, begins with the model of stage first" in output
    assert f"model_path: {first / 'final'}" in output, "the merged configuration is printed"
    records = [json.loads((folder / "stage.json").read_text()) for folder in (first, second)]
    assert records[0] == {"stage": "first", "began_with": None, "model": model_hash(first / "final"), "finished": True}
    assert records[1]["began_with"] == records[0]["model"] != records[1]["model"]

    code, output = run(tmp_path, "monitor.log_level=debug")
    assert (code, output.count("has finished, in ")) == (0, 2), output
    assert output.count("has no effect: monitor.log_level") == 2, output

    (first / "final" / "config.json").write_text("{}")
    code, output = run(tmp_path)
    assert code == 2, output
    assert "stage first has finished, and the model it left" in output, output
