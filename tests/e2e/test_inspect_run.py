"""``trinity-mq inspect`` on a whole run: while it goes on, and after it, when its private broker is gone."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity_agents.trainer.history import lineage
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
STEPS = 300
"""So many that the run goes on for several times as long as a look takes."""
RUNS = 16 * 8

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.timeout(900)]


async def inspected(run: LocalRun, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trinity_mq.cli.main", "inspect", str(run.run_dir / "config.yaml"), "--json", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.decode().splitlines()], err.decode()


async def test_a_run_is_looked_at_and_is_none_the_worse(tmp_path: Path) -> None:
    overrides = (f"buffer.total_steps={STEPS}", f"explorer.eval_interval={STEPS}")
    async with LocalRun(EXAMPLE, tmp_path / "run", overrides) as run:
        await run.until_progress(1, 400.0)
        code, during, err = await inspected(run, "--batch", "1", "--limit", "1000")
        assert code == 0, err
        code, output = await run.ended(400.0)
    assert code == 0, output
    code, after, err = await inspected(run, "--batch", "1", "--limit", "1000")
    assert code == 0, err
    assert "starting the private broker" in err
    assert after == during
    assert len(after) == RUNS
    trained = next(entry for entry in lineage(tmp_path / "run" / "history", 1, STEPS) if entry["batch"] == 1)
    assert {one["uid"] for one in after} == set(trained["uids"])
    for one in after:
        response = len(one["tokens"]) - one["prompt_length"]
        assert response == len(one["action_mask"]) == len(one["logprobs"]) == len(one["advantages"])
        assert "".join(one["token_texts"]).startswith(one["prompt_text"])
        assert one["versions"][0][1] == 1
    code, last, err = await inspected(run, "--last", "--limit", "1")
    assert (code, [one["eid"]["batch"] for one in last]) == (0, [STEPS]), err
