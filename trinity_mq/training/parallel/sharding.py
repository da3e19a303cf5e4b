"""Shards a model over the ranks of a trainer with FSDP2: each rank holds a part of every parameter, and gets whole
those of the block that it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trinity_mq.runtime.errors import FatalError


def shard(root: nn.Module, parts: Sequence[nn.Module], device: torch.device, world: int, dtype: torch.dtype) -> None:
    """Shard a module in place, each of ``parts`` by itself and the rest, embeddings and head among it, with the root,
    so that tied weights stay one parameter.

    Parameters stay float32, which the optimizer moves; what is computed with is ``dtype``. Gradients are summed over
    the ranks in float32, not averaged: the scale of a loss comes from the counts of the whole optimizer step.

    Args:
        root: The same on every rank, on ``device``.
        parts: Modules in it.
        device: Of this rank.
        world: Ranks.
        dtype: Of the computation.

    Raises:
        FatalError: This torch cannot add up gradients over ranks.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise FatalError(f"trainer.nproc above 1 needs a newer torch than {torch.__version__}: install torch>=2.9")
    mesh = init_device_mesh(device.type, (world,))
    # inputs stay as they are: autocast decides, as it does where nothing is sharded
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*parts, root):
        # the root too: a pass without gradients would leave it whole, and so as it was before the optimizer's step
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def blocks(model: Any) -> list[nn.Module]:
    """Return the repeated blocks of a Hugging Face model, in their order.

    Raises:
        FatalError: It does not say what they are.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise FatalError(
            f"{type(model).__name__} does not say which blocks it is made of (_no_split_modules is "
            f"{sorted(names) or 'empty'}), so it cannot be sharded; set trainer.nproc to 1"
        )
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor; one that is sharded is gathered, in which all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, which every rank has, if ``parameter`` is sharded; else ``full``."""
    if not isinstance(parameter, DTensor) or full.shape != parameter.shape:
        return full
    moved = full.to(parameter.device)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)


def sharded_states(
    states: Mapping[int, Mapping[str, Any]], parameters: Iterable[nn.Parameter]
) -> dict[int, dict[str, Any]]:
    """Return an optimizer's state of each parameter with its tensors sharded like that parameter.

    Args:
        states: By number of the parameter, with whole tensors: ``state`` of ``Optimizer.state_dict``.
        parameters: Of the optimizer, in its order.
    """
    by_number = dict(enumerate(parameters))
    return {
        number: {
            key: like(value, by_number[number]) if isinstance(value, Tensor) else value for key, value in state.items()
        }
        for number, state in states.items()
    }
