"""Measures the memory of a model's passes without its weights: the trainer's own scorer runs on tensors without data
(``FakeTensorMode``), and the bytes of all live tensors are counted.

The measured memory determines the size of a pass that fits on a GPU, and the advice for a lack of memory.

As a program this module reads requests from its input and prints their results; both are JSON.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trinity_mq.algorithms.scoring import CHUNK, HeadOperation, pretended_device
from trinity_mq.config.algorithm import OptimizerConfig
from trinity_mq.config.model import ModelConfig
from trinity_mq.config.run import Config
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import model_without_weights
from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.memory.estimate import (
    ASSUMED_SUFFIX,
    TOKEN_STEPS,
    Device,
    Line,
    Measured,
    MeasureRequest,
    MemoryEstimate,
    ModelMemory,
    Passes,
    estimate,
    trained_requests,
)
from trinity_mq.training.model.lora import Adapters
from trinity_mq.training.model.policy import TokenScorer, can_checkpoint, checkpoint_blocks
from trinity_mq.training.optimizers import divide_parameters
from trinity_mq.training.parallel.sharding import blocks

ROW = 1024
"""Positions of a row in a measured pass. Attention keeps no matrix of row x row, so the bytes per position do not
depend on the length of a row.
"""
MOST = 16384
"""Maximum number of positions in the smaller of the two measured passes, from which the bytes per position follow."""
FALLBACK = 4096
"""Tokens that ``trainer.max_tokens_per_micro_batch: auto`` means for a model whose passes cannot be measured."""
RESERVE = 0.1
"""Fraction of the memory that ``auto`` leaves to the fragmentation of torch's allocator. It is an assumption."""


MASKLESS = "sdpa_without_mask"
"""Name of an attention implementation that :func:`measure` adds."""
DEPTHS = (1, 2)
"""Numbers of layers of the two measured models, from which the memory of more equal layers follows."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch declares no types for it
    """Counts the bytes of the tensors that operations in the ``with`` block make and that are still alive. Views and
    tensors that share a storage count once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Do not count these tensors, which exist already."""
        for tensor in tensors:
            self._add(tensor, 0)

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, None)
        return result

    def _add(self, tensor: Tensor, size: int | None) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes() if size is None else size
        self._storages[key] = (weakref.ref(storage, lambda _reference: self._remove(key)), size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _remove(self, key: int) -> None:
        _, size = self._storages.pop(key)
        self.live -= size


def measure(request: MeasureRequest) -> ModelMemory:
    """Return the sizes of a model and the memory of its passes.

    Raises:
        ModelError: The architecture is not available on this machine.
        FatalError: The model cannot be trained in this way.
    """
    config = ModelConfig.model_validate(request.model)
    dtype = getattr(torch, config.dtype)
    trains_all = config.lora is None
    stored = torch.float32 if trains_all and not request.is_sharded else dtype
    model, sizes, is_uniform = _empty(config, stored)
    if not request.passes:
        return sizes
    layers = model.config.get_text_config().num_hidden_layers
    if not is_uniform or layers <= max(DEPTHS):
        return replace(sizes, passes=_joined(_passes(model, config, request)))
    shallow = [_passes(_empty(config, stored, depth)[0], config, request) for depth in DEPTHS]
    lines = {name: _at_depth(layers, [passes[name] for passes in shallow]) for name in shallow[0]}
    return replace(sizes, passes=_joined(lines))


def _joined(lines: dict[str, Line]) -> Passes:
    """Return the passes, whose peak is the larger of the maxima in the forward and the backward pass."""
    return Passes(lines["kept"], max(lines["forward"], lines["backward"], key=lambda line: line.at(MOST)))


def _at_depth(layers: int, lines: Sequence[Line]) -> Line:
    """Return the line of a model with ``layers`` equal layers, from the lines of models with :data:`DEPTHS` layers."""
    steps = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    first, second = lines
    return Line(
        round(first.base + steps * (second.base - first.base)),
        first.per_token + steps * (second.per_token - first.per_token),
    )


def _use_maskless_attention(model: Any) -> None:
    """Let the model compute attention by a fast kernel without a mask of row x row, as for rows without padding. In
    tensors without data transformers cannot recognise such rows.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKLESS, _no_mask)
    if model.config._attn_implementation == "sdpa":  # noqa: SLF001  # there is no public way to ask
        model.set_attn_implementation(MASKLESS)


def _no_mask(*_arguments: Any, **_settings: Any) -> None:
    return None


def _empty(config: ModelConfig, dtype: torch.dtype, layers: int | None = None) -> tuple[Any, ModelMemory, bool]:
    """Return a model with its adapters and without memory, its sizes, and whether all layers are equal."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_without_weights(config, layers, dtype=dtype).eval()
    head, block_sizes = model.get_output_embeddings(), [_size(block.parameters()) for block in _blocks(model)]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    total, in_linear = _size(model.parameters()), _size(linear)
    if config.lora is not None:
        Adapters(model, config.lora, None, 0)
    matrices, others = divide_parameters(model, OptimizerConfig(optimizer_type="muon"))
    trained = [weight for _, weight in (*matrices, *others)]
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    sizes = ModelMemory(
        parameters=total,
        trained=_size(trained),
        matrices=_size(weight for _, weight in matrices),
        largest=max((weight.numel() for weight in trained), default=0),
        linear=in_linear,
        block=max(block_sizes, default=0),
        root=total - sum(block_sizes),
        cache=_cache_numbers(text),
        vocabulary=model.get_input_embeddings().weight.shape[0],
    )
    is_uniform = len(set(block_sizes)) == 1 and len(block_sizes) == text.num_hidden_layers and len(kinds) <= 1
    return model, sizes, is_uniform


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _blocks(model: Any) -> list[nn.Module]:
    try:
        return blocks(model)
    except FatalError:  # such a model can be trained by one process
        return []


def _cache_numbers(text: Any) -> int:
    """Return the keys and values of a token in all layers, as a number of elements."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width)


def _passes(model: Any, config: ModelConfig, request: MeasureRequest) -> dict[str, Line]:
    """Measure passes of two sizes, and return the numbers of :func:`_pass_bytes` as lines over the positions."""
    row = min(ROW, getattr(model.config.get_text_config(), "max_position_embeddings", None) or ROW)
    _use_maskless_attention(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        if request.recomputes and can_checkpoint(model):
            checkpoint_blocks(model)
        scorer = TokenScorer(model, HeadOperation())
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        dtype = getattr(torch, config.dtype)
        chunk = CHUNK[request.device] // model.get_input_embeddings().weight.shape[0]
        # two whole chunks of logits exist at a time
        rows = max(1, min(math.ceil(2 * chunk / row), MOST // row))
        small, large = (_pass_bytes(scorer, dtype, request.device, count, row) for count in (rows, rows + 1))
    positions = [rows * row, (rows + 1) * row]
    return {name: _line(positions, (small[name], large[name])) for name in small}


def _line(positions: Sequence[int], values: Sequence[int]) -> Line:
    slope = (values[1] - values[0]) / (positions[1] - positions[0])
    return Line(round(values[0] - slope * positions[0]), slope)


def _pass_bytes(scorer: TokenScorer, dtype: torch.dtype, device: str, rows: int, row: int) -> dict[str, int]:
    """Return the bytes that a forward pass keeps for its backward pass, and the maxima in both, beyond weights and
    gradients.
    """
    model = scorer.model
    weights = list(model.parameters())
    ids = torch.zeros(rows, row, dtype=torch.int64)
    places = torch.arange(rows).repeat_interleave(row), torch.arange(row).repeat(rows)
    targets, heat = torch.zeros(rows * row, dtype=torch.int64), torch.ones(rows * row)
    live = LiveBytes()
    live.ignore([*weights, *(weight.grad for weight in weights if weight.grad is not None), *model.buffers()])

    with live, pretended_device(device):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = scorer({"input_ids": ids}, places, targets, heat, entropy_gradient=False)
        loss = scores.logprob.sum()
        kept, forward = live.live, live.peak
        live.restart()
        torch.autograd.backward(loss)
        return {"kept": kept, "forward": forward, "backward": live.peak}


def answer(request: MeasureRequest) -> Measured:
    """Return the result of :func:`measure`, or the reason for a missing result."""
    try:
        return measure(request)
    except (ModelError, FatalError) as error:
        return str(error)
    except Exception as error:  # a folder's numbers and a custom model can raise any error
        return f"the model cannot be simulated: {type(error).__name__}: {' '.join(str(error).split())}"


# -- the GPU of the trainer


@dataclass(frozen=True)
class Card:
    """A GPU, with the memory in bytes as this process sees it."""

    name: str
    total: int
    free: int
    """Bytes that no process uses."""
    reserved: int = 0
    """Bytes that torch holds in this process."""
    allocated: int = 0
    """Bytes that tensors of this process use, a part of ``reserved``."""

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
    """Return the largest of :data:`TOKEN_STEPS` whose passes fit into the memory of a GPU by the estimate; the smallest
    if none fits, and :data:`FALLBACK` if a model was not measured.

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
    """Saved bytes by the estimate."""


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

    changes: list[Remedy] = []
    trainer, optimizer = config.trainer, config.algorithm.optimizer
    if not trainer.recomputes(device):
        changed = _with(config, trainer={"gradient_checkpointing": True})
        changes.append(saves("trainer.gradient_checkpointing=true", changed, measure_trained(changed, device)))
    if tokens > max(config.model.max_model_len, 1024):
        half = max(tokens // 2, config.model.max_model_len)
        changes.append(saves(f"trainer.max_tokens_per_micro_batch={half}", config, most=half))
    if config.model.lora is None:
        changed = _with(config, model={"lora": {}})
        changes.append(saves("model.lora={r: 16, alpha: 32}", changed, measure_trained(changed, device)))
        is_alone = trainer.nproc == 1  # neither is possible for sharded models
        if is_alone and not optimizer.offload and optimizer.optimizer_type != "adamw_8bit" and device == "cuda":
            changes.append(saves("algorithm.optimizer.offload=true", _with_optimizer(config, offload=True)))
        if is_alone and optimizer.optimizer_type == "adamw" and not optimizer.offload:
            eight_bit = _with_optimizer(config, optimizer_type="adamw_8bit")
            changes.append(saves("algorithm.optimizer.optimizer_type=adamw_8bit", eight_bit))
    if config.sharding_obstacle is None and not (config.model.lora and config.model.lora.quantization):
        ranks = 2 * trainer.nproc
        changed = _with(config, trainer={"nproc": ranks})
        changes.append(saves(f"trainer.nproc={ranks} with {ranks} GPUs", changed, measure_trained(changed, device)))
    if shared and before.engine is not None:
        changes.append(_smaller_engine(config, before))
    return sorted((remedy for remedy in changes if remedy.saved > 0), key=lambda remedy: -remedy.saved)


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


# -- the child process


def main() -> int:
    """Read a JSON list of requests, and print a JSON list: for each request the result or the reason for its lack."""
    answers = [answer(MeasureRequest(**request)) for request in json.load(sys.stdin)]
    plain = [result if isinstance(result, str) else asdict(result) for result in answers]
    sys.stdout.write(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
