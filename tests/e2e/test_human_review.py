"""A whole run whose runs a person judges, and what its agents logged about one batch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.testing.runs import LocalRun

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
BATCHES = 3


async def command(*words: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "trinity_mq.cli.main", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_a_verdict_reaches_the_trainer_and_each_agent_logs_the_batch(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "examples" / "smoke.yaml").read_text())
    review = {"choose": {"fraction": 1.0}, "limit": 1, "seconds": 20, "default": "keep"}
    config["operator"] = {"operators": [{"name": "human_review", "args": review}]}
    config["buffer"] |= {"total_steps": BATCHES, "batch_size": 2}
    config["explorer"] |= {"eval_interval": 100, "eval_on_startup": False}
    path, folder = tmp_path / "smoke.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    async with LocalRun(path, folder) as run:
        asked: list[dict[str, Any]] = []
        for batch in range(1, BATCHES + 1):
            await run.until((folder / "broker.url").exists, 60.0)
            while not (asked and asked[0]["batch"] == batch):
                code, out = await command("review", "list", str(folder), "--json")
                asked = json.loads(out) if code == 0 else []
            code, out = await command("review", "reward", str(folder), asked[0]["request"], "7.5", "--by", "ann")
            assert code == 0, out
            assert "reward 7.5 by ann counts" in out
        code, output = await run.ended(100.0)
    assert code == 0, output
    assert run.values("review/rewarded") == [(batch, 1.0) for batch in range(1, BATCHES + 1)]
    _, out = await command("inspect", str(folder), "--json", "--limit", "100")
    trained = [json.loads(line) for line in out.splitlines()]
    changed = [one for one in trained if one["reward"] == 7.5]
    assert (len(trained), len(changed)) == (16 * BATCHES, BATCHES), "on the stream that the trainer has read"

    _, out = await command("logs", str(folder), "--batch", "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    events = {(line["role"], line["event"]) for line in lines}
    assert {
        ("explorer", "batch_opened"),
        ("explorer", "batch_closed"),
        ("runner", "batch_begun"),
        ("operator", "batch_processed"),
        ("trainer", "batch_done"),
    } <= events
    assert {line["run"] for line in lines} == {"smoke"}
    assert {line["batch"] for line in lines} == {2}
    assert len({line["ticket"] for line in lines}) == 1
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
