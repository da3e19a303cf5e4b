"""Attention over packed rows: the model arguments for a packed row, the attention implementations that support it, and
a check whether a model supports it at all.

A model supports packed rows if no information passes from one sequence of a row to the next. A mask separates sequences
in layers with full or sliding attention, but not in Mamba, linear attention, convolutions and attention in chunks of
the row. The layer types in the configuration are checked first. Then the model itself is tested, also if its code is
custom: two short sequences pass through it as one row. The gradient of the second sequence's logits with respect to the
first sequence's embeddings must be exactly zero, and the second sequence must get the same logits as alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from trinity_mq.training.model.shared_prefixes import prefix_inputs
from trinity_mq.training.packing import MicroBatch

Packing = Literal["auto", "packed", "padded"]
SEPARABLE = {"full_attention", "sliding_attention"}
"""Layer types that a mask separates, as named by ``layer_types`` in a Hugging Face configuration."""


def model_inputs(model: Any, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments for calling a model, or its backbone, with a micro-batch on its device. Prefixes of rows
    pass through the backbone here.
    """
    if batch.prefixes is not None:
        return prefix_inputs(model, batch)
    if not batch.longest_packed:
        return {"input_ids": batch.input_ids}
    return _row(batch.input_ids, batch.lengths, batch.longest_packed, _attention(model))


def _attention(model: Any) -> str:
    """Return the name of a model's attention implementation."""
    name: str = model.config._attn_implementation  # noqa: SLF001  # there is no public way to ask
    return name


def _row(input_ids: Tensor, lengths: Tensor, longest: int, attention: str) -> dict[str, Any]:
    """Return the arguments for ``input_ids``, ``[1, positions]``, with sequences of these ``lengths``.

    Only flash attention is given the start of each sequence; other implementations derive it from the position ids.
    """
    positions = input_ids.shape[1]
    ends = lengths.cumsum(0)
    begin = (ends - lengths).repeat_interleave(lengths, output_size=positions)
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "position_ids": (torch.arange(positions, device=begin.device) - begin)[None],
    }
    if attention.startswith("flash"):
        ends = nn.functional.pad(ends, (1, 0)).int()
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return inputs


def use_packed_attention(model: Any, packing: Packing, dtype: torch.dtype, probe: Any = None) -> str | None:
    """Set an attention implementation for packed rows, if the model supports packed rows and an implementation is
    available.

    ``auto`` tries flash attention 3 and 2 (both on CUDA in bfloat16 or float16, if installed) and flex attention (on
    CUDA), in this order. ``packed`` also tries the implementation for padded rows, with a mask of positions x
    positions, as the last choice.

    Args:
        model: Model with the implementation for padded rows. It keeps this implementation if no other works.
        packing: ``auto`` or ``packed``.
        dtype: Data type of the computation.
        probe: Model of the same kind with weights, on the device, to test. None: ``model``.

    Returns:
        None if rows are packed, else the reason why they are not.
    """
    probe = model if probe is None else probe
    padded = _attention(model)
    implementations = _installed(probe.device, dtype) + ([padded] if packing == "packed" else [])
    if not implementations:
        return f"there is no attention for packed rows on {probe.device.type} (flash attention, flex attention)"
    problem = None
    for name in implementations:
        try:
            probe.set_attn_implementation(name)
            problem = packing_problem(probe, dtype) if _attention(probe) == name else f"it has no {name}"
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            problem = f"{name}: {error}"
        if problem is None:
            model.set_attn_implementation(name)
            return None
    probe.set_attn_implementation(padded)
    return problem


def _installed(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the available implementations for packed rows, fastest first."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_torch_flex_attn_available

    if device.type != "cuda":  # flex attention has no backward pass on a CPU
        return []
    is_narrow = dtype in {torch.bfloat16, torch.float16}
    implementations = {
        "flash_attention_3": is_narrow and is_flash_attn_3_available(),
        "flash_attention_2": is_narrow and is_flash_attn_2_available(),
        "flex_attention": is_torch_flex_attn_available(),
    }
    return [name for name, is_there in implementations.items() if is_there]


def packing_problem(model: Any, dtype: torch.dtype) -> str | None:
    """Return why sequences are not independent in a packed row of this model; None if they are independent. See the
    module docstring.
    """
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SEPARABLE
    if others:
        return f"a mask does not keep sequences apart in its layers of the kind {', '.join(sorted(others))}"
    first, second = 5, 7
    lengths = torch.tensor([first, second], device=model.device)
    embeddings = model.get_input_embeddings()
    ids = torch.arange(1, first + second + 1, device=model.device)[None] * 7919 % embeddings.weight.shape[0]
    embedded: list[Tensor] = []

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    with torch.enable_grad(), torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
        handle = embeddings.register_forward_hook(watch)
        try:
            row = model(**_row(ids, lengths, second, _attention(model)), use_cache=False)
        finally:
            handle.remove()
        packed = row.logits[0, first:].float()
        alone = model(input_ids=ids[:, first:], use_cache=False).logits[0].detach().float()
    (gradient,) = torch.autograd.grad(packed.square().sum(), embedded[0])
    if gradient[0, :first].any():
        return "the logits of a sequence depend on the sequence before it in the row"
    largest = (0.05 if dtype != torch.float32 else 1e-3) * alone.abs().max()
    if not (packed - alone).abs().max() <= largest:
        return "the logits of a sequence differ between a packed row and a row of its own"
    return None
