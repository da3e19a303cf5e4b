"""Values of an experience's fields: conversion to the stored form, and equality."""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

TensorInput = Tensor | np.ndarray[Any, Any] | Sequence[Any]
"""Input that a tensor field accepts."""
Normaliser = Callable[[str, Any], Tensor]

RESPONSE_FIELDS = ("logprobs", "action_mask", "token_level_reward", "advantages", "returns", "teacher_logprobs")
"""Fields with one value per response token."""

TOKEN_DTYPES = frozenset({torch.int32})
FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MASK_DTYPES = frozenset({torch.bool})
EXPERT_DTYPES = frozenset({torch.uint8})


class ExperienceError(ValueError, AssertionError):
    """A field of an experience breaks a rule; the message names the field, its value and the rule."""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def short_repr(value: object) -> str:
    """Return a short form of ``value`` for error messages, at a cost that does not grow with its size."""
    if isinstance(value, Tensor):
        return f"tensor of {value.dtype}, shape {tuple(value.shape)}"
    if isinstance(value, bytes | bytearray | memoryview) and len(value) > 40:
        return f"{len(value)} bytes"
    return _REPR.repr(value)


def _as_tensor(field: str, value: TensorInput, expected: str) -> Tensor:
    """Return ``value`` as a tensor of its natural dtype."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, str | bytes):
        raise ExperienceError(f"{field} is {short_repr(value)}, wanted {expected} as list, tuple, array or tensor")
    try:
        if isinstance(value, list | tuple) and any(issubclass(kind, Tensor) for kind in set(map(type, value))):
            value = [item.item() if isinstance(item, Tensor) else item for item in value]
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ExperienceError(f"{field} is {short_repr(value)}, wanted {expected}: {error}") from error


def _integers(field: str, tensor: Tensor, dtype: torch.dtype, expected: str) -> Tensor:
    """Return ``tensor`` as ``dtype`` if every number is an integer that fits."""
    if tensor.numel() == 0:
        return tensor.to(dtype)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise ExperienceError(
            f"{field} holds {tensor.dtype} ({short_repr(tensor.tolist())}), wanted {expected}; convert it explicitly"
        )
    fitted = tensor.to(dtype)
    if not torch.equal(fitted.to(torch.int64), tensor.to(torch.int64)):
        misfit = tensor[fitted.to(torch.int64) != tensor.to(torch.int64)].flatten()[0].item()
        raise ExperienceError(f"{field} holds {misfit}, wanted {expected}: it does not fit {dtype}")
    return fitted


def _floats(field: str, tensor: Tensor, dtype: torch.dtype, expected: str) -> Tensor:
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ExperienceError(f"{field} holds {tensor.dtype} ({short_repr(tensor.tolist())}), wanted {expected}")
    return tensor.to(dtype)


def _booleans(field: str, tensor: Tensor, dtype: torch.dtype, expected: str) -> Tensor:
    result = tensor != 0
    if not bool((result == tensor).all()):
        raise ExperienceError(f"{field} holds {tensor[result != tensor][0].item()}, wanted {expected}")
    return result


def _normaliser(
    kept_dtypes: frozenset[torch.dtype],
    dims: int,
    expected: str,
    convert: Callable[[str, Tensor, torch.dtype, str], Tensor],
    dtype: torch.dtype,
    plain: tuple[frozenset[type], type[np.generic]] | None = None,
) -> Normaliser:
    """Return a function that converts a field's input to a tensor and raises ExperienceError for invalid input.

    Args:
        kept_dtypes: Dtypes that tensors keep.
        dims: Dimensions of the field.
        expected: Description of valid input, for errors.
        convert: Converts a tensor of another dtype to ``dtype``, or raises.
        dtype: Dtype for input that is not a tensor or whose dtype is not in ``kept_dtypes``.
        plain: Python types of the numbers in a list that is converted at once, and the numpy type of this conversion.
    """

    def normalise(field: str, value: TensorInput) -> Tensor:
        if isinstance(value, Tensor) and value.dtype in kept_dtypes and value.dim() == dims:
            return value
        if plain is not None and isinstance(value, list | tuple) and value and set(map(type, value)) <= plain[0]:
            with contextlib.suppress(OverflowError, ValueError, TypeError):  # the slower path below raises the error
                return torch.from_numpy(np.array(value, dtype=plain[1]))
        tensor = _as_tensor(field, value, expected)
        if tensor.dim() != dims:
            shape = "one dimension: [tokens]" if dims == 1 else "three dimensions: [tokens - 1, layers, top-k]"
            raise ExperienceError(f"{field} has shape {tuple(tensor.shape)}, wanted {expected} in {shape}")
        return convert(field, tensor, dtype, expected)

    return normalise


def number(field: str, value: object) -> float:
    """Return ``value`` (a number, a numpy scalar or a tensor of one element) as a Python float.

    Raises:
        ExperienceError: ``value`` is not one number.
    """
    if isinstance(value, float | int | np.floating | np.integer | np.bool_) or (
        isinstance(value, Tensor) and value.numel() == 1
    ):
        return float(value)
    raise ExperienceError(f"{field} is {short_repr(value)}, wanted one number or None")


def sampling_temperature(value: object) -> float:
    """Return a sampling temperature: a finite number of at least 0.

    Raises:
        ExperienceError: ``value`` is not such a number.
    """
    result = number("temperature", value)
    if not math.isfinite(result) or result < 0:
        raise ExperienceError(f"temperature is {result}, wanted a finite number of at least 0")
    return result


def whole(field: str, value: object) -> int:
    """Return ``value`` as a Python int.

    Raises:
        ExperienceError: ``value`` is not a whole number (a float is refused, even 3.0).
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value)
    raise ExperienceError(f"{field} is {short_repr(value)}, wanted a whole number")


_token_ids = _normaliser(TOKEN_DTYPES, 1, "integer token ids", _integers, torch.int32, (frozenset({int}), np.int32))
_numbers = _normaliser(FLOAT_DTYPES, 1, "numbers", _floats, torch.float32, (frozenset({int, float}), np.float32))
_mask = _normaliser(MASK_DTYPES, 1, "booleans, or 0 and 1", _booleans, torch.bool, (frozenset({bool}), np.bool_))
_experts = _normaliser(EXPERT_DTYPES, 3, "expert numbers from 0 to 255", _integers, torch.uint8)

TENSOR_FIELDS: dict[str, tuple[Normaliser, frozenset[torch.dtype], int]] = {
    **dict.fromkeys(("tokens", "chosen", "rejected"), (_token_ids, TOKEN_DTYPES, 1)),
    "logprobs": (_numbers, FLOAT_DTYPES, 1),
    "token_level_reward": (_numbers, FLOAT_DTYPES, 1),
    "advantages": (_numbers, FLOAT_DTYPES, 1),
    "returns": (_numbers, FLOAT_DTYPES, 1),
    "teacher_logprobs": (_numbers, FLOAT_DTYPES, 1),
    "action_mask": (_mask, MASK_DTYPES, 1),
    "routed_experts": (_experts, EXPERT_DTYPES, 3),
}
"""Tensor fields by name: converter of user input, stored dtypes, number of dimensions."""


def values_equal(left: Any, right: Any) -> bool:
    """Return whether two values are equal: tensors and arrays by dtype, shape and values, with NaN equal to NaN.

    Lists and tuples are equal if their items are, because msgpack has only one kind of sequence.
    """
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _same_tensors(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _same_arrays(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(values_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(values_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float) and left != left and right != right:  # noqa: PLR0124  # NaN
        return True
    return bool(left == right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # double: numpy supports neither bfloat16 nor 8-bit floats
    arrays = [(item.double() if item.is_floating_point() else item).numpy(force=True) for item in (left, right)]
    return _same_arrays(arrays[0], arrays[1])


def _same_arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
