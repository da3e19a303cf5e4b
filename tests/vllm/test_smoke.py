"""The smoke example on both engines, as a stranger runs it: real broker, real processes, a real model that learns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

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

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


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
    async with LocalRun(config, run_dir, overrides) as run:
        code, output = await run.ended(1100.0)
    assert code == 0, output
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


async def test_it_learns_alike_on_both_engines_which_agree_with_the_trainer_after_every_sync(tmp_path: Path) -> None:
    ours = await run_on("transformers", EXAMPLES / "smoke.yaml", tmp_path / "ours")
    vllm = await run_on("vllm", EXAMPLES / "smoke-vllm.yaml", tmp_path / "vllm")
    assert vllm.accuracy[0] == ours.accuracy[0], "the same weights answer the same"
    assert abs(vllm.accuracy[STEPS] - ours.accuracy[STEPS]) <= ALIKE, (vllm.accuracy, ours.accuracy)
    last = [sum(seen.rewards[-LAST:]) / LAST for seen in (vllm, ours)]
    assert abs(last[0] - last[1]) <= ALIKE, last
    assert min(last) >= max(vllm.rewards[0], ours.rewards[0]) + RISE, last
