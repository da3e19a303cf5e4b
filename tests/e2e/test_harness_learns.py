"""examples/harness-mini-swe-agent.yaml: an unmodified harness makes the rollouts of a run that learns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from statistics import fmean

import pytest

from tests.processes import completed

ROOT = Path(__file__).parents[2]
HARNESSES = os.environ.get("TRINITY_MQ_HARNESSES", "")
STEPS, EARLY, LATE, RISE = 30, 5, 10, 0.15
"""Seen: mean rewards of .13 over the first 5 steps and .36 over the last 10."""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.e2e,
    pytest.mark.any_broker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not Path(HARNESSES, "python", "bin", "python").exists() or not shutil.which("bwrap"),
        reason="needs TRINITY_MQ_HARNESSES/python and bubblewrap: scripts/test-harnesses has both",
    ),
]


async def test_commands_of_mini_swe_agent_in_bubblewrap_are_learned(tmp_path: Path) -> None:
    settings = (f"buffer.total_steps={STEPS}", f"trainer.save_interval={STEPS}")
    run, _ = await completed(
        ROOT / "examples" / "harness-mini-swe-agent.yaml", tmp_path / "run", settings, seconds=800.0
    )
    rewards = dict(run.values("rollout/reward/mean"))
    assert list(rewards) == list(range(1, STEPS + 1))
    values = list(rewards.values())
    assert fmean(values[-LATE:]) >= fmean(values[:EARLY]) + RISE, values
    assert {calls for _, calls in run.values("rollout/session_calls/mean")} == {1.0}
    assert max(count for _, count in run.values("sync/canary_failures")) == 0
