"""The README's first command, as it stands there: sets up, runs, learns."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from trinity_mq.telemetry import read_metrics

ROOT = Path(__file__).parents[2]
ACCURACY = "eval/ops3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(1200)]


async def test_the_demo_learns_from_random_weights(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        ROOT / "scripts" / "demo",
        f"run_dir={tmp_path / 'run'}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TERM": "dumb"},
    )
    try:
        async with asyncio.timeout(1100):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    accuracy = {
        line["step"]: line[ACCURACY] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if ACCURACY in line
    }
    assert sorted(accuracy) == [0, 50, 100, 150, 200, 250, 300], "one line for each evaluation"
    assert accuracy[300] >= accuracy[0] + 0.5, text
    assert (accuracy[250] + accuracy[300]) / 2 >= 0.8, text
    assert str(tmp_path / "run" / "final") in text, "the report says where the model is"
