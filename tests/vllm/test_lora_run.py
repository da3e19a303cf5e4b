"""The smoke example with adapters, which alone travel to vLLM: a whole run that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

from .test_smoke import ACCURACY, AGREE, EXAMPLES, RISE

STEPS = 60

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


async def test_a_run_learns_with_adapters_that_engine_and_trainer_agree_on(tmp_path: Path) -> None:
    settings = (
        "model.lora={r: 16, alpha: 32, sync: adapter}",
        "algorithm.optimizer.lr=5e-3",
        "synchronizer.sync_offset=0",
        f"buffer.total_steps={STEPS}",
        f"explorer.eval_interval={STEPS}",
    )
    async with LocalRun(EXAMPLES / "smoke-vllm.yaml", tmp_path / "run", settings) as run:
        code, output = await run.ended(1000.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[STEPS] >= accuracy[0] + RISE, accuracy
    assert max(value for _, value in run.values("rollout/rollout_vs_train_logprob_diff/max")) <= AGREE
    assert max(count for _, count in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
    log = (tmp_path / "run" / "logs" / "explorer-0-engine.jsonl").read_text().splitlines()
    committed = [json.loads(line)["version"][1] for line in log if '"weights_committed"' in line]
    assert sorted(set(committed)) == list(range(STEPS + 1)), "every version of the run went through the gate"
