"""The examples of environments that others keep: they run, and learn something in a few steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]

VERIFIERS = os.environ.get("TRINITY_MQ_VERIFIERS_PYTHON", "")

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(240)]


async def test_an_environment_of_gymnasium(tmp_path: Path) -> None:
    words = (f"plugin_dirs=['{ROOT / 'examples'}']", "explorer.eval_interval=100")
    async with LocalRun(ROOT / "examples" / "gymnasium.yaml", tmp_path / "run", words) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    success = dict(run.values("eval/digits_held_out/success/mean@1"))
    assert success[0] < 0.2 < 0.8 < success[100]
    assert max(value for _, value in run.values("rollout/illegal_actions/mean")) > 0


async def test_problems_of_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: a part of it needs a C compiler")
    words = ("buffer.total_steps=150", "explorer.eval_interval=150")
    async with LocalRun(ROOT / "examples" / "reasoning-gym.yaml", tmp_path / "run", words) as run:
        code, output = await run.ended(200.0)
    assert code == 0, output
    rewards = dict(run.values("rollout/reward/mean"))
    assert rewards[1] < 0.05 < 0.1 < max(rewards.values())


@pytest.mark.skipif(not VERIFIERS, reason="TRINITY_MQ_VERIFIERS_PYTHON names no Python with verifiers and uv")
@pytest.mark.timeout(900)
async def test_an_environment_of_verifiers(tmp_path: Path) -> None:
    words = (
        f"buffer.taskset.workflow_args.python={VERIFIERS}",
        f"buffer.taskset.workflow_args.env.PYTHONPATH={ROOT / 'examples' / 'environments'}",
        "buffer.total_steps=12",
    )
    async with LocalRun(ROOT / "examples" / "verifiers.yaml", tmp_path / "run", words) as run:
        code, output = await run.ended(800.0)
    assert code == 0, output
    rewards = [value for _, value in run.values("rollout/reward/mean")]
    assert rewards[0] < 0.35, "before it has learned"
    assert max(rewards) > rewards[0] + 0.15
