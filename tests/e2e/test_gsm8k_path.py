"""The path of examples/gsm8k.yaml on the real data: chat template, verifier, training steps; a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.byte_model import make_model
from trinity_mq.testing.runs import LocalRun

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "gsm8k"
pytestmark = [pytest.mark.extended, pytest.mark.e2e, pytest.mark.any_broker, pytest.mark.timeout(300)]


@pytest.mark.skipif(not DATA.exists(), reason="the GSM8K files are not beside this checkout")
async def test_gsm8k_runs_with_a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model", (DATA / "train.jsonl").read_text().splitlines()[:300])
    monkeypatch.setenv("TRINITY_MQ_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("TRINITY_MQ_GSM8K", str(DATA))
    small = (
        "model.dtype=float32",
        "model.max_response_tokens=12",
        "model.max_prompt_tokens=700",
        "buffer.batch_size=4",
        "buffer.total_steps=3",
        "algorithm.repeat_times=4",
        "explorer.max_consecutive_empty=10",
        "trainer.save_interval=2",
    )
    async with LocalRun(ROOT / "examples" / "gsm8k.yaml", tmp_path / "run", small) as run:
        code, output = await run.ended(240.0)
    assert code == 0, output
    assert [step for step, _ in run.values("trainer/step")] == [1, 2, 3]
    assert [outcome for _, outcome in run.values("sample/skipped_step")] == [0.0] * 3
    assert run.values("prompt_length/mean")[0][1] > 50, "question, instructions and template are in the prompt"
    accuracy = run.values("eval/gsm8k_test/accuracy/mean@1")
    assert [step for step, _ in accuracy] == [0, 3]
    assert all(0.0 <= value <= 0.1 for _, value in accuracy)
    assert run.values("rollout/rollout_vs_train_logprob_diff/max")[0][1] < 1e-4, "tied embeddings, synced right"
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
