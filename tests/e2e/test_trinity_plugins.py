"""A workflow, a reward and an operator in Trinity-RFT's own style, with only their import lines changed, in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

FOLDER = Path(__file__).parent / "trinity_plugins"
EXAMPLE = Path(__file__).parents[2] / "examples" / "smoke.yaml"

pytestmark = [pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(200)]


async def test_they_are_found_by_name_and_do_their_work(tmp_path: Path) -> None:
    words = (
        "buffer.total_steps=4",
        "explorer.eval_on_startup=false",
        f"plugin_dirs=['{FOLDER}']",
        "buffer.taskset.workflow=trinity_digits_workflow",
        "buffer.taskset.reward_fn=trinity_near_reward",
        "buffer.taskset.reward_fn_args={weight: 0.5}",
        "operator.operators=[{name: trinity_scaling, args: {scale: 3.0}}]",
    )
    async with LocalRun(EXAMPLE, tmp_path / "run", words) as run:
        code, output = await run.ended(150.0)
    assert code == 0, output
    starts = dict(run.values("rollout/starts_right/mean"))
    assert sorted(starts) == [1, 2, 3, 4]
    assert 0.0 < starts[4] <= 0.5
    best = dict(run.values("rollout/starts_right/max"))[4]
    assert best > 0
    assert best % (0.5 / 8) == 0, "of eight runs each right one counts by the weight that the reward was made with"
    assert dict(run.values("group_advantages/reward_mean/max"))[4] == pytest.approx(3 * best), "behind the operator"
    scaled = sorted(run.values("experience_pipeline/0_ScalingOperator/scaled_count"))
    assert scaled == [(step, 128.0) for step in (1, 2, 3, 4)]
    assert [step for step, _ in run.values("trainer/step")] == [1, 2, 3, 4]
