"""The smoke example on vLLM as a stranger runs it: real broker, real processes, a real model that learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun

SMOKE = Path(__file__).parents[2] / "examples" / "smoke-vllm.yaml"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"
AGREE = 1e-4


@pytest.mark.e2e
@pytest.mark.timeout(2000)
async def test_it_learns_and_trainer_and_engine_agree_after_every_sync(tmp_path: Path) -> None:
    # without offset every batch is sampled by the weights that train on it, so that all its logprobs must be equal
    async with LocalRun(SMOKE, tmp_path / "run", ("synchronizer.sync_offset=0",)) as run:
        code, output = await run.ended(1800.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, 30, 60}
    assert accuracy[60] >= accuracy[0] + 0.4
    assert run.values("eval/max3_held_out/version/min")[-1] == (60, 60.0), "the final weights were evaluated"
    differences = run.values("rollout/rollout_vs_train_logprob_diff/max")
    assert len(differences) == 60
    assert max(difference for _, difference in differences) <= AGREE
    assert max(aborts for _, aborts in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
