"""Whole runs that train adapters alone, in one process and in two."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.testing.runs import LocalRun
from trinity_mq.training.checkpoints.state import read_parts

SMOKE = Path(__file__).parents[2] / "examples" / "smoke.yaml"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(500)]


@pytest.mark.parametrize("nproc", [1, 2])
async def test_adapters_learn_and_engines_get_them_merged(tmp_path: Path, nproc: int) -> None:
    settings = ("model.lora={r: 16, alpha: 32}", "algorithm.optimizer.lr=5e-3", f"trainer.nproc={nproc}")
    async with LocalRun(SMOKE, tmp_path / "run", settings) as run:
        code, output = await run.ended(450.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[max(accuracy)] >= accuracy[0] + 0.3, accuracy
    assert max(count for _, count in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
    assert max(value for _, value in run.values("rollout/rollout_vs_train_logprob_diff/max")) > 0
    held = read_parts(max((tmp_path / "run" / "checkpoints").glob("progress-*")), {})["policy"].tensors
    assert held
    assert all(".lora_" in name for name in held), "a checkpoint holds the adapters alone"
    final = tmp_path / "run" / "final"
    assert {"model.safetensors", "tokenizer.json"} <= {path.name for path in final.iterdir()}
    assert (final / "adapter" / "adapter_model.safetensors").stat().st_size > 0
