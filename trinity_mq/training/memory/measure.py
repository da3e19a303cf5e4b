"""Measures the memory of a model's passes without its weights: the trainer's own scorer runs on tensors without data
(``FakeTensorMode``), and the bytes of all live tensors are counted.

As a program it reads requests from its input and prints their results; both are JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trinity_mq.algorithms.scoring import HeadOperation, pretended_device
from trinity_mq.config.algorithm import OptimizerConfig
from trinity_mq.config.model import ModelConfig
from trinity_mq.models.errors import ModelError
from trinity_mq.models.model_folder import model_without_weights
from trinity_mq.runtime.errors import FatalError
from trinity_mq.training.memory.estimate import Line, Measured, MeasureRequest, ModelMemory, Passes
from trinity_mq.training.model.lora import Adapters
from trinity_mq.training.model.policy import TokenScorer, can_checkpoint, checkpoint_blocks
from trinity_mq.training.optimizers import divide_parameters
from trinity_mq.training.parallel.sharding import blocks

ROW = 1024
"""Positions of a row in a measured pass. Attention keeps no matrix of row x row, so the bytes per position do not
depend on the length of a row.
"""
MASKLESS = "sdpa_without_mask"
"""Name of an attention implementation that :func:`measure` adds."""
ROWS = (2, 4)
"""Rows of the two measured passes, from which the bytes per position follow."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations in the ``with`` block make and that are still alive. Views and
    tensors that share a storage count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Do not count these tensors, which exist already."""
        for tensor in tensors:
            self._add(tensor, 0)

    def restart(self) -> None:
        """Forget the peak before now."""
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
    with FakeTensorMode(allow_non_fake_inputs=True), _without_initialisation():
        model = model_without_weights(config, dtype=stored).eval()
        sizes = _sizes(model, config)
        if not request.passes:
            return sizes
        row = min(ROW, getattr(model.config.get_text_config(), "max_position_embeddings", None) or ROW)
        _use_maskless_attention(model)
        if request.recomputes and can_checkpoint(model):
            checkpoint_blocks(model)
        return replace(sizes, passes=_passes(model, dtype, request.device, row))


def _use_maskless_attention(model: Any) -> None:
    """Let the model compute attention as without padding: by a fast kernel, with no mask of row x row. With tensors
    without data transformers cannot see that there is no padding.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)
    AttentionMaskInterface.register(MASKLESS, _no_mask)
    if model.config._attn_implementation == "sdpa":  # noqa: SLF001  # there is no public way to ask
        model.set_attn_implementation(MASKLESS)


def _no_mask(*_arguments: Any, **_settings: Any) -> None:
    return None


def _sizes(model: Any, config: ModelConfig) -> ModelMemory:
    """Return the sizes of a model, and add its adapters."""
    head, block_sizes = model.get_output_embeddings(), [_size(block.parameters()) for block in _blocks(model)]
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    total, in_linear = _size(model.parameters()), _size(linear)
    if config.lora is not None:
        Adapters(model, config.lora, None, 0)
    matrices, others = divide_parameters(model, OptimizerConfig(optimizer_type="muon"))
    trained = [weight for _, weight in (*matrices, *others)]
    text = model.config.get_text_config()
    return ModelMemory(
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


@contextmanager
def _without_initialisation() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _passes(model: Any, dtype: torch.dtype, device: str, row: int) -> Passes:
    """Measure passes of two sizes."""
    scorer = TokenScorer(model, HeadOperation())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    small, large = (_pass_bytes(scorer, dtype, device, rows, row) for rows in ROWS)
    positions = [rows * row for rows in ROWS]
    return Passes(**{name: _line(positions, (small[name], large[name])) for name in small})


def _line(positions: Sequence[int], values: Sequence[int]) -> Line:
    slope = (values[1] - values[0]) / (positions[1] - positions[0])
    return Line(round(values[0] - slope * positions[0]), slope)


def _pass_bytes(scorer: TokenScorer, dtype: torch.dtype, device: str, rows: int, row: int) -> dict[str, int]:
    """Return the bytes that a pass keeps for its backward pass, and the maxima of passes with and without gradients,
    beyond weights and gradients.
    """
    model = scorer.model
    weights = list(model.parameters())
    ids = torch.zeros(rows, row, dtype=torch.int64)
    places = torch.arange(rows).repeat_interleave(row), torch.arange(row).repeat(rows)
    targets, heat = torch.zeros(rows * row, dtype=torch.int64), torch.ones(rows * row)
    live = LiveBytes()
    live.ignore([*weights, *(weight.grad for weight in weights if weight.grad is not None), *model.buffers()])

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            scores = scorer({"input_ids": ids}, places, targets, heat, entropy_gradient=False)
        return scores.logprob.sum()

    with live, pretended_device(device):
        with torch.no_grad():
            forward()
        without = live.peak
        live.restart()
        loss = forward()
        kept = live.live
        torch.autograd.backward(loss)
        return {"kept": kept, "peak": live.peak, "scoring": without}


def answer(request: MeasureRequest) -> Measured:
    """Return the result of :func:`measure`, or the reason why there is none."""
    try:
        return measure(request)
    except (ModelError, FatalError) as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:  # of a custom model
        return f"its passes cannot be simulated: {type(error).__name__}: {' '.join(str(error).split())}"


def main() -> int:
    """Answer the requests of the input, a JSON list, with a list of results or of reasons for a missing result."""
    answers = [answer(MeasureRequest(**request)) for request in json.load(sys.stdin)]
    plain = [result if isinstance(result, str) else asdict(result) for result in answers]
    sys.stdout.write(json.dumps(plain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
