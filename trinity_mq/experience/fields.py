"""The values that fields of an experience may hold: conversion to the one form kept, and equality."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

TensorInput = Tensor | np.ndarray[Any, Any] | Sequence[Any]
"""Input that a tensor field accepts."""

RESPONSE_FIELDS = ("logprobs", "action_mask", "token_level_reward", "advantages", "returns", "teacher_logprobs")
"""Fields with one value per response token."""

TOKEN_DTYPES = frozenset({torch.int32})
FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MASK_DTYPES = frozenset({torch.bool})
EXPERT_DTYPES = frozenset({torch.uint8})


_INTS, _NUMBERS, _BOOLS = frozenset({int}), frozenset({int, float}), frozenset({bool})


class ExperienceError(ValueError):
    """A field of an experience breaks a rule; the message names the field, what it holds and the rule."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def short(value: object) -> str:
    """Return a short form of ``value`` for error messages, at a cost that does not grow with it."""
    if isinstance(value, Tensor):
        return f"tensor of {value.dtype}, shape {tuple(value.shape)}"
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 40:
        return f"{len(value)} bytes"
    return _REPR.repr(value)


def _as_tensor(field: str, value: TensorInput, wanted: str) -> Tensor:
    """Return ``value`` as a tensor of the dtype it naturally has."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes):
        raise ExperienceError(f"{field} is {short(value)}, wanted {wanted} as list, tuple, array or tensor")
    try:
        if isinstance(value, list | tuple) and any(issubclass(kind, Tensor) for kind in set(map(type, value))):
            value = [item.item() if isinstance(item, Tensor) else item for item in value]
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ExperienceError(f"{field} is {short(value)}, wanted {wanted}: {error}") from error


def _plain(value: TensorInput, kinds: frozenset[type], dtype: type[np.generic]) -> Tensor | None:
    """Return a list or tuple of Python numbers of these ``kinds`` as ``dtype``; None for anything else."""
    if isinstance(value, list | tuple) and value and set(map(type, value)) <= kinds:
        try:
            return torch.from_numpy(np.array(value, dtype=dtype))
        except (OverflowError, ValueError, TypeError):
            return None  # the slow path below says what is wrong
    return None


def _one_dimensional(field: str, tensor: Tensor, wanted: str) -> Tensor:
    if tensor.dim() != 1:
        raise ExperienceError(f"{field} has shape {tuple(tensor.shape)}, wanted {wanted} in one dimension: [tokens]")
    return tensor


def _integers(field: str, value: TensorInput, dtype: torch.dtype, wanted: str) -> Tensor:
    """Return ``value`` as ``dtype`` if every number is an integer that fits."""
    tensor = _as_tensor(field, value, wanted)
    if tensor.numel() == 0:
        return tensor.to(dtype)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ExperienceError(f"{field} holds {tensor.dtype} ({short(value)}), wanted {wanted}; convert it explicitly")
    fitted = tensor.to(dtype)
    if not torch.equal(fitted.to(torch.int64), tensor.to(torch.int64)):
        wrong = tensor[fitted.to(torch.int64) != tensor.to(torch.int64)].flatten()[0].item()
        raise ExperienceError(f"{field} holds {wrong}, wanted {wanted}: it does not fit {dtype}")
    return fitted


def token_ids(field: str, value: TensorInput) -> Tensor:
    """Return token ids as int32 ``[tokens]``.

    Raises:
        ExperienceError: Not integers, outside int32 or not one-dimensional.
    """
    if isinstance(value, Tensor) and value.dtype == torch.int32 and value.dim() == 1:
        return value
    plain = _plain(value, _INTS, np.int32)
    if plain is not None:
        return plain
    wanted = "integer token ids"
    return _one_dimensional(field, _integers(field, value, torch.int32, wanted), wanted)


def floats(field: str, value: TensorInput) -> Tensor:
    """Return ``value`` as float32 ``[tokens]``; tensors of bfloat16 and float16 keep their dtype.

    Raises:
        ExperienceError: Not numbers, or not one-dimensional.
    """
    if isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES and value.dim() == 1:
        return value
    plain = _plain(value, _NUMBERS, np.float32)
    if plain is not None:
        return plain
    wanted = "numbers"
    tensor = _one_dimensional(field, _as_tensor(field, value, wanted), wanted)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ExperienceError(f"{field} holds {tensor.dtype} ({short(value)}), wanted {wanted}")
    keeps = isinstance(value, Tensor) and tensor.dtype in FLOAT_DTYPES
    return tensor if keeps else tensor.to(torch.float32)


def mask(field: str, value: TensorInput) -> Tensor:
    """Return ``value``, made of 0 and 1 or booleans, as bool ``[tokens]``.

    Raises:
        ExperienceError: Another value than 0 and 1, or not one-dimensional.
    """
    if isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 1:
        return value
    plain = _plain(value, _BOOLS, np.bool_)
    if plain is not None:
        return plain
    wanted = "booleans, or 0 and 1"
    tensor = _one_dimensional(field, _as_tensor(field, value, wanted), wanted)
    result = tensor != 0
    if not bool((result == tensor).all()):
        raise ExperienceError(f"{field} holds {tensor[result != tensor][0].item()}, wanted {wanted}")
    return result


def expert_numbers(field: str, value: TensorInput) -> Tensor:
    """Return expert numbers as uint8 ``[tokens - 1, layers, top-k]``.

    Raises:
        ExperienceError: Not integers in 0..255, or not three-dimensional.
    """
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        tensor = value
    else:
        tensor = _integers(field, value, torch.uint8, "expert numbers from 0 to 255")
    if tensor.dim() != 3:
        raise ExperienceError(
            f"{field} has shape {tuple(tensor.shape)}, wanted three dimensions: [tokens - 1, layers, top-k]"
        )
    return tensor


def number(field: str, value: object) -> float:
    """Return ``value`` (a number, a numpy scalar or a tensor of one element) as a Python float.

    Raises:
        ExperienceError: Not one number.
    """
    if isinstance(value, float | int | np.floating | np.integer | np.bool_) or (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        return float(value)
    raise ExperienceError(f"{field} is {short(value)}, wanted one number or None")


def sampling_temperature(field: str, value: object) -> float:
    """Return a sampling temperature: finite, at least 0."""
    result = number(field, value)
    if not math.isfinite(result) or result < 0:
        raise ExperienceError(f"{field} is {result}, wanted a finite number of at least 0")
    return result


def whole(field: str, value: object) -> int:
    """Return ``value`` as a Python int.

    Raises:
        ExperienceError: Not a whole number (a float is refused, even 3.0).
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value)
    raise ExperienceError(f"{field} is {short(value)}, wanted a whole number")


Normaliser = Callable[[str, Any], Tensor]

TENSOR_FIELDS: dict[str, tuple[Normaliser, frozenset[torch.dtype], int]] = {
    "tokens": (token_ids, TOKEN_DTYPES, 1),
    "chosen": (token_ids, TOKEN_DTYPES, 1),
    "rejected": (token_ids, TOKEN_DTYPES, 1),
    "logprobs": (floats, FLOAT_DTYPES, 1),
    "token_level_reward": (floats, FLOAT_DTYPES, 1),
    "advantages": (floats, FLOAT_DTYPES, 1),
    "returns": (floats, FLOAT_DTYPES, 1),
    "teacher_logprobs": (floats, FLOAT_DTYPES, 1),
    "action_mask": (mask, MASK_DTYPES, 1),
    "routed_experts": (expert_numbers, EXPERT_DTYPES, 3),
}
"""Tensor fields by name: what makes one from user input, the dtypes kept, the number of dimensions."""


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
