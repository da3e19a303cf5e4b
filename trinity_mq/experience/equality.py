"""Equality of the values that experiences hold, tensors included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_COMPARABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal: tensors and arrays by dtype, shape and values, NaN equal to NaN.

    Lists and tuples are equal where their items are, because msgpack keeps one kind of sequence.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _same_tensors(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _same_arrays(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float) and left != left and right != right:  # noqa: PLR0124  # NaN
        return True
    return bool(left == right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.dtype not in _COMPARABLE:
        # 8-bit floats and wide unsigned integers have no comparison: bits decide.
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    if torch.equal(left, right):
        return True
    return left.is_floating_point() and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
