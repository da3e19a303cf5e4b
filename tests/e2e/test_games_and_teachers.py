"""A game, and a teacher, as whole runs: real broker, real processes, real models."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.config import load_config
from trinity_mq.models.model_folder import ensure_model_folder
from trinity_mq.testing.runs import LocalRun

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(600)]


async def test_frozen_lakes_are_walked_and_learned_from(tmp_path: Path) -> None:
    lakes = EXAMPLES / "frozen_lake"
    short = (
        "buffer.total_steps=3",
        "buffer.batch_size=4",
        "explorer.eval_on_startup=false",
    )
    config = tmp_path / "frozen-lake.yaml"
    text = (EXAMPLES / "frozen-lake.yaml").read_text(encoding="utf-8")
    config.write_text(text.replace("examples/frozen_lake", str(lakes)), encoding="utf-8")
    async with LocalRun(config, tmp_path / "run", short) as run:
        code, output = await run.ended(540.0)
    assert code == 0, output
    assert [step for step, _ in run.values("trainer/step")] == [1, 2, 3]
    steps = run.values("rollout/actual_env_steps/max")
    assert len(steps) == 3
    assert 1 <= max(value for _, value in steps) <= 6
    for name in ("success", "moves", "unclear_answers", "fallen"):
        assert len(run.values(f"rollout/{name}/mean")) == 3, name
    assert run.values("eval/lakes_held_out/finished_task_count")[-1] == (3, 60.0)


async def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    text = (EXAMPLES / "distill.yaml").read_text(encoding="utf-8")
    (tmp_path / "distill.yaml").write_text(text.replace("runs/smoke/final", str(tmp_path / "teacher")))
    smoke = load_config(EXAMPLES / "smoke.yaml")
    sharp = smoke.model.tiny.model_copy(update={"initializer_range": 0.3})  # random, but with opinions of its own
    ensure_model_folder(smoke.model.model_copy(update={"tiny": sharp}), tmp_path / "teacher", 7)
    short = (
        "buffer.total_steps=60",
        "explorer.eval_interval=60",
        "algorithm.optimizer.lr_warmup_steps=1",
        "explorer.eval_on_startup=false",
    )
    async with LocalRun(tmp_path / "distill.yaml", tmp_path / "run", short) as run:
        code, output = await run.ended(540.0)
    assert code == 0, output
    distance = [value for _, value in run.values("rollout/kl_divergence/mean")]
    assert len(distance) == 60
    assert sum(distance[-10:]) < 0.85 * sum(distance[:10]), distance
    by_advantage = [value for _, value in run.values("advantage/kl/mean")]
    assert by_advantage == pytest.approx(distance, abs=1e-5), "the same tokens, seen by the workflow and the algorithm"
    assert {value for _, value in run.values("rollout/nonfinite_logprobs")} == {0.0}
