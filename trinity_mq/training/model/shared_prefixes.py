"""Rows that omit a shared prefix. The prefix passes through the model once, and every row attends to its keys and
values. The gradients of all rows flow back through them.

The answers of a group share their prompt. With 16 short answers to a long question the prompt is most of the tokens.
The model must accept keys and values from a cache, and use the given position ids; a test run of the model checks both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trinity_mq.training.packing import MicroBatch


def prefix_inputs(model: Any, batch: MicroBatch) -> dict[str, Any]:
    """Pass the prefixes of a micro-batch through the model, and return the arguments for calling the model, or its
    backbone, with the rows.
    """
    assert batch.prefixes is not None
    assert batch.prefix_lengths is not None
    assert batch.prefix_of is not None
    return _inputs(model, batch.prefixes, batch.prefix_lengths, batch.prefix_of, batch.input_ids)


def _inputs(model: Any, prefixes: Tensor, lengths: Tensor, prefix_of: Tensor, rows: Tensor) -> dict[str, Any]:
    from transformers import DynamicCache

    cache = DynamicCache()
    model.base_model(input_ids=prefixes, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(prefix_of)
    begin = lengths[prefix_of]
    inputs = {
        "input_ids": rows,
        "past_key_values": cache,
        "position_ids": begin[:, None] + torch.arange(rows.shape[1], device=rows.device),
    }
    longest = prefixes.shape[1]
    if bool((lengths < longest).any()):  # padding between a prefix and its rows
        mask = torch.arange(longest, device=rows.device) < begin[:, None]
        inputs["attention_mask"] = torch.cat([mask, torch.ones_like(rows, dtype=torch.bool)], 1)
    return inputs


def prefix_problem(model: Any, dtype: torch.dtype) -> str | None:
    """Return why sequences cannot share prefixes in this model; None if they can.

    Args:
        model: Model with weights, on its device.
        dtype: Data type of the computation.
    """
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        return f"its layers of the kind {', '.join(sorted(others))} do not attend to all earlier tokens"
    if getattr(config, "sliding_window", None):
        return f"its layers attend to the last {config.sliding_window} tokens alone"
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    prefixes = torch.arange(1, 11, device=device).view(2, 5) * 7919 % vocabulary
    lengths, prefix_of = torch.tensor([5, 3], device=device), torch.tensor([0, 1, 1], device=device)
    rows = torch.arange(11, 23, device=device).view(3, 4) * 7919 % vocabulary
    whole = [
        torch.cat([prefixes[number, : lengths[number]], row])
        for number, row in zip(prefix_of.tolist(), rows, strict=True)
    ]
    with torch.enable_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        try:
            shared_logits = model(**_inputs(model, prefixes, lengths, prefix_of, rows), use_cache=False).logits.float()
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"it takes no cache: {error}"
        alone = torch.stack([model(input_ids=ids[None], use_cache=False).logits[0, -4:].float() for ids in whole])
    part = 0.05 if dtype != torch.float32 else 1e-3
    if not (shared_logits - alone).abs().max() <= part * alone.abs().max():
        return "the logits of a sequence differ with a shared prefix"
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    slopes = [
        torch.autograd.grad(logits.square().sum(), weights, allow_unused=True) for logits in (shared_logits, alone)
    ]
    for shared, separate in zip(*slopes, strict=True):
        if (shared is None) != (separate is None):
            return "a weight has a gradient only with a shared prefix, or only without"
        if shared is not None and separate is not None:
            largest = separate.abs().max()
            if not (shared - separate).abs().max() <= part * largest + torch.finfo(dtype).eps:
                return "the gradient differs with a shared prefix"
    return None
