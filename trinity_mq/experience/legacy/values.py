"""Names that legacy pickles of experiences ask for, what stands for each, and plain values from what comes out.

Tensors and arrays are rebuilt from their bytes here: of torch, numpy and the reference nothing is called that a pickle
names.
"""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.codec.tail import DTYPES
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short
from trinity_mq.experience.legacy.standins import Budget, Buildable, Function, RecordType
from trinity_mq.experience.legacy.storage import storage, tensor_v2, tensor_v3
from trinity_mq.messages.msgpack_scan import MAX_NESTING

EXPERIENCE = RecordType("Experience")
IDENTITY = RecordType("EID")
CUSTOM_FIELD = RecordType("CustomField")
_NDARRAY = RecordType("numpy.ndarray")  # only ever handed to _reconstruct

_OBJECT_BYTES = 64
_MIN_INT, _MAX_INT = -(1 << 63), 1 << 64
_ARRAY_DTYPE = re.compile(r"[biufSU]\d{1,9}")
_ARRAY_STATE = 5


class _ArrayDtype(Buildable):
    """A numpy dtype: made of a code such as ``f8``, then told its byte order."""

    def __init__(self, code: str) -> None:
        if not _ARRAY_DTYPE.fullmatch(code):
            raise ValueError(f"an array of dtype {short(code)}, wanted booleans, numbers or text")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        order = state[1]
        if order not in {"<", ">", "|", "="}:
            raise ValueError(f"byte order {short(order)}")
        self.dtype = self.dtype.newbyteorder("<" if order == "=" else order)


class _Array(Buildable):
    """A numpy array that is made empty, then told what it holds."""

    def __init__(self) -> None:
        self.values: np.ndarray[Any, Any] | None = None

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state[:_ARRAY_STATE]
        self.values = _array(raw, dtype, shape, "F" if fortran else "C")


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """Return a view of ``raw`` as an array."""
    if type(raw) is not bytes or type(dtype) is not _ArrayDtype or order not in {"C", "F"}:
        raise ValueError(f"an array of {short(raw)}, wanted the bytes of booleans, numbers or text")
    return np.frombuffer(raw, dtype.dtype).reshape(shape, order=order)


def _numpy_dtype(_: Budget, code: str, align: bool = False, copy: bool = True) -> _ArrayDtype:
    if align:
        raise ValueError("an aligned dtype, wanted one of booleans, numbers or text")
    return _ArrayDtype(code)


def _numpy_scalar(budget: Budget, dtype: Any, raw: Any) -> np.generic:
    if raw == b"" and isinstance(dtype, _ArrayDtype) and dtype.dtype.kind in "SU":
        return cast("np.generic", dtype.dtype.type())  # numpy reads no items of no bytes
    (value,) = plain(_array(raw, dtype, (1,), "C"), budget, "a numpy scalar")
    return cast("np.generic", value)


def _numpy_reconstruct(_: Budget, kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _NDARRAY:
        raise ValueError(f"an array of the class {short(kind)}, wanted numpy.ndarray")
    return _Array()


def _numpy_from_buffer(_: Budget, raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    return _array(raw, dtype, shape, order)


def _latin_1(budget: Budget, text: str, encoding: str) -> bytes:
    """Return the bytes that protocol 2 wrote as text."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError(f"text encoded as {short(encoding)}, wanted latin1")
    budget.charge(len(text))
    return text.encode("latin-1")


def _no_bytes(_: Budget) -> bytes:
    """Return what protocol 2 has no text for."""
    return b""


def _ordered_dict(_: Budget) -> dict[Any, Any]:
    return {}


ADMITTED: dict[tuple[str, str], Any] = {
    ("trinity.common.experience", "Experience"): EXPERIENCE,
    ("trinity.common.experience", "EID"): IDENTITY,
    ("trinity.common.experience", "CustomField"): CUSTOM_FIELD,
    ("collections", "OrderedDict"): Function(_ordered_dict),
    ("_codecs", "encode"): Function(_latin_1),
    ("__builtin__", "bytes"): Function(_no_bytes),
    ("torch._utils", "_rebuild_tensor_v2"): Function(tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function(tensor_v3),
    ("torch.storage", "_load_from_bytes"): Function(storage),
    ("torch", "float64"): torch.float64,
    ("torch", "float32"): torch.float32,
    ("torch", "float16"): torch.float16,
    ("torch", "bfloat16"): torch.bfloat16,
    ("torch", "float8_e4m3fn"): torch.float8_e4m3fn,
    ("torch", "float8_e5m2"): torch.float8_e5m2,
    ("torch", "int64"): torch.int64,
    ("torch", "int32"): torch.int32,
    ("torch", "int16"): torch.int16,
    ("torch", "int8"): torch.int8,
    ("torch", "uint64"): torch.uint64,
    ("torch", "uint32"): torch.uint32,
    ("torch", "uint16"): torch.uint16,
    ("torch", "uint8"): torch.uint8,
    ("torch", "bool"): torch.bool,
    ("numpy", "dtype"): Function(_numpy_dtype),
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy.core.multiarray", "scalar"): Function(_numpy_scalar),
    ("numpy._core.multiarray", "scalar"): Function(_numpy_scalar),
    ("numpy.core.multiarray", "_reconstruct"): Function(_numpy_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): Function(_numpy_reconstruct),
    ("numpy.core.numeric", "_frombuffer"): Function(_numpy_from_buffer),
    ("numpy._core.numeric", "_frombuffer"): Function(_numpy_from_buffer),
}
"""Every name that a legacy pickle may ask for."""

DTYPES_BY_TEXT = {str(dtype): dtype for dtype in DTYPES.values()}
"""Dtypes by what ``str`` says of them, such as ``torch.float32``."""


def plain(value: Any, budget: Budget, where: str, depth: int = 0) -> Any:
    """Return a deep copy of ``value`` that shares nothing: what was one object in two places becomes two.

    Args:
        value: What a pickle left.
        budget: Takes the cost of the copy, which sharing makes far larger than the pickle.
        where: Names ``value`` in errors.
        depth: Containers around it.

    Raises:
        DecodeError: It holds what experiences do not, or nests too deep.
    """
    budget.charge(_OBJECT_BYTES)
    if value is None or isinstance(value, bool | float | np.generic | torch.dtype):
        return value
    if isinstance(value, int):
        if not _MIN_INT <= value < _MAX_INT:
            raise DecodeError(f"{where} is a number of {value.bit_length()} bits, wanted at most 64")
        return value
    if isinstance(value, str | bytes):
        budget.charge(len(value))
        return value
    if depth >= MAX_NESTING:
        raise DecodeError(f"{where} is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, list | tuple):
        items = [plain(item, budget, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: plain(item, budget, f"{where}[{short(key)}]", depth + 1) for key, item in value.items()}
    return _copied(value, budget, where)


def _copied(value: Any, budget: Budget, where: str) -> Any:
    if isinstance(value, _Array):
        value = value.values
    if isinstance(value, Tensor):
        budget.charge(value.numel() * value.dtype.itemsize)
        if value.dtype is torch.bool and value.numel() and value.view(torch.uint8).max() > 1:
            raise DecodeError(f"{where} holds booleans other than 0 and 1")
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        budget.charge(value.nbytes)
        array = value.astype(value.dtype.newbyteorder("="))  # a copy; tensors know no other byte order
        if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
            raise DecodeError(f"{where} holds booleans other than 0 and 1")
        return array
    raise DecodeError(
        f"{where} is a {type(value).__name__}, wanted numbers, text, bytes, lists, maps, arrays or tensors"
    )
