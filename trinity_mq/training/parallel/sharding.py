"""Shards a model over the ranks of a trainer with FSDP2. Each rank holds a part of every parameter, and gathers the
whole parameters of a block while it computes that block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trinity_mq.runtime.errors import FatalError


def shard(root: nn.Module, parts: Sequence[nn.Module], device: torch.device, world: int, dtype: torch.dtype) -> None:
    """Shard a module in place. Each of ``parts`` is sharded separately. The rest, including embeddings and head, is
    sharded with the root, so that tied weights stay one parameter.

    Parameters keep their data type, float32 if they are trained; the computation uses ``dtype``. Gradients are summed
    over the ranks in float32, not averaged, because the scale of a loss comes from the counts of the whole optimizer
    step.

    Args:
        root: Root module on ``device`` or on the meta device, the same on every rank.
        parts: Modules inside the root.
        device: Device of this rank.
        world: Number of ranks.
        dtype: Data type of the computation.

    Raises:
        FatalError: The installed torch cannot sum gradients over ranks.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise FatalError(f"trainer.nproc above 1 needs a newer torch than {torch.__version__}: install torch>=2.9")
    mesh = init_device_mesh(device.type, (world,))
    # do not cast inputs: autocast decides, as without sharding
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*parts, root):
        # Reshard the root too: otherwise a pass without gradients would keep its unsharded, soon outdated parameters.
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only the sum


def blocks(model: Any) -> list[nn.Module]:
    """Return the repeated blocks of a Hugging Face model, in their order.

    Raises:
        FatalError: The model does not declare its blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    modules = [module for module in model.modules() if type(module).__name__ in names]
    if not modules:
        raise FatalError(
            f"{type(model).__name__} does not say which blocks it is made of (_no_split_modules is "
            f"{sorted(names) or 'empty'}), so it cannot be sharded; set trainer.nproc to 1"
        )
    return modules


def gathered(tensor: Tensor) -> Tensor:
    """Return an unsharded tensor. A sharded tensor is gathered; all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> tuple[Tensor, slice | None]:
    """Return this rank's part of a tensor, and the rows of the part in the whole tensor. None: the tensor is whole."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: Tensor = tensor.to_local()
    return local.detach(), slice(offsets[0], offsets[0] + sizes[0])


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of ``full`` if ``parameter`` is sharded and has the same shape, else ``full``. Every
    rank must pass the whole tensor, or its shard.
    """
    if isinstance(full, DTensor) or not isinstance(parameter, DTensor) or full.shape != parameter.shape:
        return full
    moved = full.to(parameter.device)
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)


def sharded_states(
    states: Mapping[int, Mapping[str, Any]], parameters: Iterable[nn.Parameter]
) -> dict[int, dict[str, Any]]:
    """Return an optimizer's state of each parameter, with tensors sharded like the parameter.

    Args:
        states: Whole tensors by parameter index: ``state`` of ``Optimizer.state_dict``.
        parameters: Parameters of the optimizer, in its order.
    """
    by_number = dict(enumerate(parameters))
    return {
        number: {
            key: shard_like(value, by_number[number]) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        for number, state in states.items()
    }
