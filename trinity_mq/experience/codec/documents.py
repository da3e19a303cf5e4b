"""Free-form values (info, metrics, messages) as msgpack documents; their tensors move to the tail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import short_repr
from trinity_mq.messages.codec import distinct
from trinity_mq.messages.msgpack_scan import MAX_NESTING, QUICK_ARRAY_LENGTH, container_bytes, measure, scan

MAX_CONTAINERS = 1 << 18
"""Maximum lists and maps in all documents of a body: each costs a reader far more memory than its one byte."""

TENSOR, ARRAY = 1, 2
"""msgpack extension types. The payload is the index (u32, little-endian) of a tensor in the tail; it is decoded as a
tensor or as an array.
"""

_ATOMS = frozenset({str, int, float, bool, type(None), bytes, msgpack.Timestamp})
_LEAVES = _ATOMS | {Tensor, np.ndarray}
_NUMBER_BYTES = 4
SAMPLED = 16
"""Number of documents at the start of a column that are compared, to see whether most documents are repeated."""
_SMALL_MAP, _SMALL_MAP_ITEMS = 0x80, 0x0F
"""First byte of a map of up to 15 items, and the bits in it that hold the number of items."""


class DocumentWriter:
    """Packs documents and collects their tensors.

    Args:
        max_containers: Maximum lists and maps in all documents.
    """

    def __init__(self, max_containers: int = MAX_CONTAINERS) -> None:
        self._max_containers = max_containers
        self.tensors: list[Tensor] = []
        self._containers = 0
        self._bound = 0
        """Upper bound on the number of containers in packed documents that were not counted exactly."""
        self._uncounted: list[list[bytes]] = []
        self._packer = msgpack.Packer(use_bin_type=True)

    def write_all(self, values: Sequence[Any], name: str) -> list[bytes | None]:
        """Return each value as one msgpack document, None for None.

        Raises:
            EncodeError: As :meth:`write`.
        """
        present = [value for value in values if value is not None]
        if present and _flat(present):
            # most values are maps of plain values, which need no recursive conversion
            try:
                documents = list(map(self._packer.pack, present))
            except (ValueError, OverflowError, TypeError):
                self._packer.reset()  # packed again below, for an error that names the place
            else:
                self._count_later(documents, name)
                packed = iter(documents)
                return [None if value is None else next(packed) for value in values]
        return [
            None if value is None else self.write(value, f"experience {number}: {name}")
            for number, value in enumerate(values)
        ]

    def write(self, value: Any, where: str) -> bytes:
        """Return ``value`` as one msgpack document.

        Raises:
            EncodeError: A part of the value cannot be packed; the message names it by ``where`` and the key.
        """
        plain = self._plain(value, where, 0)
        try:
            document: bytes = self._packer.pack(plain)
        except (ValueError, OverflowError, TypeError) as error:
            self._packer.reset()
            raise EncodeError(_blame(plain, where) or f"{where}: {error}") from error
        try:
            containers = measure(document)
        except ValueError as error:
            raise EncodeError(f"{where}: {error}") from error
        self._count(containers, where)
        return document

    def _count_later(self, documents: list[bytes], where: str) -> None:
        """Count the containers in documents exactly only when they may exceed the limit; until then use a bound."""
        self._bound += container_bytes(b"".join(documents))
        self._uncounted.append(documents)
        self._count(0, where)

    def _count(self, containers: int, where: str) -> None:
        self._containers += containers
        if self._containers + self._bound > self._max_containers:
            self._containers += sum(map(measure, chain.from_iterable(self._uncounted)))
            self._bound, self._uncounted = 0, []
        if self._containers > self._max_containers:
            raise EncodeError(
                f"{where}: more than {self._max_containers} lists and maps in one body; keep numbers in tensors, or "
                "send fewer experiences at once"
            )

    def _plain(self, value: Any, where: str, depth: int) -> Any:
        """Return ``value`` in types that msgpack packs; the value itself if nothing has to change."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if depth > MAX_NESTING:
            raise EncodeError(f"{where}: nested deeper than {MAX_NESTING} levels")
        if isinstance(value, dict):
            if kind is dict and all(type(key) is str and type(item) in _ATOMS for key, item in value.items()):
                return value
            return {_key(key, where): self._plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            if kind is list and all(type(item) in _ATOMS for item in value):
                return value
            return [self._plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
        return self._leaf(value, where)

    def _leaf(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self._moved(TENSOR, value)
        if isinstance(value, np.generic) and value.dtype.kind in "biufSU":
            return value.item()
        if isinstance(value, np.ndarray):
            try:
                return self._moved(ARRAY, torch.from_numpy(np.array(value)))
            except TypeError as error:
                raise EncodeError(f"{where} is an array of {value.dtype}: {error}") from error
        if isinstance(value, str | int | float | bytes):  # subclasses: enums, bool-likes
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise EncodeError(
            f"{where} is {short_repr(value)} of type {type(value).__module__}.{type(value).__qualname__}, wanted None, "
            "a number, text, bytes, lists and maps of those, numpy scalars, arrays or tensors; convert it first"
        )

    def _moved(self, extension: int, tensor: Tensor) -> msgpack.ExtType:
        self.tensors.append(tensor)
        return msgpack.ExtType(extension, (len(self.tensors) - 1).to_bytes(_NUMBER_BYTES, "little"))


class DocumentReader:
    """Unpacks documents; ``tensors`` are the tensors to which the documents of the body refer by index."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._containers = 0

    def read_all(self, data: bytes, bounds: Sequence[int]) -> list[Any]:
        """Return the values of the documents in ``data``, which follow each other without gaps at ``bounds``, from 0 to
        the end.

        Raises:
            DecodeError: As :meth:`read`.
        """
        if container_bytes(data) <= MAX_CONTAINERS - self._containers:
            values = self._repeated_maps(data, bounds)
            if values is None:
                values = self._flat_maps(data, bounds)
            if values is not None:
                self._containers += len(values)
                return values
        return [self.read(data[start:end]) for start, end in pairwise(bounds)]

    def _repeated_maps(self, data: bytes, bounds: Sequence[int]) -> list[Any] | None:
        """Return the maps in ``data`` as :meth:`_flat_maps` does, decoding equal documents once. Return None if few
        documents are equal, or if a document is not a flat map or contains a tensor.
        """
        if len(bounds) <= SAMPLED or len({data[a:b] for a, b in pairwise(bounds[: SAMPLED + 1])}) > SAMPLED // 2:
            return None
        documents = [data[start:end] for start, end in pairwise(bounds)]
        distinct = list(dict.fromkeys(documents))
        if len(distinct) > len(documents) // 2:
            return None
        maps = self._flat_maps(b"".join(distinct), [0, *accumulate(map(len, distinct))])
        if maps is None or not _kinds(maps) <= _ATOMS:  # tensors must not be shared between documents
            return None
        map_by_document = dict(zip(distinct, maps, strict=True))
        return [map_by_document[document].copy() for document in documents]

    def _flat_maps(self, data: bytes, bounds: Sequence[int]) -> list[Any] | None:
        """Return the maps in ``data`` if they have few items and hold no lists and maps, as most do; else None."""
        unpacker = msgpack.Unpacker(
            raw=False,
            strict_map_key=True,
            ext_hook=self._extension,
            max_array_len=0,
            max_map_len=_SMALL_MAP_ITEMS,
            max_buffer_size=len(data),
        )
        unpacker.feed(data)
        unpack, tell = unpacker.unpack, unpacker.tell
        values: list[Any] = []
        try:
            for start, end in pairwise(bounds):
                value = unpack()
                if tell() != end or data[start] != _SMALL_MAP | len(value):  # a repeated key shows in the size
                    return None
                values.append(value)
            return values if _kinds(values) <= _LEAVES else None
        except (ValueError, TypeError, msgpack.UnpackException):
            return None  # decoded again one by one, for an error that names the document

    def _count(self, containers: int) -> None:
        self._containers += containers
        if self._containers > MAX_CONTAINERS:
            raise DecodeError(f"more than {MAX_CONTAINERS} lists and maps in one body")

    def read(self, document: bytes) -> Any:
        """Return the value in one msgpack document.

        Raises:
            DecodeError: ``document`` is not exactly one document, is nested too deep or holds too many containers.
        """
        try:
            self._count(measure(document))
            try:
                return self._unpack(document, QUICK_ARRAY_LENGTH)
            except ValueError:
                scan(document)  # it claims no more than it holds, so the array sizes can be trusted
                return self._unpack(document, len(document))
        except DecodeError:
            raise
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DecodeError(f"not a msgpack document: {error or type(error).__name__}") from error

    def _unpack(self, document: bytes, max_array: int) -> Any:
        return msgpack.unpackb(
            document,
            raw=False,
            strict_map_key=True,
            ext_hook=self._extension,
            object_pairs_hook=distinct,
            max_array_len=max_array,
        )

    def _extension(self, code: int, data: bytes) -> Tensor | np.ndarray[Any, Any]:
        if code not in {TENSOR, ARRAY} or len(data) != _NUMBER_BYTES:
            raise DecodeError(f"unknown msgpack extension {code} of {len(data)} bytes")
        number = int.from_bytes(data, "little")
        if number >= len(self._tensors):
            raise DecodeError(f"a document refers to tensor {number} of {len(self._tensors)}")
        tensor = self._tensors[number]
        if code == TENSOR:
            return tensor
        try:
            array: np.ndarray[Any, Any] = tensor.numpy()
        except TypeError as error:
            raise DecodeError(f"an array of {tensor.dtype}: {error}") from error
        return array


def _flat(values: Sequence[Any]) -> bool:
    """Return whether all values are dicts from text to plain values."""
    return (
        set(map(type, values)) <= {dict}
        and set(map(type, chain.from_iterable(values))) <= {str}
        and _kinds(values) <= _ATOMS
    )


def _kinds(maps: Sequence[dict[str, Any]]) -> set[type]:
    """Return the types of the values in dicts."""
    return set(map(type, chain.from_iterable(map(dict.values, maps))))


def _key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return str.__str__(key)  # the text, whatever the class shows: str() of an enum may be its name
    raise EncodeError(f"{where} has the key {short_repr(key)}, wanted text; use str({short_repr(key)})")


def _blame(value: Any, where: str) -> str | None:
    """Return the error text for the part of a plain value that msgpack refuses; None if msgpack accepts the value."""
    if isinstance(value, dict):
        parts = [(item, f"{where}[{key!r}]") for key, item in value.items()] + [(key, where) for key in value]
    elif isinstance(value, list):
        parts = [(item, f"{where}[{number}]") for number, item in enumerate(value)]
    else:
        try:
            msgpack.packb(value)
        except (ValueError, OverflowError, TypeError) as error:
            return f"{where} is {short_repr(value)}, which msgpack cannot hold: {error}"
        return None
    return next((fault for item, path in parts if (fault := _blame(item, path))), None)
