"""Adapters on a CUDA device, on plain weights and on quantized ones."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.training.test_composed_losses import rows
from tests.unit.training.test_learner import make_model
from tests.unit.training.test_lora import TOKENS, with_lora
from trinity_mq.config import Config
from trinity_mq.training.learner import TorchLearner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test compiles flex attention

BITS = [
    None,
    *(
        pytest.param(bits, marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="no bitsandbytes here"))
        for bits in ("4bit", "8bit")
    ),
]


def on_cuda(dtype: str, bits: str | None) -> Config:
    data = with_lora(dtype, quantization=bits).model_dump(mode="json")
    data["model"]["device"] = "cuda"
    return Config.model_validate(data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", BITS)
async def test_adapters_train_and_the_merged_model_says_the_same(tmp_path: Path, dtype: str, bits: str | None) -> None:
    model = make_model(tmp_path / "model")
    learner = TorchLearner(on_cuda(dtype, bits), model, None)
    await learner.open(None)
    before = await learner.canary_logprobs(TOKENS)
    for step in range(1, 9):
        assert (await learner.step(rows("grpo", step), step))["actor/optimizer_steps"] == 1.0
    found = await learner.canary_logprobs(TOKENS)
    assert found != pytest.approx(before, abs=0.05)
    await learner.export(tmp_path / "final")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32).eval()
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logprobs = merged(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    # 8 bits of weights come with 8 bits of activations, whose rounding the merged model has not
    assert logprobs.tolist() == pytest.approx(found, abs=1e-4 if (dtype, bits) == ("float32", None) else 0.1)
    (tmp_path / "saved").mkdir()
    await learner.save(tmp_path / "saved")
    again = TorchLearner(on_cuda(dtype, bits), model, None)
    await again.open(tmp_path / "saved")
    assert await again.canary_logprobs(TOKENS) == pytest.approx(found, abs=1e-5)
    await learner.close()
    await again.close()
