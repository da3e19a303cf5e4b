"""Tail of an experience body: one safetensors blob with one concatenated tensor per field and dtype.

Code here reads and writes the blob itself, so that reading returns views into the received bytes and writing copies
each tensor once. Any safetensors reader can read it. The head holds the field and the item lengths of each entry.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_mq.experience.codec.columns import INT32, pack_lengths, unpack_array
from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import short_repr
from trinity_mq.experience.ragged import Column, Indexes, Ragged, least
from trinity_mq.messages.codec import distinct

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their safetensors names."""

MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 16
MAX_TENSORS = 1 << 19
"""Maximum tensors in a body: each costs a reader some hundred bytes, however short it is."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SIZE = struct.Struct("<Q")
_HEADER = json.JSONDecoder(object_pairs_hook=distinct)


class TailWriter:
    """Collects tensors by field and writes them concatenated."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        """Entries for the head: ``field`` and ``lengths`` per safetensors entry, with ``key`` and ``scalar`` where they
        apply.
        """
        self._flat: dict[str, tuple[torch.dtype, list[int], np.ndarray[Any, Any]]] = {}
        self._count = 0

    def add(self, field: str, column: Column, key: str | None = None) -> None:
        """Add a column of tensors; each of its parts becomes an entry.

        Raises:
            EncodeError: The dtype of a tensor is not supported.
        """
        for part in column:
            self._add(field, key, part)

    def _add(self, field: str, key: str | None, part: Ragged) -> None:
        where = field if key is None else f"{field}[{key!r}]"
        if part.flat.dtype not in _NAMES:
            raise EncodeError(f"{where} is a {short_repr(part.flat)}, wanted one of {', '.join(map(str, _NAMES))}")
        self._count += int((part.lengths >= 0).sum())
        if self._count > MAX_TENSORS:
            raise EncodeError(f"more than {MAX_TENSORS} tensors in one body; send fewer experiences at once")
        try:
            flat = part.dense().contiguous()
            row = flat.reshape(-1)
            # torch refuses a byte view of an empty tensor to which numpy gave a stride of 0
            data = (row.view(torch.uint8) if row.numel() else torch.empty(0, dtype=torch.uint8)).numpy()
        except RuntimeError as error:
            raise EncodeError(f"{where} is a {short_repr(part.flat)}, which cannot be read: {error}") from error
        name = base = field if key is None else f"{field}/{key}"
        while name in self.entries:
            name = f"{base}#{len(self.entries)}"
        entry: dict[str, Any] = {"field": field, "lengths": pack_lengths(part.lengths)}
        self.entries[name] = entry | ({} if key is None else {"key": key}) | ({"scalar": True} if part.scalar else {})
        self._flat[name] = (flat.dtype, list(flat.shape), data)

    def buffers(self) -> list[Any]:
        """Return the blob in pieces for ``bytes.join``."""
        # Wider dtypes first: every entry is then aligned to its item size without gaps, as safetensors requires.
        ordered = sorted(self._flat.items(), key=lambda item: -item[1][0].itemsize)
        header, offset = {}, 0
        for name, (dtype, shape, data) in ordered:
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + data.nbytes]}
            offset += data.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return [_SIZE.pack(len(text)), text, *(data for _, (_, _, data) in ordered)]


def read_tail(blob: memoryview) -> dict[str, Tensor]:
    """Return the entries of a safetensors blob as views into it; callers must not write to them.

    Raises:
        DecodeError: ``blob`` is not a safetensors blob whose entries cover its data exactly.
    """
    if len(blob) < _SIZE.size:
        raise DecodeError(f"tail: {len(blob)} bytes, wanted a safetensors blob")
    (size,) = _SIZE.unpack_from(blob)
    start = _SIZE.size + size
    if size > MAX_HEADER_BYTES or start > len(blob) or start % 8:
        raise DecodeError(
            f"tail: a header of {size} bytes in {len(blob)}, wanted at most {MAX_HEADER_BYTES}, aligned to 8"
        )
    try:
        header = _HEADER.decode(str(blob[_SIZE.size : start], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"tail: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DecodeError(f"tail: the safetensors header is {short_repr(header)}, wanted a map")
    data = _as_array(blob[start:])
    tensors: dict[str, Tensor] = {}
    covered = 0
    for name, entry in header.items():
        tensors[name], covered = _entry(name, entry, data, covered)
    if covered != len(data):
        raise DecodeError(f"tail: {len(data) - covered} bytes belong to no tensor")
    return tensors


class _WritableView:
    """Presents read-only memory to numpy as writable. Otherwise torch would warn about the read-only array."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data  # keeps the memory alive
        self.__array_interface__ = {**data.__array_interface__, "data": (_address(data), False)}


def _address(data: npt.NDArray[np.uint8]) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def _as_array(data: memoryview) -> npt.NDArray[np.uint8]:
    """Return bytes as an array; a view if their address is aligned for every dtype."""
    if not len(data):
        return np.empty(0, dtype=np.uint8)
    row = np.frombuffer(data, dtype=np.uint8)
    if _address(row) % 8:
        return row.copy()
    return row if row.flags.writeable else np.asarray(_WritableView(row))


def _entry(name: str, entry: Any, data: npt.NDArray[np.uint8], covered: int) -> tuple[Tensor, int]:
    """Return the tensor of one header entry, which must begin at the offset ``covered``, and the offset of its end."""
    fields = entry if isinstance(entry, dict) else {}
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields.get("dtype"), str) else None
    shape, offsets = _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if dtype is None or shape is None or len(shape) > MAX_DIMENSIONS or offsets is None or len(offsets) != 2:
        raise DecodeError(f"tail: entry {name!r} is {short_repr(entry)}, wanted dtype, shape and data_offsets")
    count = math.prod(shape)
    begin, end = offsets
    if begin != covered or end > len(data) or end - begin != count * dtype.itemsize or begin % dtype.itemsize:
        raise DecodeError(
            f"tail: entry {name!r} is {short_repr(entry)}, which does not fit {len(data) - covered} bytes left"
        )
    if count == 0:
        if max(shape) >= 1 << 31:
            raise DecodeError(f"tail: entry {name!r} has shape {shape} without data")
        return torch.empty(shape, dtype=dtype), end
    if dtype is torch.bool and data[begin:end].max() > 1:
        raise DecodeError(f"tail: entry {name!r} holds booleans other than 0 and 1")
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=begin)
    return flat if len(shape) == 1 else flat.view(shape), end


def _naturals(value: Any) -> list[int] | None:
    """Return ``value`` if it is a list of whole numbers from 0 within torch's range, else None."""
    if type(value) is not list:
        return None
    for number in value:
        if type(number) is not int or not 0 <= number < 1 << 62:
            return None
    return value


class RowLengths(NamedTuple):
    """Lengths of the items of an entry. The items follow each other in the entry's tensor."""

    lengths: Indexes
    """Number of rows of each item, -1 for an item without a tensor."""
    starts: Indexes
    total: int

    @classmethod
    def unpacked(cls, data: Any, count: int | None, name: str) -> RowLengths:
        """Return the int32 lengths in ``data``.

        Args:
            data: Packed lengths.
            count: Expected number of items; None accepts any number.
            name: Name of the entry, for errors.

        Raises:
            DecodeError: The number of lengths differs, or a length is less than -1.
        """
        lengths = unpack_array(data, INT32, count, f"lengths of {name}").astype(np.int64)
        if not len(lengths):
            return cls(lengths, lengths, 0)
        smallest = least(lengths)
        if smallest < -1:
            raise DecodeError(f"lengths of {name} hold {smallest}, wanted -1 or more")
        rows = lengths if smallest >= 0 else np.maximum(lengths, 0)
        bounds = rows.cumsum()
        return cls(lengths, bounds - rows, int(bounds[-1]))


def entry_part(name: str, entry: dict[str, Any], flat: Tensor, rows: RowLengths) -> Ragged:
    """Return an entry as a part of a column.

    Args:
        name: Name of the entry, for errors.
        entry: The head's map for the entry.
        flat: The concatenated tensor.
        rows: The lengths from the head.

    Raises:
        DecodeError: The lengths do not add up to the tensor.
    """
    if flat.dim() < 1 or rows.total != flat.shape[0]:
        raise DecodeError(f"lengths of {name} do not add up to shape {tuple(flat.shape)}")
    scalar = bool(entry.get("scalar"))
    if scalar and (flat.dim() != 1 or (np.abs(rows.lengths) != 1).any()):
        raise DecodeError(f"{name} is marked scalar with lengths other than 1")
    return Ragged(flat, rows.lengths, rows.starts, scalar, gapless=True)
