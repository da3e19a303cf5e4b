"""The step-wise workflow of the README on vLLM, on two engines under one explorer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"
STEPS = 30

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


async def test_a_step_wise_workflow_learns_on_two_vllm_engines(tmp_path: Path) -> None:
    overrides = (
        f"buffer.total_steps={STEPS}",
        f"explorer.eval_interval={STEPS}",
        f"plugin_dirs=['{EXAMPLES}']",
        "explorer.rollout_model.engine=vllm",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.vllm.kv_cache_memory_bytes=33554432",
    )
    async with LocalRun(EXAMPLES / "step-wise.yaml", tmp_path / "run", overrides) as run:
        code, output = await run.ended(1400.0)
    assert code == 0, output
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, STEPS}
    assert accuracy[STEPS] >= accuracy[0] + 0.1, accuracy
    assert len(run.values("rollout/reward/mean")) == STEPS
    counted = sum(value for _, value in run.values("sample/experiences"))
    assert counted > STEPS * 8 * 8, "runs that got the first step right made a second"
    assert max(aborts for _, aborts in run.values("sync/aborts")) == 0, "each sync's canary agreed on both"
    engines = sorted(path.name.split(".")[0] for path in (tmp_path / "run" / "engines").glob("*.config.json"))
    assert len(engines) == 2
    committed = [[line["version"] for line in logged(run, engine, "weights_committed")] for engine in engines]
    assert committed[0][-1] == committed[1][-1]
    few, many = sorted(({tuple(version) for version in versions} for versions in committed), key=len)
    assert few <= many, "the gate gave both the same versions"
    assert len(few) >= STEPS // 2, "both were there for most of the run"
    served = {engine: logged(run, engine, "engine_done")[-1]["sequences"] for engine in engines}
    assert min(served.values()) > 0, f"both have answered: {served}"


def logged(run: LocalRun, who: str, event: str) -> list[dict[str, Any]]:
    """What an engine has logged of one kind."""
    lines = (run.run_dir / "logs" / f"{who}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if f'"{event}"' in line]
