"""An unpickler that accepts only the names that pickles of experiences need, with stand-ins for most of them.

``find_class`` prevents a pickle from executing code. It does not prevent it from exhausting memory, time or the C
stack: run this module in a process with limits (child.py).
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.codec.tail import DTYPES
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import short_repr

Admitted = Mapping[tuple[str, str], Any]
"""Objects by the (module, name) under which a pickle may refer to them."""

_NUMEL = struct.Struct("<q")
_STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGE_PROTOCOL = 1001
_ARRAY_DTYPE = re.compile(r"[biufSU]\d{1,9}")


class PickledExperience:
    """Stand-in for Trinity's ``Experience``; its attributes are the fields."""


class PickledEID:
    """Stand-in for Trinity's ``EID``."""


class PickledCustomField:
    """Stand-in for Trinity's ``CustomField``."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, admitted: Admitted) -> None:
        super().__init__(file)
        self._admitted = admitted

    def find_class(self, module: str, name: str) -> Any:
        """Return the object for an admitted name."""
        try:
            return self._admitted[module, name]
        except KeyError:
            raise DecodeError(
                f"the pickle refers to {short_repr(module)} {short_repr(name)}, which experiences do not need; no "
                "code was executed"
            ) from None


class _StorageUnpickler(_Unpickler):
    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        """Return dtype and length of a storage that is described as a whole."""
        word, dtype, _key, _location, numel = pid[:5]
        if word != "storage" or not isinstance(dtype, torch.dtype) or any(part is not None for part in pid[5:]):
            raise ValueError("a persistent id that does not describe a whole storage")
        return dtype, numel


def load(data: memoryview) -> Any:
    """Return the value of the single pickle in ``data``.

    Raises:
        DecodeError: The pickle is malformed, followed by other bytes, or refers to a name that is not admitted.
        MemoryError: The pickle unfolds to more memory than this process may allocate.
    """
    file = io.BytesIO(data)
    try:
        value = _Unpickler(file, ADMITTED).load()
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # hostile bytes raise errors of many classes
        raise DecodeError(f"the pickle is malformed before byte {file.tell()}: {short_repr(str(error))}") from error
    if file.tell() != len(data):
        raise DecodeError(f"{len(data) - file.tell()} bytes follow the pickle, wanted none")
    return value


def _storage(stream: bytes) -> tuple[torch.dtype, bytearray]:
    """Return dtype and bytes of a storage in the format of ``torch.save`` from before zip files.

    The stream has five pickles (magic, protocol, byte order, the storage as a persistent id, its key), then the length
    (i64) and the bytes of the single storage.
    """
    file = io.BytesIO(stream)
    magic, protocol, system = (_Unpickler(file, {}).load() for _ in range(3))
    if magic != _STORAGE_MAGIC or protocol != _STORAGE_PROTOCOL or system.get("little_endian") is not True:
        raise ValueError("a storage with a header other than torch's for little-endian machines")
    dtype, numel = _StorageUnpickler(file, _STORAGES).load()
    _Unpickler(file, {}).load()
    (stored_numel,) = _NUMEL.unpack(file.read(_NUMEL.size))
    data = bytearray(file.read())
    if stored_numel != numel or len(data) != numel * dtype.itemsize:
        raise ValueError(f"a storage of {numel} x {dtype} with {len(data)} bytes")
    return dtype, data


def _tensor(data: bytearray, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> Tensor:
    """Return a view into a storage; torch checks that the view lies within the storage."""
    # torch.frombuffer accepts no empty buffer
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.as_strided(size, stride, offset)


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    dtype, data = storage
    return _tensor(data, dtype, offset, size, stride)


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    return _tensor(storage[1], dtype, offset, size, stride)


class _ArrayDtype:
    """Stand-in for a numpy dtype: created from a code such as ``f8``, then given its byte order."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        if not _ARRAY_DTYPE.fullmatch(code):
            raise ValueError(f"an array of dtype {short_repr(code)}, wanted booleans, numbers or text")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder("<" if state[1] == "=" else state[1])


class _Array(np.ndarray[Any, Any]):
    """Stand-in for a numpy array: created empty, then given its contents."""

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        array = _frombuffer(raw, dtype, shape, "F" if fortran else "C")
        contiguous_state: Any = (1, array.shape, array.dtype, False, array.tobytes())
        super().__setstate__(contiguous_state)


def _reconstruct(_kind: Any, _shape: Any, _code: Any) -> _Array:
    return _Array((0,), "b")


def _frombuffer(raw: bytes, dtype: _ArrayDtype, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    array = np.frombuffer(raw, dtype.dtype).reshape(shape, order=order)
    return array.astype(dtype.dtype.newbyteorder("="))  # tensors support only the native byte order


def _scalar(dtype: _ArrayDtype, raw: bytes) -> np.generic:
    if not raw and dtype.dtype.kind in "SU":
        return cast("np.generic", dtype.dtype.type())  # numpy cannot read an item of zero bytes
    return cast("np.generic", _frombuffer(raw, dtype, (1,), "C")[0])


def _latin_1(text: str, encoding: str) -> bytes:
    """Return the bytes that protocol 2 wrote as text."""
    if encoding != "latin1":
        raise ValueError(f"text encoded as {short_repr(encoding)}, wanted latin1")
    return text.encode("latin-1")


_STORAGES: Admitted = {
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
    ("torch.storage", "UntypedStorage"): torch.uint8,
}

DTYPES_BY_TEXT = {str(dtype): dtype for dtype in DTYPES.values()}
"""Dtypes by their text, such as ``torch.float32``."""

ADMITTED: Admitted = {
    ("trinity.common.experience", "Experience"): PickledExperience,
    ("trinity.common.experience", "EID"): PickledEID,
    ("trinity.common.experience", "CustomField"): PickledCustomField,
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _latin_1,
    ("__builtin__", "bytes"): bytes,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("numpy", "dtype"): _ArrayDtype,
    ("numpy", "ndarray"): np.ndarray,
    **{("torch", text.removeprefix("torch.")): dtype for text, dtype in DTYPES_BY_TEXT.items()},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
"""All names to which a legacy pickle may refer."""
