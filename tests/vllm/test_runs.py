"""Whole runs on vLLM, as a stranger starts them: real broker, real processes, real models that learn."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_debug_workflow import debug_one_task
from tests.e2e.test_smollm2 import NEEDS_MODEL, run_steps
from tests.processes import completed
from tests.serve_clients import served, train_by_program
from trinity_mq.sync.gate.canary import LIMITS
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = "eval/max3_held_out/accuracy/mean@1"
STEPS = 100
"""More than in the example: what two engines draw differs less at the end of a run than on the way."""
AGREE = 1e-4
RISE = 0.4
"""What smoke.yaml promises of its held-out accuracy."""
ALIKE = 0.2
"""Between the engines, which draw other numbers: of the mean reward of the last steps, and of the final accuracy."""
LAST = 10
START_SECONDS = 300.0


@dataclass(frozen=True)
class Seen:
    """What a run on one engine came to."""

    accuracy: dict[int, float]
    rewards: list[float]


async def run_on(engine: str, config: Path, run_dir: Path) -> Seen:
    """Run the example; trainer and engine must agree on every token, and after every sync."""
    # without offset every batch is sampled by the weights that train on it, so that all its logprobs must be equal
    overrides = (
        "synchronizer.sync_offset=0",
        f"buffer.total_steps={STEPS}",
        f"explorer.eval_interval={STEPS // 2}",
        "trainer.save_interval=50",
    )
    run, _ = await completed(config, run_dir, overrides, seconds=1100.0)
    settings = json.loads((run_dir / "engines" / "explorer-0-engine.config.json").read_text())
    assert settings["explorer"]["rollout_model"]["engine"] == engine
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, STEPS // 2, STEPS}
    assert accuracy[STEPS] >= accuracy[0] + RISE, f"{engine}: {accuracy}"
    assert run.values("eval/max3_held_out/version/min")[-1] == (STEPS, STEPS), "the final weights were evaluated"
    differences = dict(run.values("rollout/rollout_vs_train_logprob_diff/max"))
    assert list(differences) == list(range(1, STEPS + 1))
    assert max(differences.values()) <= AGREE
    # a version is committed where the engine's logprobs of the canary are the trainer's, to this
    assert LIMITS["float32"].largest <= AGREE
    assert max(aborts for _, aborts in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
    log = (run_dir / "logs" / "explorer-0-engine.jsonl").read_text().splitlines()
    committed = [json.loads(line)["version"][1] for line in log if '"weights_committed"' in line]
    assert sorted(set(committed)) == list(range(STEPS + 1)), "every version of the run went through the gate"
    return Seen(accuracy, [value for _, value in run.values("rollout/reward/mean")])


@pytest.mark.e2e
@pytest.mark.timeout(2400)
async def test_it_learns_alike_on_both_engines_which_agree_with_the_trainer_after_every_sync(tmp_path: Path) -> None:
    ours = await run_on("transformers", EXAMPLES / "smoke.yaml", tmp_path / "ours")
    vllm = await run_on("vllm", EXAMPLES / "smoke-vllm.yaml", tmp_path / "vllm")
    assert vllm.accuracy[0] == ours.accuracy[0], "the same weights answer the same"
    assert abs(vllm.accuracy[STEPS] - ours.accuracy[STEPS]) <= ALIKE, (vllm.accuracy, ours.accuracy)
    last = [sum(seen.rewards[-LAST:]) / LAST for seen in (vllm, ours)]
    assert abs(last[0] - last[1]) <= ALIKE, last
    assert min(last) >= max(vllm.rewards[0], ours.rewards[0]) + RISE, last


LORA_STEPS = 60


@pytest.mark.e2e
@pytest.mark.timeout(1200)
async def test_a_run_learns_with_adapters_that_engine_and_trainer_agree_on(tmp_path: Path) -> None:
    settings = (
        "model.lora={r: 16, alpha: 32, sync: adapter}",
        "algorithm.optimizer.lr=5e-3",
        "synchronizer.sync_offset=0",
        f"buffer.total_steps={LORA_STEPS}",
        f"explorer.eval_interval={LORA_STEPS}",
    )
    run, _ = await completed(EXAMPLES / "smoke-vllm.yaml", tmp_path / "run", settings, seconds=1000.0)
    accuracy = dict(run.values(ACCURACY))
    assert accuracy[LORA_STEPS] >= accuracy[0] + RISE, accuracy
    assert max(value for _, value in run.values("rollout/rollout_vs_train_logprob_diff/max")) <= AGREE
    assert max(count for _, count in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
    log = (tmp_path / "run" / "logs" / "explorer-0-engine.jsonl").read_text().splitlines()
    committed = [json.loads(line)["version"][1] for line in log if '"weights_committed"' in line]
    assert sorted(set(committed)) == list(range(LORA_STEPS + 1)), "every version of the run went through the gate"


SPLIT_STEPS = 12
TEACHER = {"name": "teacher", "engine": "vllm", "vllm": {"kv_cache_memory_bytes": 2**25}}
PLACES = {
    "collective": ("smoke-vllm.yaml", ("explorer.rollout_model.engine_num=2",)),
    "checkpoint": ("smoke-vllm.yaml", ()),
    "memory": ("distill.yaml", ("model.tiny.head_dim=32",)),
}
"""The example of each run, and what is special in it: several engines, and a teacher on vLLM."""


@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("method", PLACES)
async def test_a_run_whose_engines_are_split_agrees_with_its_trainer_after_every_sync(
    method: str, tmp_path: Path
) -> None:
    example, special = PLACES[method]
    settings = [
        f"synchronizer.sync_method={method}",
        "synchronizer.sync_offset=0",
        f"buffer.total_steps={SPLIT_STEPS}",
        f"explorer.eval_interval={SPLIT_STEPS}",
        "explorer.rollout_model.engine=vllm",
        "explorer.rollout_model.tensor_parallel_size=2",
        "explorer.rollout_model.vllm.kv_cache_memory_bytes=33554432",
        *special,
    ]
    if method == "memory":
        model = yaml.safe_load((EXAMPLES / "smoke-vllm.yaml").read_text())["model"]
        settings.append(f"explorer.auxiliary_models={json.dumps([{**TEACHER, 'model': model}])}")
    run, _ = await completed(EXAMPLES / example, tmp_path / "run", tuple(settings), seconds=1400.0)
    differences = dict(run.values("rollout/rollout_vs_train_logprob_diff/max"))
    assert list(differences) == list(range(1, SPLIT_STEPS + 1))
    assert max(differences.values()) <= AGREE
    assert max(count for _, count in run.values("sync/aborts")) == 0, "each sync's canary agreed at the first try"
    engines = sorted(path.name.split(".")[0] for path in (tmp_path / "run" / "engines").glob("*-engine*.config.json"))
    assert len(engines) == (2 if method == "collective" else 1)
    for engine in engines:
        committed = {line["version"][1] for line in logged(run, engine, "weights_committed")}
        assert committed >= {SPLIT_STEPS}, "the final weights came to all"
        assert len(committed) == SPLIT_STEPS + 1 or len(engines) > 1, "every version went through the gate"
        assert logged(run, engine, "engine_done")[-1]["sequences"] > 0
    if method == "memory":
        asked = logged(run, "explorer-0-auxiliary-teacher", "engine_done")[-1]
        assert asked["sequences"] >= SPLIT_STEPS * 16 * 8, "it has scored every response"


STEP_WISE_STEPS = 30


@pytest.mark.e2e
@pytest.mark.timeout(1500)
async def test_a_step_wise_workflow_learns_on_two_vllm_engines(tmp_path: Path) -> None:
    overrides = (
        f"buffer.total_steps={STEP_WISE_STEPS}",
        f"explorer.eval_interval={STEP_WISE_STEPS}",
        f"plugin_dirs=['{EXAMPLES}']",
        "explorer.rollout_model.engine=vllm",
        "explorer.rollout_model.engine_num=2",
        "explorer.rollout_model.vllm.kv_cache_memory_bytes=33554432",
    )
    run, _ = await completed(EXAMPLES / "step-wise.yaml", tmp_path / "run", overrides, seconds=1400.0)
    accuracy = dict(run.values(ACCURACY))
    assert set(accuracy) == {0, STEP_WISE_STEPS}
    assert accuracy[STEP_WISE_STEPS] >= accuracy[0] + 0.1, accuracy
    assert len(run.values("rollout/reward/mean")) == STEP_WISE_STEPS
    counted = sum(value for _, value in run.values("sample/experiences"))
    assert counted > STEP_WISE_STEPS * 8 * 8, "runs that got the first step right made a second"
    assert max(aborts for _, aborts in run.values("sync/aborts")) == 0, "each sync's canary agreed on both"
    engines = sorted(path.name.split(".")[0] for path in (tmp_path / "run" / "engines").glob("*.config.json"))
    assert len(engines) == 2
    committed = [[line["version"] for line in logged(run, engine, "weights_committed")] for engine in engines]
    assert committed[0][-1] == committed[1][-1]
    few, many = sorted(({tuple(version) for version in versions} for versions in committed), key=len)
    assert few <= many, "the gate gave both the same versions"
    assert len(few) >= STEP_WISE_STEPS // 2, "both were there for most of the run"
    served = {engine: logged(run, engine, "engine_done")[-1]["sequences"] for engine in engines}
    assert min(served.values()) > 0, f"both have answered: {served}"


def logged(run: LocalRun, who: str, event: str) -> list[dict[str, Any]]:
    """What an engine has logged of one kind."""
    lines = (run.run_dir / "logs" / f"{who}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if f'"{event}"' in line]


@pytest.mark.e2e
@pytest.mark.timeout(700)
def test_one_task_on_vllm_without_a_broker(tmp_path: Path) -> None:
    choice = debug_one_task(tmp_path, EXAMPLES / "smoke-vllm.yaml")
    assert len(choice["token_texts"]) == len(choice["logprobs"]) > 0
    assert all(logprob < 0 for logprob in choice["logprobs"])


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@NEEDS_MODEL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_trained_model_trains_syncs_and_answers_alike(dtype: str, tmp_path: Path) -> None:
    await run_steps("vllm", dtype, tmp_path / "run")


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_a_client_trains_what_vllm_serves(tmp_path: Path) -> None:
    words = (
        "gateway.not_ready_timeout=300",
        "explorer.rollout_model.engine=vllm",
        "explorer.rollout_model.vllm.kv_cache_memory_bytes=67108864",
    )
    async with served(tmp_path, *words, seconds=START_SECONDS) as (run, agents), asyncio.timeout(600):
        asked = {"messages": [{"role": "user", "content": "3,7,2="}]}
        status, answer = await agents.send("POST", "/v1/chat/completions", asked)  # waits for vLLM to have started
        assert status == 200, answer
        status, _ = await agents.send("POST", "/feedback", {"reward": 1.0, "msg_ids": [answer["id"]]})
        assert status == 200
        program = (sys.executable, str(EXAMPLES / "agents" / "openai_python.py"))
        await train_by_program(program, run, agents, earlier=1)
