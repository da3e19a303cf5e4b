"""Converts experiences to columns, and columns to the contents of a body and back.

The contents of a body are a head map and the pieces of a tail.

Decoded values are checked as in the constructor of an experience. Unknown keys, columns and tensor fields are ignored,
because a later release may have added them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.codec import layout
from trinity_mq.experience.codec.column_rules import (
    Tensors,
    are_versions_valid,
    check_all_versions,
    check_columns,
    responses_of,
)
from trinity_mq.experience.codec.columns import (
    INT32,
    INT64,
    Unpack,
    pack_documents,
    pack_floats,
    pack_ints,
    pack_lengths,
    pack_texts,
    required,
    unpack_array,
    unpack_documents,
    unpack_floats,
    unpack_ints,
    unpack_texts,
)
from trinity_mq.experience.codec.documents import DocumentReader, DocumentWriter
from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.codec.tail import MAX_TENSORS, RowLengths, TailWriter, entry_part
from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import DecodeError, EncodeError
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, number, short_repr, whole
from trinity_mq.experience.ragged import (
    Column,
    Indexes,
    Ragged,
    column_copy,
    column_items,
    column_lengths,
    column_of,
    concatenate,
)
from trinity_mq.experience.record import CustomField, Experience

_EAGER_COLUMNS = ("experience_type", "truncate_status", *layout.INT_COLUMNS, *layout.FLOAT_COLUMNS)
"""Columns that the checks of other columns need; they are decoded at once."""
Rows = list[dict[str, Any]]
_EID_PARTS = attrgetter("batch", "task", "run", "step", "suffix")
_DTYPE = attrgetter("dtype")
_SHAPE = attrgetter("shape")


def _pack_versions(values: list[Any], name: str) -> dict[str, Any]:
    counts = [-1 if rows is None else len(rows) for rows in values]
    flat = list(chain.from_iterable(chain.from_iterable(filter(None, values))))
    try:
        return {"i": np.array(flat, dtype=INT64).tobytes(), "l": pack_lengths(counts)}
    except OverflowError as error:
        raise EncodeError(f"{name} holds a number that does not fit 64 bits: {error}") from error


def _pack_ids(values: list[Any], name: str) -> dict[str, Any]:
    """Return a column of ids; each id is a whole number or a text."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return pack_ints(values, name)
    if kinds == {str}:
        return pack_texts(values, name)
    return pack_documents(values, name, DocumentWriter())


def _unpack_ids(column: dict[str, Any], count: int, name: str) -> list[Any]:
    """Return the values of a column of ids; each id is a whole number or a text."""
    if "d" in column:
        values = unpack_documents(column, count, name, DocumentReader([]))
    elif "s" in column or type(column.get("c")) is str:
        values = unpack_texts(column, count, name)
    else:
        values = unpack_ints(column, count, name)
    if not set(map(type, values)) <= {int, str}:
        misfit = next(value for value in values if type(value) not in {int, str})
        raise DecodeError(f"{name} holds {short_repr(misfit)}, wanted whole numbers and texts")
    return values


_PACKERS: dict[str, Callable[[list[Any], str], dict[str, Any]]] = {
    **dict.fromkeys(layout.INT_COLUMNS, pack_ints),
    **dict.fromkeys(layout.TEXT_COLUMNS, pack_texts),
    **dict.fromkeys(layout.FLOAT_COLUMNS, pack_floats),
    layout.VERSIONS: _pack_versions,
    **dict.fromkeys(layout.EID_IDS, _pack_ids),
    **dict.fromkeys(layout.EID_INTS, pack_ints),
    layout.EID_SUFFIX: pack_texts,
}
"""Packers by column, in the order in which the columns are written."""

_UNPACKERS: dict[str, Unpack] = {
    **dict.fromkeys(layout.INT_COLUMNS, unpack_ints),
    **dict.fromkeys(layout.TEXT_COLUMNS, unpack_texts),
    **dict.fromkeys(layout.FLOAT_COLUMNS, unpack_floats),
    **dict.fromkeys(layout.EID_IDS, _unpack_ids),
    **dict.fromkeys(layout.EID_INTS, required(unpack_ints)),
    layout.EID_SUFFIX: required(unpack_texts),
}

_LAZY_COLUMNS = (
    *(name for name in _UNPACKERS if name not in _EAGER_COLUMNS),
    *layout.DOCUMENT_COLUMNS,
    layout.VERSIONS,
    layout.CUSTOM_FIELDS,
)
"""Columns that are decoded on first access."""


def pack(count: int, values: PlainColumns, tensors: Tensors, multi_modal: Tensors) -> tuple[dict[str, Any], list[Any]]:
    """Return the head of a body, ready for msgpack, and the pieces of its tail.

    Raises:
        EncodeError: A value does not fit the format.
    """
    tail, documents = TailWriter(), DocumentWriter()
    if not count:
        values = PlainColumns()
    for name, column in tensors.items():
        tail.add(name, column)
    columns = {name: pack_column(values[name], name) for name, pack_column in _PACKERS.items() if name in values}
    columns |= {
        name: pack_documents(values[name], name, documents) for name in layout.DOCUMENT_COLUMNS if name in values
    }
    if layout.CUSTOM_FIELDS in values:
        custom = [[_described(item) for item in fields] or None for fields in values[layout.CUSTOM_FIELDS]]
        columns[layout.CUSTOM_FIELDS] = pack_documents(custom, layout.CUSTOM_FIELDS, documents)
    for key, column in multi_modal.items():
        tail.add(layout.MULTI_MODAL, column, key)
    if documents.tensors:
        try:
            tail.add(layout.DOCUMENT_TENSORS, column_of(documents.tensors))
        except RuntimeError as error:
            raise EncodeError(f"a tensor in info or messages cannot be read: {error}") from error
    return {"n": count, "columns": columns, "tensors": tail.entries}, tail.buffers()


class _ColumnUnpackers:
    """Unpackers for the columns of one body, with the types, the tensors and the documents' tensors they need."""

    def __init__(self, kinds: Sequence[str], tensors: Tensors, document_tensors: Column) -> None:
        self._kinds = kinds
        self._tensors = tensors
        self._document_tensors = document_tensors
        self._reader: DocumentReader | None = None

    def of(self, name: str) -> Unpack:
        """Return the unpacker for the versions, the custom fields or a column of documents, by its name."""
        if name == layout.VERSIONS:
            return self.versions
        return self.custom_fields if name == layout.CUSTOM_FIELDS else self.documents

    def versions(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return the rows of policy versions of each experience, None for an experience without versions."""
        counts = unpack_array(column.get("l"), INT32, count, name)
        flat = unpack_array(column.get("i"), INT64, None, name)
        sizes = counts.tolist()
        bounds = [0, *accumulate(sizes if min(sizes) >= 0 else [max(size, 0) for size in sizes])]
        if min(sizes) < -1 or 3 * bounds[-1] != len(flat):
            raise DecodeError(f"{name}: the lengths do not add up to {len(flat)} numbers")
        numbers = iter(flat.tolist())
        rows = list(zip(numbers, numbers, numbers, strict=True))
        runs: list[Any] = [rows[start:end] or None for start, end in pairwise(bounds)]
        responses = responses_of(self._kinds, self._tensors)
        if are_versions_valid(runs, responses):
            return runs
        try:
            return check_all_versions(runs, responses)
        except ExperienceError as error:
            raise DecodeError(str(error)) from error

    def documents(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return documents, which may hold tensors of the tail."""
        if self._reader is None:
            # One reader for all columns, because the container limit holds for the whole body. The tensors are copies,
            # because callers may write to them.
            document_tensors = (
                column_items(column_copy(self._document_tensors), len(self._document_tensors[0]))
                if self._document_tensors
                else []
            )
            # never None: _Entries checks
            self._reader = DocumentReader([tensor for tensor in document_tensors if tensor is not None])
        documents = unpack_documents(column, count, name, self._reader)
        kind = layout.DOCUMENT_COLUMNS.get(name, list)
        if not set(map(type, documents)) <= {kind, NoneType}:
            misfit = next(item for item in documents if item is not None and not isinstance(item, kind))
            raise DecodeError(f"{name} is {short_repr(misfit)}, wanted a {kind.__name__}")
        return documents

    def custom_fields(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return custom fields, an empty list for an experience without custom fields."""
        return [[_custom(item) for item in items or ()] for items in self.documents(column, count, name)]


def _described(item: CustomField) -> list[str]:
    return [item.source_field, item.destination_field, str(item.data_type).removeprefix("torch.")]


def _custom(item: Any) -> CustomField:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(part, str) for part in item):
        raise DecodeError(f"{layout.CUSTOM_FIELDS} holds {short_repr(item)}, wanted source, destination and dtype")
    dtype = getattr(torch, item[2], None)
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(f"{layout.CUSTOM_FIELDS} names the dtype {short_repr(item[2])}, which torch does not have")
    return CustomField(item[0], item[1], dtype)


class _Entries:
    """The tensors of the tail, grouped by the fields that the entries of the head name."""

    def __init__(self, count: int, head: dict[str, Any], tail: dict[str, Tensor]) -> None:
        self.fields: Tensors = {}
        self.multi_modal: Tensors = {}
        self.documents: Column = ()
        self._count = count
        if head.keys() != tail.keys():
            raise DecodeError(
                f"head and tail name different tensors: {short_repr(list(head))}, {short_repr(list(tail))}"
            )
        self._row_lengths: dict[tuple[bytes, int | None], RowLengths] = {}
        tensor_count = 0
        for name, entry in head.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("lengths"), bytes):
                raise DecodeError(f"tensors: entry {name!r} is {short_repr(entry)}, wanted field and lengths")
            tensor_count += len(entry["lengths"]) // INT32.itemsize
            if tensor_count > MAX_TENSORS + len(TENSOR_FIELDS) * count:
                raise DecodeError(f"more than {MAX_TENSORS} tensors in one body")
            self._take(name, entry, tail[name])
        if self.documents and (column_lengths(self.documents) < 0).any():
            raise DecodeError("a tensor of the documents is missing")

    def _take(self, name: str, entry: dict[str, Any], flat: Tensor) -> None:
        field, key = entry.get("field"), entry.get("key")
        if isinstance(field, str) and field in TENSOR_FIELDS:
            _, dtypes, dims = TENSOR_FIELDS[field]
            if flat.dtype not in dtypes or flat.dim() != dims or "scalar" in entry:
                raise DecodeError(f"tensors: {name!r} is {short_repr(flat)}, wanted {dims} dimensions of {dtypes}")
            part = self._part(name, entry, flat, self._count)
            self.fields[field] = _joined(name, self.fields[field], part) if field in self.fields else (part,)
        elif field == layout.DOCUMENT_TENSORS:
            item_count = len(self.documents[0]) if self.documents else None
            self.documents = _joined(name, self.documents, self._part(name, entry, flat, item_count))
        elif field == layout.MULTI_MODAL and isinstance(key, str):
            part = self._part(name, entry, flat, self._count)
            self.multi_modal[key] = _joined(name, self.multi_modal.get(key, ()), part)
        elif not isinstance(field, str) or field == layout.MULTI_MODAL:
            raise DecodeError(f"tensors: entry {name!r} is {short_repr(entry)}, wanted a field, for inputs with a key")

    def _part(self, name: str, entry: dict[str, Any], flat: Tensor, count: int | None) -> Ragged:
        """Return an entry as a part of a column. Entries of equal lengths, such as response fields, share their
        lengths.
        """
        key = entry["lengths"], count
        rows = self._row_lengths.get(key)
        if rows is None:
            rows = self._row_lengths[key] = RowLengths.unpacked(entry["lengths"], count, name)
        return entry_part(name, entry, flat, rows)


def _joined(name: str, column: Column, part: Ragged) -> Column:
    """Return the column with one more part; two parts with a tensor for the same item are an error."""
    if column and any(((part.lengths >= 0) & (earlier.lengths >= 0)).any() for earlier in column):
        raise DecodeError(f"tensors: {name!r} holds a second tensor of an experience for the same field")
    return (*column, part)


def unpack(head: dict[str, Any], tail: dict[str, Tensor]) -> tuple[int, PlainColumns, Tensors, Tensors]:
    """Return the contents of a head and a tail: a count, plain columns, tensor columns and multi-modal columns.

    Texts, ids, versions and documents are decoded on first access.

    Raises:
        DecodeError: Head and tail do not describe valid experiences. Columns decoded later raise it on first access.
    """
    count, columns, entries = _parts_of_head(head)
    tail_entries = _Entries(count, entries, tail)
    if count == 0:
        return 0, PlainColumns(), {}, {}
    tensors = _present(tail_entries.fields)
    if "tokens" not in tensors:
        # Every experience has tokens. This check also bounds the claims of a short body with constant columns.
        raise DecodeError(f"no tokens for {count} experiences")
    values = PlainColumns()
    for name in _EAGER_COLUMNS:
        if name in columns:
            values[name] = _UNPACKERS[name](columns[name], count, name)
    try:
        check_columns(values, tensors, count)
    except ExperienceError as error:
        raise DecodeError(str(error)) from error
    if any(name not in columns for name in layout.EID_COLUMNS):
        raise DecodeError("a part of an eid is missing")
    openers = _ColumnUnpackers(values["experience_type"], tensors, tail_entries.documents)
    for name in _LAZY_COLUMNS:
        if name in columns:
            unpack_column = _UNPACKERS.get(name) or openers.of(name)
            values.set_lazy(name, partial(unpack_column, columns[name], count, name))
    return count, values, tensors, _present(tail_entries.multi_modal)


def _parts_of_head(head: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the count, the columns and the tensor entries of a head."""
    count, columns, entries = head.get("n"), head.get("columns"), head.get("tensors")
    if type(count) is not int or not isinstance(columns, dict) or not isinstance(entries, dict):
        raise DecodeError(f"the head has {short_repr(list(head))}, wanted n, columns and tensors")
    if not 0 <= count <= layout.MAX_EXPERIENCES:
        raise DecodeError(f"the head claims {count} experiences, wanted at most {layout.MAX_EXPERIENCES}")
    for name in (*_EAGER_COLUMNS, *_LAZY_COLUMNS):
        if not isinstance(columns.get(name, {}), dict):
            raise DecodeError(f"{name}: {short_repr(columns[name])}, wanted a column")
    return count, columns, entries


def _present(columns: Tensors) -> Tensors:
    """Return the columns that at least one experience uses, without their unused parts."""
    present = {}
    for name, column in columns.items():
        if parts := tuple([part for part in column if not part.empty]):
            present[name] = parts
    return present


def columns_of(experiences: Sequence[Experience]) -> tuple[PlainColumns, Tensors, Tensors]:
    """Return plain columns, tensor columns and multi-modal columns, without fields that are None in all experiences.

    Raises:
        EncodeError: An item is not an Experience, or a field breaks a rule or is a tensor that cannot be read.
    """
    for item in experiences:
        if not isinstance(item, Experience):
            raise EncodeError(f"got {short_repr(item)}, wanted Experience objects")
    rows: Rows = [experience.__dict__ for experience in experiences]
    if not rows:
        return PlainColumns(), {}, {}
    try:
        columns = PlainColumns(
            (name, column)
            for name in (*TENSOR_FIELDS, *layout.PLAIN_COLUMNS)
            if (column := convert_column(name, [row[name] for row in rows]))
        )
        tensors: Tensors = {name: columns.pop(name) for name in TENSOR_FIELDS if name in columns}
        check_columns(columns, tensors, len(rows))
        check_given_versions(columns, tensors)
        columns.update(_eid_columns(rows))
    except ExperienceError as error:
        raise EncodeError(str(error)) from error
    return columns, tensors, _multi_modal_columns(rows)


def check_given_versions(columns: PlainColumns, tensors: Tensors) -> None:
    """Convert the versions to the stored form.

    Raises:
        ExperienceError: The versions break a rule.
    """
    if layout.VERSIONS in columns:
        responses = responses_of(columns["experience_type"], tensors)
        columns[layout.VERSIONS] = check_all_versions(columns[layout.VERSIONS], responses)


def convert_column(name: str, column: list[Any]) -> Any:
    """Return a field's values in the stored form of a column; None or no parts if all values are missing, or empty in
    ``info``, ``metrics`` or ``custom_fields``.

    Raises:
        ExperienceError: A value has a type that the field does not accept.
    """
    kinds = set(map(type, column))
    if kinds == {NoneType}:
        return None
    if name in TENSOR_FIELDS:
        return _tensor_column(name, column, kinds)
    if name in _PLAIN_TYPES:
        expected_type, convert = _PLAIN_TYPES[name]
        if kinds - {NoneType, expected_type}:
            return [item if item is None or type(item) is expected_type else convert(name, item) for item in column]
        return column
    if name in layout.DOCUMENT_COLUMNS:
        return _document_column(name, column, kinds)
    if name == layout.CUSTOM_FIELDS:
        for item in (item for fields in column for item in fields):
            if not isinstance(item, CustomField) or not isinstance(item.data_type, torch.dtype):
                raise ExperienceError(f"custom_fields holds {short_repr(item)}, wanted CustomField with a torch.dtype")
        return column if any(column) else None
    return column


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ExperienceError(f"{name} is {short_repr(value)}, wanted text or None")


_PLAIN_TYPES: dict[str, tuple[type, Callable[[str, Any], Any]]] = {
    **dict.fromkeys(layout.TEXT_COLUMNS, (str, _text)),
    **dict.fromkeys(layout.INT_COLUMNS, (int, whole)),
    **dict.fromkeys(layout.FLOAT_COLUMNS, (float, number)),
}


def _document_column(name: str, column: list[Any], kinds: set[type]) -> list[Any] | None:
    expected_type = layout.DOCUMENT_COLUMNS[name]
    if kinds - {NoneType, expected_type}:
        misfit = next((item for item in column if item is not None and not isinstance(item, expected_type)), None)
        if misfit is not None:
            raise ExperienceError(f"{name} is {short_repr(misfit)}, wanted a {expected_type.__name__}")
    if name in layout.OWN_DOCUMENTS:
        # An empty info or metrics is the default and takes no space. An empty list of messages differs from None.
        return [item or None for item in column] if any(column) else None
    return column


def _tensor_column(name: str, column: list[Any], kinds: set[type]) -> Column:
    normalise, dtypes, dims = TENSOR_FIELDS[name]
    try:
        if kinds == {Tensor} and dims == 1:
            lengths = _lengths(column, dtypes)
            if lengths is not None:
                return (Ragged.packed(concatenate(column), lengths),)
        normalised = [
            item
            if item is None or (isinstance(item, Tensor) and item.dtype in dtypes and item.dim() == dims)
            else normalise(f"experience {number_}: {name}", item)
            for number_, item in enumerate(column)
        ]
        return column_of(normalised)
    except RuntimeError as error:
        raise ExperienceError(f"{name} is a {short_repr(column[0])}, which cannot be read: {error}") from error


def _lengths(column: list[Tensor], dtypes: frozenset[torch.dtype]) -> Indexes | None:
    """Return the lengths of one-dimensional tensors that share one of ``dtypes``, else None."""
    column_dtypes = set(map(_DTYPE, column))
    shapes = list(map(_SHAPE, column))
    if len(column_dtypes) != 1 or not column_dtypes <= dtypes or set(map(len, shapes)) != {1}:
        return None
    return np.fromiter(chain.from_iterable(shapes), dtype=np.int64, count=len(shapes))


def _eid_columns(rows: Rows) -> dict[str, list[Any]]:
    eids = [row["eid"] for row in rows]
    for eid in eids:
        if not isinstance(eid, EID):
            raise EncodeError(f"eid is {short_repr(eid)}, wanted an EID")
    columns = dict(zip(layout.EID_COLUMNS, map(list, zip(*map(_EID_PARTS, eids), strict=True)), strict=True))
    for name, column in columns.items():
        kinds, convert = _EID_TYPES[name]
        if not kinds.issuperset(map(type, column)):
            columns[name] = [convert(name, item) for item in column]
    return columns


def _id(name: str, value: Any) -> int | str:
    if isinstance(value, str):
        return value
    try:
        return whole(name, value)
    except ExperienceError as error:
        raise ExperienceError(f"{error} or text") from error


def _suffix(name: str, value: Any) -> str:
    if type(value) is str:
        return value
    raise ExperienceError(f"{name} is {short_repr(value)}, wanted text")


_EID_TYPES: dict[str, tuple[set[type], Callable[[str, Any], Any]]] = {
    **dict.fromkeys(layout.EID_IDS, ({int, str}, _id)),
    **dict.fromkeys(layout.EID_INTS, ({int}, whole)),
    layout.EID_SUFFIX: ({str}, _suffix),
}


def _multi_modal_columns(rows: Rows) -> Tensors:
    inputs = [row[layout.MULTI_MODAL] for row in rows]
    if set(map(type, inputs)) == {NoneType}:
        return {}
    for number_, item in enumerate(inputs):
        if item is not None and not all(type(key) is str and isinstance(t, Tensor) for key, t in item.items()):
            raise EncodeError(
                f"experience {number_}: {layout.MULTI_MODAL} is {short_repr(item)}, wanted tensors by name"
            )
    keys = dict.fromkeys(key for item in inputs if item is not None for key in item)
    try:
        return {key: column_of([None if item is None else item.get(key) for item in inputs]) for key in keys}
    except RuntimeError as error:
        raise EncodeError(f"{layout.MULTI_MODAL} cannot be read: {error}") from error
