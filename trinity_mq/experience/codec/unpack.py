"""Head and tail of a body to columns, checked as the constructor of an experience checks its fields.

Keys, columns and tensor fields that this release does not know are left out: a later one may have added them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from trinity_mq.experience.codec.column_rules import Tensors, check_columns
from trinity_mq.experience.codec.columns import INT32, Unpack, unpack_floats, unpack_ints, unpack_texts, without_gaps
from trinity_mq.experience.codec.layout import (
    CUSTOM_FIELDS,
    DOCUMENT_COLUMNS,
    DOCUMENT_TENSORS,
    EID_IDS,
    EID_INTS,
    EID_PREFIX,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    MAX_EXPERIENCES,
    MULTI_MODAL,
    TEXT_COLUMNS,
    VERSIONS,
)
from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.codec.openers import Openers, unpack_ids
from trinity_mq.experience.codec.tail import MAX_TENSORS, part_of
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, short
from trinity_mq.experience.ragged import Column, Ragged, column_lengths


class _Entries:
    """The tail's tensors by what the head says they are."""

    def __init__(self, count: int, head: dict[str, Any], tail: dict[str, Tensor]) -> None:
        self.fields: Tensors = {}
        self.multi_modal: Tensors = {}
        self.documents: Column = ()
        self._count = count
        if head.keys() != tail.keys():
            raise DecodeError(f"head and tail name different tensors: {short(list(head))}, {short(list(tail))}")
        made = 0
        for name, entry in head.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("lengths"), bytes):
                raise DecodeError(f"tensors: entry {name!r} is {short(entry)}, wanted field and lengths")
            made += len(entry["lengths"]) // INT32.itemsize
            if made > MAX_TENSORS + len(TENSOR_FIELDS) * count:
                raise DecodeError(f"more than {MAX_TENSORS} tensors in one body")
            self._take(name, entry, tail[name])
        if self.documents and (column_lengths(self.documents) < 0).any():
            raise DecodeError("a tensor of the documents is missing")

    def _take(self, name: str, entry: dict[str, Any], flat: Tensor) -> None:
        field, key = entry.get("field"), entry.get("key")
        if field == DOCUMENT_TENSORS:
            known = len(self.documents[0]) if self.documents else None
            self.documents = _joined(name, self.documents, part_of(name, entry, flat, known))
        elif field == MULTI_MODAL and isinstance(key, str):
            part = part_of(name, entry, flat, self._count)
            self.multi_modal[key] = _joined(name, self.multi_modal.get(key, ()), part)
        elif isinstance(field, str) and field in TENSOR_FIELDS:
            _, dtypes, dims = TENSOR_FIELDS[field]
            if flat.dtype not in dtypes or flat.dim() != dims or "scalar" in entry:
                raise DecodeError(f"tensors: {name!r} is {short(flat)}, wanted {dims} dimensions of {dtypes}")
            part = part_of(name, entry, flat, self._count)
            self.fields[field] = _joined(name, self.fields.get(field, ()), part)
        elif not isinstance(field, str) or field == MULTI_MODAL:
            raise DecodeError(f"tensors: entry {name!r} is {short(entry)}, wanted a field, for inputs with a key")


def _joined(name: str, known: Column, part: Ragged) -> Column:
    """Return the column with one part more; two parts with a tensor for the same item are an error."""
    if any(((part.lengths >= 0) & (other.lengths >= 0)).any() for other in known):
        raise DecodeError(f"tensors: {name!r} gives an experience a second tensor for the same field")
    return (*known, part)


def unpack(head: dict[str, Any], tail: dict[str, Tensor]) -> tuple[int, PlainColumns, Tensors, Tensors]:
    """Return what a head and a tail describe: a count, plain columns, tensor columns and multi-modal columns.

    Texts, ids, versions and documents are opened when asked for.

    Raises:
        DecodeError: They do not describe valid experiences; what is opened later raises it then.
    """
    count, columns, entries = head.get("n"), head.get("columns"), head.get("tensors")
    if type(count) is not int or not isinstance(columns, dict) or not isinstance(entries, dict):
        raise DecodeError(f"the head has {short(list(head))}, wanted n, columns and tensors")
    if not 0 <= count <= MAX_EXPERIENCES:
        raise DecodeError(f"the head claims {count} experiences, wanted at most {MAX_EXPERIENCES}")
    found = _Entries(count, entries, tail)
    if count == 0:
        return 0, PlainColumns(), {}, {}
    tensors = _present(found.fields)
    if "tokens" not in tensors:
        # Every experience has tokens: this also bounds what a short body can claim in constant columns.
        raise DecodeError(f"no tokens for {count} experiences")
    values = PlainColumns()
    for names, unpack_column in (
        (("experience_type", "truncate_status"), unpack_texts),
        (INT_COLUMNS, unpack_ints),
        (FLOAT_COLUMNS, unpack_floats),
    ):
        for name in names:
            if name in columns:
                values[name] = _unpacked(columns, name, count, unpack_column)
    try:
        check_columns(values, tensors, count)
    except ExperienceError as error:
        raise DecodeError(str(error)) from error
    if any(EID_PREFIX + name not in columns for name in (*EID_IDS, *EID_INTS, "suffix")):
        raise DecodeError("a part of an eid is missing")
    _put_off(values, columns, count, Openers(values["experience_type"], tensors, found.documents))
    return count, values, tensors, _present(found.multi_modal)


def _present(columns: Tensors) -> Tensors:
    """Return the columns without parts, and without columns, that no experience has."""
    kept = {name: tuple(part for part in column if not part.empty) for name, column in columns.items()}
    return {name: column for name, column in kept.items() if column}


def _put_off(values: PlainColumns, columns: dict[str, Any], count: int, openers: Openers) -> None:
    groups: tuple[tuple[tuple[str, ...], Unpack], ...] = (
        (tuple(EID_PREFIX + name for name in EID_IDS), unpack_ids),
        (tuple(EID_PREFIX + name for name in EID_INTS), without_gaps(unpack_ints)),
        ((EID_PREFIX + "suffix",), without_gaps(unpack_texts)),
        (TEXT_COLUMNS, unpack_texts),
        ((VERSIONS,), openers.versions),
        (tuple(DOCUMENT_COLUMNS), openers.documents),
        ((CUSTOM_FIELDS,), openers.custom_fields),
    )
    for names, unpack_column in groups:
        for name in names:
            if name in columns and name not in values:
                values.put_off(name, partial(_unpacked, columns, name, count, unpack_column))


def _unpacked(columns: dict[str, Any], name: str, count: int, unpack_column: Unpack) -> list[Any]:
    if not isinstance(columns[name], dict):
        raise DecodeError(f"{name}: {short(columns[name])}, wanted a column")
    return unpack_column(columns[name], count, name)
