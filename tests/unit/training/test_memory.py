"""The memory estimate, compared with the bytes that torch's allocator reports in real train steps on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from trinity_mq.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, TrainerConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.training.memory.estimate import estimate, measure_requests
from trinity_mq.training.memory.measure import measure
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.optimizers import make_optimizer
from trinity_mq.training.packing import train_tokens
from trinity_mq.training.update import StepLoss, optimizer_step

SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
QWEN = Qwen2Config(
    vocab_size=16000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, tie_word_embeddings=True, **SHARED
)
LLAMA = LlamaConfig(
    vocab_size=16000, hidden_size=160, intermediate_size=640, num_hidden_layers=8, tie_word_embeddings=False, **SHARED
)
TOLERANCE = 0.15


def saved(shape: PreTrainedConfig, folder: Path) -> Path:
    """Write a model folder without weights."""
    shape.save_pretrained(folder)
    return folder


def settings(folder: Path, dtype: str, optimizer: dict[str, Any] | None = None, **trainer: Any) -> Config:
    return Config(
        model=ModelConfig(
            model_path=str(folder),
            dtype=dtype,
            device="cpu",
            max_model_len=512,
            max_prompt_tokens=64,
            max_response_tokens=448,
        ),
        algorithm=AlgorithmConfig(algorithm_type="grpo", optimizer=OptimizerConfig(**(optimizer or {}))),
        trainer=TrainerConfig(packing="padded", share_prefixes=False, async_save=False, **trainer),
    )


def sequences(count: int, length: int, vocabulary: int) -> ExperienceBatch:
    draw = random.Random(0)
    return ExperienceBatch.of(
        [
            Experience(
                eid=EID(0, 0, run),
                tokens=[draw.randrange(vocabulary) for _ in range(length)],
                prompt_length=8,
                logprobs=[-8.0] * (length - 8),
                advantages=[draw.uniform(-1, 1)] * (length - 8),
            )
            for run in range(count)
        ]
    )


def allocated(report: Path) -> int:
    """Return the maximum of the bytes that the allocator added in a trace of torch's profiler."""
    events = [event for event in json.loads(report.read_text())["traceEvents"] if event["name"] == "[memory]"]
    sizes = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(size["Total Allocated"] for size in sizes) - sizes[0]["Total Allocated"] + sizes[0]["Bytes"]


def peak(config: Config, shape: PreTrainedConfig, tokens: int, scratch: Path) -> int:
    """Make two optimizer steps, each of two passes, with a random model; return the maximum bytes of the allocator."""
    from transformers import AutoModelForCausalLM

    folder = scratch / "model"
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    batch = sequences(2 * tokens // 256, 256, shape.vocab_size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy = Policy(config.model, folder, 0, config.trainer)
        for weight in policy.parameters:
            weight.data = weight.data.clone()  # the loaded weights lie in the mapped file
        optimizer = make_optimizer(policy.model, config.algorithm.optimizer)
        weights = {"rl": 1.0}
        step = train_tokens(batch, config.algorithm, weights, 1)
        for _ in range(2):
            batches = policy.division.of(step, range(len(batch)), config.reduction)
            assert len(batches) == 2
            optimizer_step(policy, optimizer, batches, StepLoss(config.algorithm, weights), {}, 1.0)
    profiler.export_chrome_trace(str(scratch / "trace.json"))
    return allocated(scratch / "trace.json")


@pytest.mark.parametrize(
    ("shape", "dtype", "changes"),
    [
        pytest.param(QWEN, "float32", {"gradient_checkpointing": False}, id="all activations"),
        pytest.param(LLAMA, "float32", {"gradient_checkpointing": True}, id="recomputed blocks"),
    ],
)
def test_the_estimate_is_near_the_memory_of_a_train_step(
    tmp_path: Path, shape: PreTrainedConfig, dtype: str, changes: dict[str, Any]
) -> None:
    config = settings(saved(shape, tmp_path), dtype, max_tokens_per_micro_batch=512, **changes)
    measured = {name: measure(request) for name, request in measure_requests(config, "cpu").items()}
    estimated = estimate(config, "cpu", measured)
    real = peak(config, shape, 512, tmp_path)
    assert estimated.trainer_bytes == pytest.approx(real, rel=TOLERANCE)
