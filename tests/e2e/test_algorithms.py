"""Algorithms with more models or other rollouts than the smoke example has, as whole runs that learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun
from trinity_mq.training.checkpoints.state import read_facts

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(400)]


async def _learned(folder: Path, *overrides: str) -> LocalRun:
    async with LocalRun(SMOKE, folder / "run", overrides) as run:
        code, output = await run.ended(360.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[max(accuracy)] >= accuracy[0] + 0.3, accuracy
    return run


async def test_a_critic_a_moving_reference_and_a_kl_in_the_rewards(tmp_path: Path) -> None:
    run = await _learned(
        tmp_path,
        "algorithm.algorithm_type=ppo",
        "algorithm.std_level=null",
        "algorithm.critic.lr=1e-3",
        "algorithm.reward_kl={kind: k1, coef: 0.01, target: 0.05}",
        "algorithm.reference={update: ema, every_steps: 5, decay: 0.9}",
        "trainer.max_checkpoints_to_keep=1",
    )
    assert [value for _, value in run.values("critic/optimizer_steps")] == [1.0] * 60
    explained = [value for _, value in run.values("critic/explained_variance")]
    assert sum(explained[-20:]) / 20 > 0.1, "the critic learns what an answer is worth"
    apart = [value for _, value in run.values("actor/kl_ref_k3")]
    assert apart[0] == pytest.approx(0.0, abs=1e-6), "the policy begins as its reference"
    assert max(apart) > 0.001, "and leaves it"
    checkpoint = max((tmp_path / "run" / "checkpoints").glob("progress-*"))
    facts = read_facts(checkpoint)
    assert facts["critic"]["steps"] == 60
    assert facts["reference"]["has_moved"]


async def test_a_greedy_run_of_each_task_as_the_baseline(tmp_path: Path) -> None:
    run = await _learned(
        tmp_path,
        "algorithm.algorithm_type=remax",
        "algorithm.std_level=null",
        "buffer.taskset.workflow_args={greedy_baseline: true}",
        "buffer.batch_size=32",
    )
    trained = [value for _, value in run.values("sample/experiences")]
    assert trained == [32 * 7] * 60, "the greedy run of a task is the baseline of the others and is not trained on"
