"""The examples with a judge as whole runs, the judge a real model of random weights: it says nothing of use, which is
counted and costs no run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_gsm8k_path import DATA, make_model
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(400)]


@pytest.mark.skipif(not DATA.exists(), reason="the GSM8K files are not beside this checkout")
async def test_ruler_with_a_judge_that_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model", (DATA / "train.jsonl").read_text().splitlines()[:300])
    monkeypatch.setenv("TRINITY_MQ_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("TRINITY_MQ_GSM8K", str(DATA))
    served = {"max_model_len": 2048, "max_prompt_tokens": 2000, "max_response_tokens": 16}
    judge = {"name": "judge", "model": {"model_path": str(tmp_path / "model"), **served}}
    small = (
        "model.dtype=float32",
        "model.max_response_tokens=8",
        "model.max_prompt_tokens=500",
        "algorithm.repeat_times=4",
        "buffer.batch_size=4",
        "buffer.total_steps=2",
        "buffer.taskset.workflow_args.judge_max_tokens=16",
        f"explorer.auxiliary_models={json.dumps([judge])}",
    )
    async with LocalRun(EXAMPLES / "ruler.yaml", tmp_path / "run", small) as run:
        code, output = await run.ended(350.0)
    assert code == 0, output
    assert [value for _, value in run.values("rollout/judge_success/mean")] == [0.0, 0.0]
    assert [value for _, value in run.values("rollout/ruler_score/max")] == [0.0, 0.0]
    assert len(run.values("rollout/gold_reward/mean")) == 2, "the answers are known, and only looked at"
    assert [value for _, value in run.values("rollout/zero_variance_groups")] == [4.0, 4.0]
    assert [value for _, value in run.values("actor/pg_loss")] == [0.0, 0.0], "nothing is learned from it"


async def test_operators_with_a_judge_that_knows_nothing(tmp_path: Path) -> None:
    short = (f"plugin_dirs={json.dumps([str(EXAMPLES)])}", "buffer.total_steps=2")
    async with LocalRun(EXAMPLES / "llm-judge.yaml", tmp_path / "run", short) as run:
        code, output = await run.ended(350.0)
    assert code == 0, output
    label = "experience_pipeline/1_LlmJudge"
    judged, not_judged = (dict(run.values(f"{label}/{name}")) for name in ("judged", "not_judged"))
    assert {step: judged[step] + not_judged[step] for step in judged} == {1: 32.0, 2: 32.0}, "each was put before it"
    assert not_judged[1] >= 31, "a random model does not hit on a score"
    assert [value for _, value in run.values("sample/skipped_step")] == [0.0, 0.0]
