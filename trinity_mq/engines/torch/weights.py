"""A model's weights by name, and in-place copies of new values."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class WeightsError(ValueError):
    """Tensors do not fit the model, or a weight cannot be sent to the engine or read from it; nothing was changed."""


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name in the model's order; tied weights appear once."""
    saved = model.state_dict(keep_vars=True)
    weights: dict[str, Tensor] = {}
    tensor_ids: set[int] = set()
    for name, tensor in saved.items():
        if id(tensor) not in tensor_ids:
            tensor_ids.add(id(tensor))
            weights[name] = tensor
    return weights


def check(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors to copy, by the model's own names; nothing is touched.

    The name of a tied weight (an output layer that shares the embeddings) is also accepted, with the same values.

    Raises:
        WeightsError: A name is missing or unknown, a shape differs, or tied names disagree.
    """
    weights = named_weights(model)
    canonical = {id(tensor): name for name, tensor in weights.items()}
    aliases = {name: canonical[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
    unknown = [name for name in tensors if name not in aliases]
    if unknown:
        similar = difflib.get_close_matches(unknown[0], aliases, n=1)
        hint = f"; nearest known name: {similar[0]!r}" if similar else ""
        raise WeightsError(
            f"{len(unknown)} of {len(tensors)} tensors do not belong to this model, first {unknown[0]!r}{hint}"
        )
    chosen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        target = aliases[name]
        if tensor.shape != weights[target].shape:
            raise WeightsError(
                f"{name!r} has shape {list(tensor.shape)}, the model wants {list(weights[target].shape)}"
            )
        if target in chosen and not torch.equal(chosen[target], tensor):
            raise WeightsError(
                f"{name!r} is tied to {target!r} in this model, but the two tensors differ: they were trained untied"
            )
        chosen[target] = tensor
    missing = [name for name in weights if name not in chosen]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(weights)} weights are missing, first {missing[0]!r}; send all of them"
        )
    return chosen


@torch.no_grad()
def copy_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors from :func:`check` into the model, in place, converting dtype and device."""
    weights = named_weights(model)
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)
