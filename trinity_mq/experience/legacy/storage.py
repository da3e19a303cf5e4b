"""Torch tensors as plain pickles hold them: a storage in a stream of its own, and a view into it."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience.legacy.restricted_pickle import load
from trinity_mq.experience.legacy.standins import Budget

_NUMEL = struct.Struct("<q")
_STORAGE_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGE_PROTOCOL = 1001

_STORAGES: dict[tuple[str, str], torch.dtype] = {
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


@dataclass(frozen=True)
class Storage:
    """Bytes, and the dtype they are of where a tensor does not say."""

    dtype: torch.dtype
    data: bytearray

    def tensor(self, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> Tensor:
        """Return a view into the storage; torch checks that it lies within."""
        if not self.data:
            # torch.frombuffer takes no empty buffer
            return torch.empty(0, dtype=dtype).as_strided(size, stride, offset)
        return torch.frombuffer(self.data, dtype=dtype).as_strided(size, stride, offset)


def tensor_v2(
    _: Budget, storage: Storage, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    return storage.tensor(storage.dtype, offset, size, stride)


def tensor_v3(
    _: Budget,
    storage: Storage,
    offset: int,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> Tensor:
    return storage.tensor(dtype, offset, size, stride)


def storage(budget: Budget, stream: bytes) -> Storage:
    """Return the storage in a stream as ``torch.save`` wrote before it wrote zip files.

    The stream: five pickles (magic, protocol, byte order, the storage as a persistent id, its key), then for the one
    storage its length (i64) and its bytes.
    """
    if type(stream) is not bytes:
        raise ValueError(f"a storage of {type(stream).__name__}, wanted bytes")
    budget.charge(len(stream))
    file = io.BytesIO(stream)

    def announced(identity: Any) -> tuple[torch.dtype, int]:
        word, dtype, _key, _location, numel = identity[:5]
        if word != "storage" or not isinstance(dtype, torch.dtype) or any(part is not None for part in identity[5:]):
            raise ValueError("a persistent id that describes no whole storage")
        return dtype, numel

    magic, protocol, system = (load(file, 0, {}, budget) for _ in range(3))
    if magic != _STORAGE_MAGIC or protocol != _STORAGE_PROTOCOL or system.get("little_endian") is not True:
        raise ValueError("a storage with a header other than torch's for little-endian machines")
    dtype, numel = load(file, 0, _STORAGES, budget, announced)
    load(file, 0, {}, budget)
    (found,) = _NUMEL.unpack(file.read(_NUMEL.size))
    data = bytearray(file.read())
    if found != numel or len(data) != numel * dtype.itemsize:
        raise ValueError(f"a storage of {numel} x {dtype} with {len(data)} bytes")
    return Storage(dtype, data)
