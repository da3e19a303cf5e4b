"""Estimate of the memory of trainer and engines, as arithmetic over the sizes that
:mod:`trinity_mq.training.memory.measure` measures.

This module imports no torch. :data:`ASSUMED` holds the sizes that are neither measured nor computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from trinity_mq.config.agents import RolloutModelConfig
from trinity_mq.config.algorithm.needs import needs_reference
from trinity_mq.config.engines import AuxiliaryModelConfig, engine_row
from trinity_mq.config.model import ModelConfig
from trinity_mq.config.run import Config

Device = Literal["cpu", "cuda"]
GIB = 2**30
ASSUMED = {
    "context": 700 * 2**20,
    "communication": 500 * 2**20,
    "engine context": 1200 * 2**20,
    "process": 2 * GIB,
}
"""Bytes that no measurement without a GPU can show. ``context``: CUDA context and libraries of the trainer on the
device. ``communication``: buffers of NCCL for each rank. ``engine context``: CUDA context, graphs and workspace of an
engine. ``process``: host memory of a rank before it holds tensors.
"""
PART = 2**26
"""Parameters that an optimizer step updates at a time."""
FOUR_BIT, EIGHT_BIT = 0.516, 1.004
"""Bytes of a quantized weight with its scales (arXiv 2305.14314, section 3; arXiv 2208.07339)."""
TOKEN_STEPS = tuple(2**power for power in range(11, 17))
"""Values of ``trainer.max_tokens_per_micro_batch: auto`` on a GPU, 2048 to 65536. The steps are coarse, so that small
differences of the free memory do not change the division of a step.
"""
ASSUMED_SUFFIX = "(assumed)"
"""End of the name of a part that is an assumption, not a measurement."""


@dataclass(frozen=True)
class Line:
    """Bytes as a function of the positions in a pass."""

    base: int = 0
    per_token: float = 0.0

    def at(self, tokens: int) -> int:
        """Return the bytes at a number of positions, at least 0."""
        return max(0, round(self.base + self.per_token * tokens))


@dataclass(frozen=True)
class Passes:
    """Memory of a model's passes beyond weights and gradients, in bytes."""

    kept: Line
    """Bytes that a forward pass keeps at its end for the backward pass."""
    peak: Line
    """Maximum bytes during a pass with gradients."""


@dataclass(frozen=True)
class MeasureRequest:
    """A model to measure."""

    model: dict[str, Any]
    """Section ``model``, as plain values."""
    device: Device = "cuda"
    is_sharded: bool = False
    """Whether the passes compute with unsharded weights of ``model.dtype`` (``trainer.nproc`` above 1)."""
    passes: bool = True
    """Whether to measure passes. Otherwise only the sizes are returned."""
    recomputes: bool = False
    """Whether the backward pass recomputes blocks, if the model supports it."""

    @classmethod
    def of_trained(cls, config: Config, device: Device, *, is_critic: bool = False) -> MeasureRequest:
        """Return the request for the policy or the critic of a run."""
        model = config.model.model_copy(update={"lora": None}) if is_critic else config.model
        plain = model.model_dump(mode="json")
        return cls(plain, device, config.trainer.nproc > 1, recomputes=config.trainer.recomputes(device))


@dataclass(frozen=True)
class ModelMemory:
    """Sizes of a model, as numbers of elements; tied weights count once."""

    parameters: int
    """All weights without adapters."""
    trained: int
    """Weights that the optimizer updates: all weights, or the adapters."""
    matrices: int
    """Trained weights that Muon updates."""
    largest: int
    """Size of the largest trained weight."""
    linear: int
    """Weights that a quantization replaces: linear layers except the head."""
    block: int
    """Weights of the largest block."""
    root: int
    """Weights outside the blocks."""
    cache: int
    """Keys and values of a token in all layers."""
    vocabulary: int
    passes: Passes | None = None
    """Memory of the passes. None: not measured."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelMemory:
        """Return the sizes that a JSON object describes."""
        return TypeAdapter(cls).validate_python(values)


Measured = ModelMemory | str
"""Sizes of a model, or the reason why they are not known."""
Parts = Mapping[str, int | None]
"""Bytes by name of the part. None: the part is not known."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a run's processes, in bytes."""

    device: Device
    tokens: int
    """Positions of the largest pass."""
    trainer: Parts | None = None
    """Memory on the device of each rank, by part. None: the model is not known."""
    trainer_host: Parts | None = None
    """Host memory of rank 0, by part."""
    engine: Parts | None = None
    """Memory on the device of each worker of an engine, by part. ``cache`` is None if ``engine_fraction`` determines
    it, or if the size is unknown for this kind of engine."""
    engine_fraction: float | None = None
    """Fraction of the device that an engine takes as a whole. None: an engine takes the memory of its parts."""
    auxiliary: Mapping[str, Parts | None] = field(default_factory=dict)
    """Memory on the device of each worker of an auxiliary engine, by name of the model and part."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Reasons for missing values, by ``model`` or the name of an auxiliary model."""

    @property
    def trainer_bytes(self) -> int | None:
        """Bytes on the device of each rank; None if unknown."""
        return total(self.trainer)

    @property
    def trainer_host_bytes(self) -> int | None:
        """Bytes in the host memory of rank 0; None if unknown."""
        return total(self.trainer_host)

    @property
    def engine_bytes(self) -> int | None:
        """Bytes on the device of each worker of an engine, without an unknown cache; None if unknown."""
        return total(self.engine)


def trained_requests(config: Config, device: Device) -> dict[str, MeasureRequest]:
    """Return the trained models to measure: ``model``, and ``critic`` where there is a critic."""
    requests = {"model": MeasureRequest.of_trained(config, device)}
    if has_critic(config):
        requests["critic"] = MeasureRequest.of_trained(config, device, is_critic=True)
    return requests


def measure_requests(config: Config, device: Device) -> dict[str, MeasureRequest]:
    """Return the models to measure for :func:`estimate`, by name: ``model``, ``critic`` where there is a critic, and
    the auxiliary models whose engines run here.
    """
    requests = trained_requests(config, device)
    for served in _auxiliary_here(config):
        requests[served.name] = MeasureRequest(served.model.model_dump(mode="json"), device, passes=False)
    return requests


def _auxiliary_here(config: Config) -> list[Any]:
    models = config.explorer.auxiliary_models
    return [served for served in models if served.model is not None and engine_row(served.engine).computes_here]


def estimate(
    config: Config, device: Device, measured: Mapping[str, Measured], tokens: int | None = None
) -> MemoryEstimate:
    """Return the memory that the trainer and the engines of a run need.

    Args:
        config: Configuration of the run.
        device: Kind of the devices.
        measured: Results for :func:`measure_requests`. Auxiliary models may be missing; their memory is then unknown.
        tokens: Maximum number of tokens in a pass. None: ``trainer.max_tokens_per_micro_batch``; ``auto`` on a GPU
            counts as its smallest value.
    """
    if tokens is None:
        is_chosen = config.trainer.max_tokens_per_micro_batch == "auto" and device == "cuda"
        tokens = TOKEN_STEPS[0] if is_chosen else config.trainer.first_max_tokens
    tokens = longest_pass(config, tokens)
    unknown = {name: result for name, result in measured.items() if isinstance(result, str)}
    auxiliary: dict[str, Parts | None] = {}
    for served in _auxiliary_here(config):
        sizes, parts = measured.get(served.name, "not measured"), None
        if not isinstance(sizes, str):
            parts = engine_parts(sizes, served.model, config, device, served)
        auxiliary[served.name] = parts
    policy, critic = measured["model"], measured.get("critic")
    if isinstance(policy, str) or isinstance(critic, str):
        return MemoryEstimate(device, tokens, auxiliary=auxiliary, unknown=unknown)
    return MemoryEstimate(
        device,
        tokens,
        trainer={**fixed_parts(policy, config, device, critic), **pass_parts(policy, config, device, tokens, critic)},
        trainer_host=host_parts(policy, config, device, critic),
        engine=engine_parts(policy, config.model, config, device, config.explorer.rollout_model),
        engine_fraction=engine_fraction(config, device),
        auxiliary=auxiliary,
        unknown=unknown,
    )


def total(parts: Parts | None) -> int | None:
    """Return the sum of the known parts; None if ``parts`` is None."""
    return None if parts is None else sum(size or 0 for size in parts.values())


def item_size(model: ModelConfig) -> int:
    """Return the bytes of a number of ``model.dtype``."""
    return 4 if model.dtype == "float32" else 2


def weight_bytes(sizes: ModelMemory, model: ModelConfig) -> int:
    """Return the bytes of the trainer's weights: float32 if all are trained, else frozen weights and adapters."""
    if model.lora is None:
        return 4 * sizes.parameters
    width = item_size(model)
    quantized = {"4bit": FOUR_BIT, "8bit": EIGHT_BIT}.get(model.lora.quantization or "")
    base = width * sizes.parameters
    if quantized is not None:
        base = round(quantized * sizes.linear) + width * (sizes.parameters - sizes.linear)
    return base + 4 * sizes.trained


def state_bytes(sizes: ModelMemory, config: Config) -> int:
    """Return the bytes of the optimizer's state: two float32 moments of each weight with AdamW, a single moment of each
    matrix with Muon and of each weight with SGD with momentum, two 8-bit moments and a scale for 256 of them with 8-bit
    AdamW (arXiv 2110.02861).
    """
    optimizer = config.algorithm.optimizer
    match optimizer.optimizer_type:
        case "adamw_8bit":
            return round(sizes.trained * (2 + 2 * 4 / 256))
        case "muon":
            return 8 * sizes.trained - 4 * sizes.matrices
        case "sgd":
            return 4 * sizes.trained if optimizer.momentum else 0
        case _:
            return 8 * sizes.trained


def fixed_parts(
    sizes: ModelMemory, config: Config, device: Device, critic: ModelMemory | None = None
) -> dict[str, int]:
    """Return the bytes of a rank that do not depend on a pass, by part."""
    ranks, model, on_device = config.trainer.nproc, config.model, device == "cuda"
    optimizer = config.algorithm.optimizer
    parts = {
        "weights": weight_bytes(sizes, model) // ranks,
        "gradients": 4 * sizes.trained // ranks,
        "optimizer": 0 if optimizer.offload and on_device else state_bytes(sizes, config) // ranks,
    }
    if ranks > 1:
        # the unsharded root, a block, and a prefetched block; summed gradients are float32
        reduced = max(sizes.root, sizes.block) if model.lora is None else sizes.trained
        parts["gathered"] = item_size(model) * (sizes.root + 2 * sizes.block) + 4 * reduced
    if _holds_reference(config) and not (config.algorithm.reference.offload and on_device):
        parts["reference"] = 4 * sizes.parameters // ranks
    if critic is not None:
        parts["critic"] = 16 * critic.parameters // ranks
    if on_device:
        parts[f"context {ASSUMED_SUFFIX}"] = ASSUMED["context"] + (ASSUMED["communication"] if ranks > 1 else 0)
    return parts


def _holds_reference(config: Config) -> bool:
    return needs_reference(config.algorithm) and config.model.lora is None


def has_critic(config: Config) -> bool:
    """Return whether the trainer has a critic."""
    return config.algorithm.estimator.kind == "gae"


def pass_parts(
    sizes: ModelMemory, config: Config, device: Device, tokens: int, critic: ModelMemory | None = None
) -> dict[str, int | None]:
    """Return the bytes of the most expensive phase of a train step at ``tokens`` positions in a pass, by part.

    The phases follow each other: scoring with the reference, passes of the critic and of the policy, and the optimizer
    step. ``other phases`` is the excess of the most expensive phase over a pass of the policy.
    """
    passes = sizes.passes
    if passes is None:
        return {"activations": None}
    kept, peak = passes.kept.at(tokens), passes.peak.at(tokens)
    copies = min(passes.kept.at(0), kept)
    phases = [optimizer_bytes(sizes, config, device)]
    if _holds_reference(config) and config.algorithm.reference.offload and device == "cuda":
        phases.append(peak - kept + 4 * sizes.parameters // config.trainer.nproc)
    if critic is not None and critic.passes is not None:
        phases.append(critic.passes.peak.at(tokens))
    parts: dict[str, int | None] = {
        "weight copies": copies,
        "activations": kept - copies,
        "working memory": peak - kept,
        "other phases": max(0, *(phase - peak for phase in phases)),
    }
    return {name: size for name, size in parts.items() if size}


def optimizer_bytes(sizes: ModelMemory, config: Config, device: Device) -> int:
    """Return the bytes of an optimizer step beyond its state: old weights and their change, part by part, and with
    ``offload`` the state of a part. Muon also orthogonalizes a matrix in bfloat16, with three products of its size.
    """
    optimizer, ranks = config.algorithm.optimizer, config.trainer.nproc
    part = min(sizes.trained // ranks, max(PART, sizes.largest // ranks))
    state = state_bytes(sizes, config) / max(1, sizes.trained)
    loaded = state if optimizer.offload and device == "cuda" else 0
    working = 8 * sizes.block if optimizer.optimizer_type == "muon" else 0
    return round(part * (8 + loaded)) + working


def host_parts(sizes: ModelMemory, config: Config, device: Device, critic: ModelMemory | None = None) -> dict[str, int]:
    """Return the bytes in the host memory of rank 0, by part."""
    ranks, on_device = config.trainer.nproc, device == "cuda"
    parts: dict[str, int] = {f"process {ASSUMED_SUFFIX}": ASSUMED["process"]}
    if config.trainer.async_save or ranks > 1:  # several ranks write their shares from copies in any case
        copied = 4 * sizes.trained + state_bytes(sizes, config) + (0 if critic is None else 12 * critic.parameters)
        parts["checkpoint copy"] = copied // ranks
    if on_device and config.algorithm.optimizer.offload:
        parts["optimizer"] = state_bytes(sizes, config) // ranks
    if on_device and _holds_reference(config) and config.algorithm.reference.offload:
        parts["reference"] = 4 * sizes.parameters // ranks
    sent = sizes.trained if config.model.lora is not None and config.model.lora.sync == "adapter" else sizes.parameters
    if config.synchronizer.sync_method == "memory" or config.synchronizer.pull == "memory":
        parts["sync copy"] = item_size(config.model) * sent
    if config.model.lora is not None and ranks > 1:
        parts["frozen weights"] = item_size(config.model) * sizes.parameters
    return parts


def engine_parts(
    sizes: ModelMemory,
    model: ModelConfig,
    config: Config,
    device: Device,
    served: RolloutModelConfig | AuxiliaryModelConfig,
) -> dict[str, int | None]:
    """Return the bytes of each worker of an engine with the settings ``served``, by part.

    The cache of the engine ``transformers`` is an upper bound: all sequences that it may generate at once, of maximum
    length.
    """
    width = item_size(model)
    parts: dict[str, int | None] = {"weights": width * sizes.parameters // served.tensor_parallel_size}
    if served.engine == "vllm":
        cache = served.vllm.kv_cache_memory_bytes
        parts["cache"] = cache if cache is not None or device == "cuda" else 256 * 2**20
    elif served.engine == "transformers":
        runs = config.buffer.batch_size * config.algorithm.repeat_times
        sequences = min(config.explorer.rollout_model.max_batch_sequences, runs)
        parts["cache"] = width * sizes.cache * sequences * (model.max_prompt_tokens + model.max_response_tokens)
        parts["logits"] = 3 * 4 * sequences * sizes.vocabulary
    else:
        parts["cache"] = None
    if device == "cuda":
        parts[f"context {ASSUMED_SUFFIX}"] = ASSUMED["engine context"]
    return parts


def engine_fraction(config: Config, device: Device) -> float | None:
    """Return the fraction of a shared device that an engine takes as a whole; None if it takes its parts."""
    settings = config.explorer.rollout_model
    takes_fraction = settings.engine == "vllm" and settings.vllm.kv_cache_memory_bytes is None and device == "cuda"
    return settings.vllm.fraction(dedicated=False) if takes_fraction else None


def longest_pass(config: Config, tokens: int) -> int:
    """Return the positions of the largest pass: a sequence longer than ``tokens`` gets its own pass."""
    return max(tokens, config.model.max_model_len)
