"""Columns of numbers and texts in the head of an experience body: packed arrays instead of one msgpack object per
value.

A column is a map with one of these keys:

* ``c``: the single value of all experiences (text or whole number)
* ``i``: whole numbers as int64, ``f``: numbers as float64; optionally ``n``: one byte per value, 1 for a missing value
* ``s``: UTF-8 texts in a row, ``l``: bytes of each text as int32; with ``k`` the texts are distinct, and ``k`` (int32)
  holds the index of each value's text, -1 for a missing value
* ``d``: msgpack documents in a row, ``l``: bytes of each document as int32, -1 for a missing document

All arrays are little-endian. A column without any value is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_mq.experience.codec.documents import DocumentReader, DocumentWriter
from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import short_repr

Column = dict[str, Any]
Unpack = Callable[[Column, int, str], list[Any]]
"""Takes a column, the number of its values and its name for errors."""

INT32, INT64, FLOAT64 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f8")


def pack_lengths(lengths: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Return ``lengths`` as int32."""
    try:
        return np.asarray(lengths, dtype=INT32).tobytes()
    except OverflowError as error:
        raise EncodeError(f"a length does not fit 32 bits: {error}") from error


def required(unpack_column: Unpack) -> Unpack:
    """Return an unpacker that treats a missing value as an error."""

    def unpack_all(column: Column, count: int, name: str) -> list[Any]:
        values = unpack_column(column, count, name)
        if None in values:
            raise DecodeError(f"{name} is missing in an experience")
        return values

    return unpack_all


def unpack_array(data: Any, dtype: np.dtype[Any], count: int | None, name: str) -> npt.NDArray[Any]:
    """Return a packed array of ``count`` values (any number for None).

    Raises:
        DecodeError: ``data`` is not bytes, or has another number of values.
    """
    if not isinstance(data, bytes) or len(data) % dtype.itemsize:
        raise DecodeError(f"{name}: wanted packed {dtype.name} values, got {short_repr(data)}")
    if count is not None and len(data) != count * dtype.itemsize:
        raise DecodeError(f"{name}: {len(data) // dtype.itemsize} values, wanted {count}")
    return np.frombuffer(data, dtype=dtype)


def pack_ints(values: Sequence[int | None], name: str) -> Column:
    """Return a column of whole numbers."""
    return _pack_numbers(values, "i", INT64, 0, name)


def pack_floats(values: Sequence[float | None], name: str) -> Column:
    """Return a column of numbers."""
    return _pack_numbers(values, "f", FLOAT64, 0.0, name)


def _pack_numbers(values: Sequence[Any], key: str, dtype: np.dtype[Any], filler: float, name: str) -> Column:
    first = values[0]
    if key == "i" and first is not None and values.count(first) == len(values):
        return {"c": checked_int64(first, name)}
    try:
        if None in values:
            missing = np.fromiter((value is None for value in values), dtype=np.uint8, count=len(values))
            filled = [filler if value is None else value for value in values]
            return {key: np.array(filled, dtype=dtype).tobytes(), "n": missing.tobytes()}
        return {key: np.array(values, dtype=dtype).tobytes()}
    except (OverflowError, TypeError, ValueError) as error:
        raise EncodeError(f"{name}: wanted numbers that fit 64 bits or None: {error}") from error


def checked_int64(value: int, name: str) -> int:
    """Return ``value`` if it fits 64 bits."""
    if not -(1 << 63) <= value < 1 << 63:
        raise EncodeError(f"{name} is {value}, wanted a whole number that fits 64 bits")
    return value


def unpack_ints(column: Column, count: int, name: str) -> list[Any]:
    """Return the values of a column of whole numbers."""
    if "c" in column:
        if type(column["c"]) is not int or column["c"] >= 1 << 63:
            raise DecodeError(f"{name}: the constant is {short_repr(column['c'])}, wanted a whole number of 64 bits")
        return [column["c"]] * count
    return _unpack_numbers(column, "i", INT64, count, name)


def unpack_floats(column: Column, count: int, name: str) -> list[Any]:
    """Return the values of a column of numbers."""
    return _unpack_numbers(column, "f", FLOAT64, count, name)


def _unpack_numbers(column: Column, key: str, dtype: np.dtype[Any], count: int, name: str) -> list[Any]:
    values: list[Any] = unpack_array(column.get(key), dtype, count, name).tolist()
    if "n" in column:
        missing = unpack_array(column["n"], np.dtype(np.uint8), count, name).tolist()
        return [None if is_missing else value for value, is_missing in zip(values, missing, strict=True)]
    return values


def pack_texts(values: Sequence[str | None], name: str) -> Column:
    """Return a column of texts; each distinct text is stored once."""
    unique = dict.fromkeys(values)
    distinct = [value for value in unique if value is not None]
    if len(distinct) == len(unique) == 1:
        _utf8(distinct[0], name)
        return {"c": distinct[0]}
    if len(distinct) == len(values):
        text = "".join(distinct)
        if text.isascii():
            return {"s": text.encode(), "l": pack_lengths(list(map(len, distinct)))}
        return _joined([_utf8(value, name) for value in distinct], "s")
    codes: dict[str | None, int] = {value: number for number, value in enumerate(distinct)}
    codes[None] = -1
    return _joined([_utf8(value, name) for value in distinct], "s") | {
        "k": pack_lengths(list(map(codes.__getitem__, values)))
    }


def _utf8(value: str, name: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"{name} is {short_repr(value)}, wanted text that UTF-8 can hold: {error}") from error


def _joined(parts: Sequence[bytes | None], key: str) -> Column:
    lengths = [-1 if part is None else len(part) for part in parts]
    return {key: b"".join([part for part in parts if part is not None]), "l": pack_lengths(lengths)}


def _bounds(column: Column, key: str, count: int | None, name: str) -> tuple[bytes, list[int], list[int]]:
    """Return the data of a column of texts or documents, the length of each (-1 for a missing value), and the
    boundaries of the present values in the data: one boundary more than present values.
    """
    lengths: list[int] = unpack_array(column.get("l"), INT32, count, name).tolist()
    data = column.get(key)
    bounds = [
        0,
        *accumulate(lengths if min(lengths, default=0) >= 0 else [length for length in lengths if length >= 0]),
    ]
    if not isinstance(data, bytes) or min(lengths, default=0) < -1 or bounds[-1] != len(data):
        raise DecodeError(f"{name}: the lengths do not add up to the data: {short_repr(data)}")
    return data, lengths, bounds


def _with_gaps(values: list[Any], lengths: list[int]) -> list[Any]:
    """Return ``values`` with None inserted for lengths of -1."""
    if len(values) == len(lengths):
        return values
    present = iter(values)
    return [None if length < 0 else next(present) for length in lengths]


def unpack_texts(column: Column, count: int, name: str) -> list[Any]:
    """Return the values of a column of texts."""
    if "c" in column:
        if not isinstance(column["c"], str):
            raise DecodeError(f"{name}: the constant is {short_repr(column['c'])}, wanted text")
        return [column["c"]] * count
    codes = column.get("k")
    data, lengths, bounds = _bounds(column, "s", count if codes is None else None, name)
    try:
        if data.isascii():
            text = data.decode()
            present = [text[start:end] for start, end in pairwise(bounds)]
        else:
            present = [data[start:end].decode() for start, end in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise DecodeError(f"{name}: not UTF-8: {error}") from error
    texts = _with_gaps(present, lengths)
    if codes is None:
        return texts
    numbers = unpack_array(codes, INT32, count, name).tolist()
    if min(numbers, default=0) < -1 or max(numbers, default=-1) >= len(texts):
        raise DecodeError(f"{name}: refers to a text beyond the last of {len(texts)}")
    texts.append(None)  # the target of index -1
    return list(map(texts.__getitem__, numbers))


def pack_documents(values: Sequence[Any], name: str, writer: DocumentWriter) -> Column:
    """Return a column of free-form values, None for a missing value."""
    parts = writer.write_all(values, name)
    return _joined(parts, "d")


def unpack_documents(column: Column, count: int, name: str, reader: DocumentReader) -> list[Any]:
    """Return the values of a column of documents."""
    data, lengths, bounds = _bounds(column, "d", count, name)
    try:
        return _with_gaps(reader.read_all(data, bounds), lengths)
    except DecodeError as error:
        raise DecodeError(f"{name}: {error}") from error
