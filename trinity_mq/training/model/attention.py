"""Attention over packed rows: how a model is called with one, which implementations take one, and whether a model may
be given one at all.

A model may where nothing passes from one sequence of a row to the next. Layers with full or sliding attention can be
kept apart by a mask; Mamba, linear attention, convolutions and attention in chunks of the row cannot. What the
configuration says of its layers is checked first. Then the model is asked, whoever wrote it: two short sequences go
through it as one row, the gradient of the second one's logits by the embeddings of the first must be exactly zero, and
the second must get the logits that it gets alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from trinity_mq.training.model.shared_prefixes import with_prefixes
from trinity_mq.training.packing import MicroBatch

Packing = Literal["auto", "packed", "padded"]
SEPARABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers, as ``layer_types`` of a Hugging Face configuration names them, that a mask keeps apart."""


def model_inputs(model: Any, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments that a model, or its backbone, takes a micro-batch on its device by; prefixes of rows
    pass through the backbone here.
    """
    if batch.prefixes is not None:
        return with_prefixes(model, batch)
    if not batch.longest_packed:
        return {"input_ids": batch.input_ids}
    return _row(batch.input_ids, batch.lengths, batch.longest_packed, _attention(model))


def _attention(model: Any) -> str:
    """Return the name of a model's attention implementation."""
    name: str = model.config._attn_implementation  # noqa: SLF001  # there is no public way to ask
    return name


def _row(input_ids: Tensor, lengths: Tensor, longest: int, attention: str) -> dict[str, Any]:
    """Return the arguments for ``input_ids``, ``[1, positions]``, of sequences of these ``lengths``.

    Only flash attention is told where sequences begin; the others find out from the positions.
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


def use_packed_attention(model: Any, packing: Packing, dtype: torch.dtype) -> str | None:
    """Give the model an attention implementation for packed rows, if it may have them and there is one.

    ``packed`` takes the first that works of flash attention 3, 2 (both on CUDA in bfloat16, where installed), flex
    attention (on CUDA), and the implementation for padded rows with a mask of positions x positions, which ``auto``
    leaves out.

    Args:
        model: With weights, on its device, with the implementation for padded rows, which it keeps otherwise.
        packing: ``auto`` or ``packed``.
        dtype: What it computes in.

    Returns:
        None: rows are packed. Else why they are not.
    """
    padded = _attention(model)
    implementations = _installed(model.device, dtype) + ([padded] if packing == "packed" else [])
    if not implementations:
        return f"there is no attention for packed rows on {model.device.type} (flash attention, flex attention)"
    problem = None
    for name in implementations:
        try:
            model.set_attn_implementation(name)
            problem = packing_problem(model, dtype) if _attention(model) == name else f"it has no {name}"
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            problem = f"{name}: {error}"
        if problem is None:
            return None
    model.set_attn_implementation(padded)
    return problem


def _installed(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the implementations for packed rows that are there, the fastest first."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_torch_flex_attn_available

    if device.type != "cuda":  # flex attention has no backward pass on a CPU
        return []
    is_narrow = dtype in {torch.bfloat16, torch.float16}
    found = {
        "flash_attention_3": is_narrow and is_flash_attn_3_available(),
        "flash_attention_2": is_narrow and is_flash_attn_2_available(),
        "flex_attention": is_torch_flex_attn_available(),
    }
    return [name for name, is_there in found.items() if is_there]


def packing_problem(model: Any, dtype: torch.dtype) -> str | None:
    """Return why sequences would not be apart in a packed row of this model; None: they are. See the module."""
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SEPARABLE
    if others:
        return f"a mask does not keep sequences apart in its layers of the kind {', '.join(sorted(others))}"
    first, second = 5, 7
    lengths = torch.tensor([first, second], device=model.device)
    embeddings = model.get_input_embeddings()
    ids = torch.arange(1, first + second + 1, device=model.device)[None] * 7919 % embeddings.weight.shape[0]
    seen: list[Tensor] = []

    def watch(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    with torch.enable_grad(), torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
        handle = embeddings.register_forward_hook(watch)
        try:
            row = model(**_row(ids, lengths, second, _attention(model)), use_cache=False)
        finally:
            handle.remove()
        found = row.logits[0, first:].float()
        alone = model(input_ids=ids[:, first:], use_cache=False).logits[0].detach().float()
    (gradient,) = torch.autograd.grad(found.square().sum(), seen[0])
    if gradient[0, :first].any():
        return "the logits of a sequence depend on the sequence before it in the row"
    largest = (0.05 if dtype != torch.float32 else 1e-3) * alone.abs().max()
    if not (found - alone).abs().max() <= largest:
        return "a sequence has other logits in a row with others than alone"
    return None
