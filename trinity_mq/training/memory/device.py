"""The memory of the trainer's GPU: the size of a pass that fits, and advice for a lack of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trinity_mq.config.run import Config
from trinity_mq.training.memory.estimate import (
    ASSUMED_SUFFIX,
    TOKEN_STEPS,
    Device,
    Measured,
    MemoryEstimate,
    estimate,
    trained_requests,
)
from trinity_mq.training.memory.measure import answer

FALLBACK = 4096
"""``trainer.max_tokens_per_micro_batch: auto`` for a model whose passes cannot be measured."""
RESERVE = 0.1
"""Fraction of the memory that ``auto`` leaves to the fragmentation of torch's allocator. It is an assumption."""


@dataclass(frozen=True)
class Card:
    """A GPU, with the memory in bytes as this process sees it."""

    name: str
    total: int
    free: int
    """Not used by any process."""
    reserved: int = 0
    """Held by torch in this process."""
    allocated: int = 0
    """Used by tensors of this process, as a part of ``reserved``."""

    def __str__(self) -> str:
        return (
            f"{self.name} has {_gb(self.total)}, of which {_gb(self.free)} are free; torch holds {_gb(self.reserved)} "
            f"here, and its tensors take {_gb(self.allocated)}"
        )


def card_of(device: torch.device) -> Card | None:
    """Return the state of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return Card(name, total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def measure_trained(config: Config, device: Device) -> dict[str, Measured]:
    """Measure the trained models of a run in this process, without memory for their tensors."""
    return {name: answer(request) for name, request in trained_requests(config, device).items()}


@dataclass(frozen=True)
class PassLimit:
    """The choice of ``trainer.max_tokens_per_micro_batch: auto`` on a GPU. It is stored in checkpoints."""

    tokens: int
    device: str
    """Name of the GPU."""
    device_bytes: int
    reason: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the plain values for a checkpoint."""
        return {"pass_limit": {key: value for key, value in asdict(self).items() if key != "reason"}}


def stored_limit(facts: Mapping[str, Any], card: Card) -> PassLimit | None:
    """Return the limit in the facts of a checkpoint that was trained on the same kind of GPU; else None."""
    stored = facts.get("pass_limit")
    if not isinstance(stored, dict):
        return None
    tokens, place = stored.get("tokens"), (stored.get("device"), stored.get("device_bytes"))
    if not isinstance(tokens, int) or tokens < 1 or place != (card.name, card.total):
        return None
    return PassLimit(tokens, card.name, card.total, "as in the checkpoint")


def choose_limit(config: Config, card: Card, measured: Mapping[str, Measured], *, shared: bool) -> PassLimit:
    """Return the largest of :data:`TOKEN_STEPS` whose passes fit into the memory of a GPU by the estimate.

    Args:
        config: Configuration of the run.
        card: The GPU, after the models are loaded.
        measured: The trained models.
        shared: Whether an engine of the run uses the GPU too. The engine may start later, so the memory that it takes
            is left to it even if it is free now.
    """
    reasons = [result for result in measured.values() if isinstance(result, str)]
    if reasons:
        return PassLimit(FALLBACK, card.name, card.total, f"no estimate: {reasons[0]}")
    estimates = {tokens: estimate(config, "cuda", measured, tokens) for tokens in TOKEN_STEPS}
    room = card.free + card.reserved
    if shared:
        room = min(room, card.total - _engines(config, card, estimates[TOKEN_STEPS[0]]))
    room = round(room * (1 - RESERVE))
    needs = {tokens: _tensor_bytes(value) for tokens, value in estimates.items()}
    fitting = [tokens for tokens, need in needs.items() if need <= room] or [TOKEN_STEPS[0]]
    need = needs[fitting[-1]]
    reason = f"the estimate is {_gb(need)} of {_gb(room)} for tensors, on {card.name} with {_gb(card.total)}"
    return PassLimit(fitting[-1], card.name, card.total, reason)


def _tensor_bytes(value: MemoryEstimate) -> int:
    assert value.trainer is not None
    return sum(size or 0 for name, size in value.trainer.items() if not name.endswith(ASSUMED_SUFFIX))


def _engines(config: Config, card: Card, value: MemoryEstimate) -> int:
    if value.engine_fraction is not None:
        return round(card.total * value.engine_fraction)
    return (value.engine_bytes or 0) * config.explorer.rollout_model.engine_num


@dataclass(frozen=True)
class Remedy:
    """A change of settings that saves memory of the trainer's GPU."""

    setting: str
    saved: int
    """Bytes by the estimate."""


def remedies(
    config: Config, device: Device, measured: Mapping[str, Measured], tokens: int, *, shared: bool
) -> list[Remedy]:
    """Return the changes of settings that save memory in this run, the most effective first. Each is judged alone.

    Args:
        config: Configuration of the run.
        device: Kind of the trainer's device.
        measured: The trained models.
        tokens: Maximum number of tokens in a pass.
        shared: Whether an engine of the run uses the GPU too.
    """
    before = estimate(config, device, measured, tokens)
    if before.trainer is None:
        return []

    def saves(setting: str, changed: Config, new: Mapping[str, Measured] | None = None, most: int = tokens) -> Remedy:
        if new is None:
            new = measured
        after = estimate(changed, device, new, most)
        return Remedy(setting, (before.trainer_bytes or 0) - (after.trainer_bytes or 0))

    found = []
    trainer, optimizer = config.trainer, config.algorithm.optimizer
    if not trainer.recomputes(device):
        changed = _with(config, trainer={"gradient_checkpointing": True})
        found.append(saves("trainer.gradient_checkpointing=true", changed, measure_trained(changed, device)))
    if tokens > max(config.model.max_model_len, 1024):
        half = max(tokens // 2, config.model.max_model_len)
        found.append(saves(f"trainer.max_tokens_per_micro_batch={half}", config, most=half))
    if config.model.lora is None:
        changed = _with(config, model={"lora": {}})
        found.append(saves("model.lora={r: 16, alpha: 32}", changed, measure_trained(changed, device)))
        if not optimizer.offload and optimizer.optimizer_type != "adamw_8bit" and device == "cuda":
            found.append(saves("algorithm.optimizer.offload=true", _with_optimizer(config, offload=True)))
        if optimizer.optimizer_type == "adamw" and not optimizer.offload:
            eight_bit = _with_optimizer(config, optimizer_type="adamw_8bit")
            found.append(saves("algorithm.optimizer.optimizer_type=adamw_8bit", eight_bit))
    ranks = 2 * trainer.nproc
    changed = _with(config, trainer={"nproc": ranks})
    found.append(saves(f"trainer.nproc={ranks} with {ranks} GPUs", changed, measure_trained(changed, device)))
    if shared and before.engine is not None:
        found.append(_smaller_engine(config, before))
    return sorted((remedy for remedy in found if remedy.saved > 0), key=lambda remedy: -remedy.saved)


def _smaller_engine(config: Config, before: MemoryEstimate) -> Remedy:
    assert before.engine is not None
    vllm = config.explorer.rollout_model.vllm
    cache = before.engine.get("cache") or 0
    if before.engine_fraction is not None:
        setting = f"explorer.rollout_model.vllm.gpu_memory_utilization below {before.engine_fraction:g}"
        return Remedy(setting, before.engine_bytes or 0)
    if vllm.kv_cache_memory_bytes is not None:
        setting = f"explorer.rollout_model.vllm.kv_cache_memory_bytes={vllm.kv_cache_memory_bytes // 2}"
        return Remedy(setting, cache // 2)
    sequences = config.explorer.rollout_model.max_batch_sequences
    return Remedy(f"explorer.rollout_model.max_batch_sequences below {sequences}", cache // 2)


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    """Return a changed configuration, without the checks between sections, which do not concern memory."""
    changed = {
        name: type(section).model_validate({**section.model_dump(mode="json"), **values})
        for name, values in sections.items()
        if (section := getattr(config, name)) is not None
    }
    return config.model_copy(update=changed)


def _with_optimizer(config: Config, **values: Any) -> Config:
    optimizer = config.algorithm.optimizer.model_copy(update=values)
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"optimizer": optimizer})})


def describe_lack(
    what: str,
    error: BaseException,
    card: Card | None,
    value: MemoryEstimate,
    advice: Sequence[Remedy],
    *,
    is_first: bool,
) -> str:
    """Return one line on a lack of memory: the memory of the GPU, the estimate, and the settings that help.

    Args:
        what: Work that failed.
        error: Error of the allocator.
        card: The GPU. None: the device is a CPU.
        value: Estimate for the run.
        advice: Changes of settings, the most effective first.
        is_first: Whether no train step of this process has succeeded.
    """
    parts = [f"out of memory in {what}", str(card) if card is not None else " ".join(str(error).split())]
    if value.trainer is not None:
        sizes = ", ".join(f"{name} {_gb(size or 0)}" for name, size in value.trainer.items())
        parts.append(f"the estimate is {_gb(value.trainer_bytes or 0)} with passes of {value.tokens} tokens ({sizes})")
    else:
        parts.append(f"there is no estimate: {'; '.join(value.unknown.values())}")
    if advice:
        names = ", ".join(f"{remedy.setting} ({_gb(remedy.saved)})" for remedy in advice)
        parts.append(f"settings that save memory, the most effective first: {names}")
    else:
        parts.append("use a smaller model, trainer.nproc with more GPUs, or a larger GPU")
    if is_first:
        parts.append("the same step would fail again, so there is no restart")
    else:
        parts.append(
            "earlier steps of this process fitted, so the trainer restarts with unfragmented memory; if its first step "
            "fails too, the run ends"
        )
    return "; ".join(parts)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
