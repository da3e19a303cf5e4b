"""The memory estimate, compared with the bytes that torch's allocator reports in real train steps on a CPU."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from tests.unit.training.test_critic_and_reference import rewarded
from tests.unit.training.test_learner import Opener, batch
from tests.unit.training.test_learner import config as learner_config
from trinity_mq.config import AlgorithmConfig, Config, ModelConfig, OptimizerConfig, TrainerConfig
from trinity_mq.config.agents import RolloutModelConfig
from trinity_mq.config.engines import AuxiliaryModelConfig
from trinity_mq.config.vllm import VllmConfig
from trinity_mq.experience import EID, Experience, ExperienceBatch
from trinity_mq.runtime.errors import DeviceMemoryError, RestartRequested
from trinity_mq.runtime.gpu_memory import SHARED_VARIABLE, release_cached_memory
from trinity_mq.training.memory.estimate import (
    Measured,
    MeasureRequest,
    ModelMemory,
    estimate,
    fixed_parts,
    host_parts,
    measure_requests,
)
from trinity_mq.training.memory.measure import (
    Card,
    answer,
    choose_limit,
    describe_lack,
    measure,
    measure_trained,
    remedies,
)
from trinity_mq.training.model.policy import Policy
from trinity_mq.training.optimizers import make_optimizer
from trinity_mq.training.packing import train_tokens
from trinity_mq.training.update import StepLoss, optimizer_step

pytestmark = pytest.mark.timeout(240)  # passes without data take thousands of Python calls

SHARED = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
QWEN = Qwen2Config(
    vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, tie_word_embeddings=True, **SHARED
)
LLAMA = LlamaConfig(
    vocab_size=32000, hidden_size=128, intermediate_size=512, num_hidden_layers=5, tie_word_embeddings=False, **SHARED
)
TOLERANCE = 0.15
COPY = "checkpoint copy"


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
    before: int = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
    return max(int(size["Total Allocated"]) for size in sizes) - before


def peak(config: Config, shape: PreTrainedConfig, tokens: int, scratch: Path) -> int:
    """Make two optimizer steps, each of two passes, with a random model; return the maximum bytes of the allocator."""
    from transformers import AutoModelForCausalLM

    folder = scratch / "model"
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    batch = sequences(2 * tokens // 128, 128, shape.vocab_size)
    gc.collect()  # tensors of earlier tests that are freed meanwhile would count against the maximum
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy = Policy(config.model, folder, 0, config.trainer)
        for weight in policy.parameters:
            weight.data = weight.data.clone()  # the loaded weights lie in the mapped file
        optimizer = make_optimizer(policy.model, config.algorithm.optimizer)
        weights = {"rl": 1.0}
        step = train_tokens(batch, config.algorithm, weights, 1)
        for _ in range(2):
            batches = step.micro_batches(range(len(batch)), policy.division, config.reduction)
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
    config = settings(saved(shape, tmp_path), dtype, max_tokens_per_micro_batch=384, **changes)
    measured = {name: measure(request) for name, request in measure_requests(config, "cpu").items()}
    estimated = estimate(config, "cpu", measured)
    real = peak(config, shape, 384, tmp_path)
    assert estimated.trainer_bytes == pytest.approx(real, rel=TOLERANCE)


CARD = Card("NVIDIA GeForce RTX 4090", total=24 * 10**9, free=23 * 10**9)
SMALL = {"max_model_len": 512, "max_prompt_tokens": 64, "max_response_tokens": 448}
LAYERS = 4
SHAPE = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=LAYERS,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, Measured]]:
    """The first layers of Qwen2.5-0.5B on a GPU, and their measured memory."""
    folder = saved(SHAPE, tmp_path_factory.mktemp("half"))
    config = Config(model=ModelConfig(model_path=str(folder), dtype="bfloat16", **SMALL))
    return config, measure_trained(config, "cuda")


def test_figures_of_a_known_model(on_gpu: tuple[Config, dict[str, Measured]]) -> None:
    config, measured = on_gpu
    value = estimate(config, "cuda", measured, 8192)
    assert value.trainer is not None
    layer = 2 * 896 * 896 + 896 + 2 * (896 * 128 + 128) + 3 * 896 * 4864 + 2 * 896
    weights = 151936 * 896 + LAYERS * layer + 896
    assert value.trainer["weights"] == value.trainer["gradients"] == 4 * weights
    assert value.trainer["optimizer"] == 8 * weights
    assert value.engine is not None
    assert value.engine["weights"] == 2 * weights
    sizes = measured["model"]
    assert isinstance(sizes, ModelMemory)
    assert sizes.cache == 2 * LAYERS * 2 * 64
    assert sizes.passes is not None
    residual = 896 * 4  # float32 under autocast, kept for each layer and around the head
    assert LAYERS * residual < sizes.passes.kept.per_token <= (LAYERS + 3.1) * residual


def test_equal_layers_are_measured_on_a_shallow_model(
    on_gpu: tuple[Config, dict[str, Measured]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, measured = on_gpu
    monkeypatch.setattr("trinity_mq.training.memory.measure.DEPTHS", (LAYERS, LAYERS))
    assert measure_trained(config, "cuda") == measured


def test_sharing_divides_what_a_rank_holds(on_gpu: tuple[Config, dict[str, Measured]]) -> None:
    config, measured = on_gpu
    sizes = measured["model"]
    assert isinstance(sizes, ModelMemory)
    alone = fixed_parts(sizes, config, "cuda")
    offloaded = fixed_parts(sizes, changed(config, optimizer={"offload": True}), "cuda")
    eight_bit = fixed_parts(sizes, changed(config, optimizer={"optimizer_type": "adamw_8bit"}), "cuda")
    assert offloaded["optimizer"] == 0
    assert 3.8 < alone["optimizer"] / eight_bit["optimizer"] < 4
    four = fixed_parts(sizes, changed(config, trainer={"nproc": 4}), "cuda")
    assert [alone[name] / four[name] for name in ("weights", "gradients", "optimizer")] == [4, 4, 4]
    assert four["gathered"] > 2 * (sizes.root + sizes.block)
    copies = [
        host_parts(sizes, changed(config, trainer={"nproc": ranks, "async_save": waits_not}), "cuda").get(COPY)
        for ranks, waits_not in ((1, True), (4, True), (4, False), (1, False))
    ]
    assert copies == [12 * sizes.trained, 3 * sizes.trained, 3 * sizes.trained, None]


def test_an_auxiliary_engine_has_the_cache_of_its_own_section(on_gpu: tuple[Config, dict[str, Measured]]) -> None:
    config, measured = on_gpu
    judge = AuxiliaryModelConfig(
        name="judge", engine="vllm", model=config.model, vllm=VllmConfig(kv_cache_memory_bytes=2**30)
    )
    served = changed(config, explorer={"auxiliary_models": (judge,)})
    parts = estimate(served, "cuda", measured | {"judge": measured["model"]}).auxiliary["judge"]
    assert parts is not None
    assert parts["cache"] == 2**30


def changed(config: Config, *, optimizer: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Config:
    algorithm = config.algorithm
    updates: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    if optimizer:
        new = algorithm.optimizer.model_copy(update=optimizer)
        updates["algorithm"] = algorithm.model_copy(update={"optimizer": new})
    return config.model_copy(update=updates)


def test_the_largest_pass_that_fits_is_chosen(on_gpu: tuple[Config, dict[str, Measured]]) -> None:
    config, measured = on_gpu

    def limit(free: float, *, shared: bool = False, config: Config = config) -> int:
        card = Card("GPU", total=24 * 10**9, free=round(free * 1e9))
        return choose_limit(config, card, measured, shared=shared).tokens

    chosen = [limit(free) for free in (5.0, 8.0, 12.0, 23.0)]
    assert chosen == sorted(chosen)
    assert chosen[0] == 2048, "no value fits, so the smallest is tried"
    assert chosen[-1] > 16384
    on_vllm = changed(config, explorer={"rollout_model": RolloutModelConfig(engine="vllm")})
    assert limit(23.0, shared=True, config=on_vllm) == limit(11.3), "an engine that starts later finds its half"
    unknown = choose_limit(config, CARD, {"model": "it is not downloaded"}, shared=False)
    assert (unknown.tokens, unknown.reason) == (4096, "no estimate: it is not downloaded")


def test_advice_names_the_settings_of_this_run_by_their_effect(on_gpu: tuple[Config, dict[str, Measured]]) -> None:
    config, _ = on_gpu
    kept = changed(config, trainer={"gradient_checkpointing": False, "max_tokens_per_micro_batch": 32768})
    measured = measure_trained(kept, "cuda")
    advice = remedies(kept, "cuda", measured, 32768, shared=True)
    assert [remedy.saved for remedy in advice] == sorted((remedy.saved for remedy in advice), reverse=True)
    names = [remedy.setting.split("=")[0] for remedy in advice]
    assert names[0] == "trainer.gradient_checkpointing"
    lora, offload, ranks = "model.lora", "algorithm.optimizer.offload", "trainer.nproc"
    assert {"trainer.max_tokens_per_micro_batch", lora, offload, ranks} < set(names)
    lack = describe_lack("step", RuntimeError(), CARD, estimate(kept, "cuda", measured, 32768), advice, is_first=True)
    assert "RTX 4090 has 24.0 GB, of which 23.0 GB are free" in lack
    assert "GB with passes of 32768 tokens (weights 0.8 GB, gradients 0.8 GB" in lack
    assert f"first: trainer.gradient_checkpointing=true ({advice[0].saved / 1e9:.1f} GB)" in lack
    frugal = changed(config, optimizer={"offload": True}, trainer={"max_tokens_per_micro_batch": 512})
    names = [remedy.setting for remedy in remedies(frugal, "cuda", measured, 512, shared=False)]
    assert not [name for name in names if name.startswith(("trainer.", "algorithm"))]


def fill_memory(_module: torch.nn.Module, _arguments: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


async def test_a_lack_of_memory_ends_the_run_in_the_first_step_and_restarts_it_later(opened: Opener) -> None:
    for steps, kind in ((0, DeviceMemoryError), (1, RestartRequested)):
        learner = await opened()
        for step in range(1, steps + 1):
            await learner.step(batch(step), step)
        learner.policy.model.register_forward_pre_hook(fill_memory)
        with pytest.raises(kind, match=r"out of memory in step; CUDA out of memory.*GB.*trainer\.gradient_checkp"):
            await learner.step(batch(steps + 1), steps + 1)


def no_memory(*_arguments: Any, **_settings: Any) -> Any:
    fill_memory(torch.nn.Identity(), ())


LACKS: dict[str, tuple[str, str, str]] = {
    "backward pass": ("", "step", "kl"),
    "optimizer step": ("trinity_mq.training.learner.optimizer_step", "step", "kl"),
    "reference": ("trinity_mq.training.reference.Reference.logprobs", "step", "kl"),
    "critic": ("trinity_mq.training.critic.Critic.optimizer_step", "step", "ppo"),
    "weights for engines": ("trinity_mq.training.model.policy.Policy.weights", "weight sync", "kl"),
    "canary": ("trinity_mq.training.model.policy.Policy.sequence_logprobs", "canary", "kl"),
    "checkpoint copy": ("trinity_mq.training.checkpoints.state.HostCopies.take", "copy", "kl"),
    "export": ("trinity_mq.training.model.policy.Policy.save", "export", "kl"),
}


@pytest.mark.parametrize("place", LACKS)
async def test_a_lack_of_memory_anywhere_names_settings_and_spares_the_checkpoint(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    target, what, kind = LACKS[place]
    ppo = {"algorithm_type": "ppo", "kl": None, "repeat_times": 1, "critic": {"lr": 1e-3}}
    settings = ppo if kind == "ppo" else {"kl": {"kind": "k2", "coef": 0.1}}
    tiny = learner_config(**settings)
    learner = await opened(tiny)
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    digest = await learner.save(tmp_path / "before")
    experiences = rewarded(1) if kind == "ppo" else batch(1)
    calls: dict[str, Any] = {
        "weight sync": learner.weights,
        "canary": lambda: learner.canary_logprobs([3, 4, 5]),
        "copy": learner.stage,
        "export": lambda: learner.export(tmp_path / "model"),
    }
    with monkeypatch.context() as patch:
        if target:
            patch.setattr(target, no_memory)
        else:
            learner.policy.parameters[0].register_hook(no_memory)
        with pytest.raises(DeviceMemoryError, match=rf"out of memory in {what}; CUDA out of memory.*trainer\.gradient"):
            await calls.get(what, lambda: learner.step(experiences, 1))()
    again = await opened(tiny, checkpoint=tmp_path / "before")
    assert await again.save(tmp_path / "after") == digest


async def test_a_resumed_trainer_keeps_the_size_of_its_passes(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = CARD
    monkeypatch.setattr("trinity_mq.training.learner.card_of", lambda _device: card)
    tiny = learner_config().model_copy(update={"trainer": TrainerConfig()})
    learner = await opened(tiny)
    assert learner.policy.division.max_tokens == 65536
    await learner.step(batch(1), 1)
    await learner.save(tmp_path)
    card = replace(CARD, free=10**6)
    resumed = await opened(tiny, checkpoint=tmp_path)
    assert resumed.policy.division.max_tokens == 65536
    card = replace(CARD, free=10**6, total=10**9)
    elsewhere = await opened(tiny, checkpoint=tmp_path)
    assert elsewhere.policy.division.max_tokens == 2048


PROGRAM = """
import dataclasses, json, sys
from trinity_mq.config import load_config
from trinity_mq.operations.memory import estimate_memory
value = estimate_memory(load_config(json.loads(sys.argv[1])))
print(json.dumps([dataclasses.asdict(value), "torch" in sys.modules]))
"""


def test_an_estimate_needs_neither_torch_here_nor_a_model_on_this_machine() -> None:
    judge = {"name": "judge", "model": {"tiny": {}}}
    absent = {"name": "absent", "model": {"model_path": "nobody/not-downloaded"}}
    settings = {"model": {"tiny": {}}, "explorer": {"auxiliary_models": [judge, absent]}}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)], capture_output=True, text=True, check=True, timeout=200
    )
    value, has_torch = json.loads(done.stdout)
    assert not has_torch
    assert value["trainer"]["weights"] == value["trainer"]["gradients"] > 0
    assert (value["auxiliary"]["judge"]["weights"], value["auxiliary"]["absent"]) == (value["trainer"]["weights"], None)
    assert value["unknown"] == {
        "absent": "model nobody/not-downloaded is a hub id and not downloaded yet, so its size is not known; "
        "`hf download nobody/not-downloaded` downloads it"
    }


@pytest.mark.parametrize("is_shared", [True, False])
def test_only_a_shared_gpu_gets_freed_memory_back(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setenv(SHARED_VARIABLE, "1" if is_shared else "0")
    release_cached_memory()
    assert calls == ["empty"] * is_shared


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError: integer division"),
        ({"num_attention_heads": "four"}, "Validation error for field 'num_attention_heads'"),
        ({"num_hidden_layers": 10**12}, "it has 1000000000000 layers, wanted at most 4096"),
        ({"model_type": "custom"}, "custom"),
        (None, "its content is 'None', wanted a JSON object"),
    ],
)
def test_a_damaged_folder_gives_a_reason_and_its_code_does_not_run(
    tmp_path: Path, changes: dict[str, Any] | None, reason: str
) -> None:
    (tmp_path / "configuration_custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    code = {"AutoConfig": "configuration_custom.Custom"}
    settings = {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 2, "auto_map": code, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(changes and {**settings, **changes}))
    result = answer(MeasureRequest({"model_path": str(tmp_path)}, "cuda", passes=False))
    assert isinstance(result, str)
    assert reason in result
    assert not (tmp_path / "ran").exists()
