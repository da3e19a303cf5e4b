"""examples/smollm2.yaml with vLLM as the engine: a trained model with tied embeddings, in both dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_smollm2 import NEEDS_MODEL, run_steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), NEEDS_MODEL]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_trained_model_trains_syncs_and_answers_alike(dtype: str, tmp_path: Path) -> None:
    await run_steps("vllm", dtype, tmp_path / "run")
