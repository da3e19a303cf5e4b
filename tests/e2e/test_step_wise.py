"""The step-wise workflow of the README, from a plug-in folder, on the `transformers` engine: it runs and learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(900)]


@pytest.mark.extended
async def test_a_step_wise_workflow_from_a_plug_in_folder_learns(tmp_path: Path) -> None:
    overrides = ("buffer.total_steps=60", f"plugin_dirs=['{EXAMPLES}']")
    async with LocalRun(EXAMPLES / "step-wise.yaml", tmp_path / "run", overrides) as run:
        code, output = await run.ended(800.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, 30, 60}
    assert accuracy[60] >= accuracy[0] + 0.1
    rewards = dict(run.values("rollout/reward/mean"))
    assert len(rewards) == 60
    counted = sum(value for _, value in run.values("sample/experiences"))
    assert counted > 60 * 8 * 8, "runs that got the first step right made a second"


async def test_a_plug_in_folder_that_is_not_there_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    overrides = (f"plugin_dirs=['{tmp_path / 'nowhere'}']",)
    async with LocalRun(EXAMPLES / "step-wise.yaml", tmp_path / "run", overrides) as run:
        code, output = await run.ended(60.0)
    assert code == 2, output
    assert "plugin_dirs: there is no folder" in output
    assert "Traceback" not in output
