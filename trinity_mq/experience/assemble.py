"""Columns to experiences: what :func:`trinity_mq.experience.codec.decode` makes of a head and a tail."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from trinity_mq.experience.columns import (
    INT32,
    INT64,
    unpack_array,
    unpack_documents,
    unpack_floats,
    unpack_ints,
    unpack_texts,
)
from trinity_mq.experience.documents import DocumentReader
from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.experience import FIELD_NAMES, CustomField, Experience
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, sampling_temperature, short
from trinity_mq.experience.layout import (
    CUSTOM_FIELDS,
    DOCUMENT_COLUMNS,
    DOCUMENT_TENSORS,
    EID_IDS,
    EID_INTS,
    EID_PREFIX,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    MULTI_MODAL,
    TEXT_COLUMNS,
    VERSIONS,
)
from trinity_mq.experience.rules import DPO, TRUNCATE_STATUSES, TYPES, Lengths, check_batch, check_versions
from trinity_mq.experience.tail import MAX_TENSORS, split

MAX_EXPERIENCES = 1 << 16
"""Experiences in one body: each costs a reader about two kilobytes, however few bytes it takes."""

Values = dict[str, list[Any]]


class _Tensors:
    """The tail cut into what the head says."""

    def __init__(self, count: int, head: dict[str, Any], tail: dict[str, Tensor]) -> None:
        self.fields: Values = {}
        self.lengths: dict[str, Lengths] = {}
        self.multi_modal: Values = {}
        self.documents: list[Any] = []
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

    def _take(self, name: str, entry: dict[str, Any], flat: Tensor) -> None:
        field = entry.get("field")
        if field == DOCUMENT_TENSORS:
            pieces, _ = split(name, entry, flat, len(self.documents) or None)
            self.documents = _merged(name, self.documents, pieces)
        elif field == MULTI_MODAL and isinstance(entry.get("key"), str):
            pieces, _ = split(name, entry, flat, self._count)
            self.multi_modal[entry["key"]] = _merged(name, self.multi_modal.get(entry["key"]), pieces)
        elif isinstance(field, str) and field in TENSOR_FIELDS:
            _, dtypes, dims = TENSOR_FIELDS[field]
            if flat.dtype not in dtypes or flat.dim() != dims or "scalar" in entry:
                raise DecodeError(f"tensors: {name!r} is {short(flat)}, wanted {dims} dimensions of {dtypes}")
            pieces, lengths = split(name, entry, flat, self._count)
            known = self.lengths.get(field)
            self.fields[field] = _merged(name, self.fields.get(field), pieces)
            self.lengths[field] = lengths if known is None else lengths.clip(min=known)
        else:
            raise DecodeError(f"tensors: entry {name!r} belongs to field {short(field)}, which no experience has")


def _merged(name: str, known: list[Any] | None, pieces: list[Tensor | None]) -> list[Any]:
    """Return ``pieces`` where ``known`` has none; both having one is an error."""
    if not known:
        return pieces
    if any(a is not None and b is not None for a, b in zip(known, pieces, strict=True)):
        raise DecodeError(f"tensors: {name!r} gives an experience a second tensor for the same field")
    return [b if a is None else a for a, b in zip(known, pieces, strict=True)]


def assemble(head: dict[str, Any], tail: dict[str, Tensor]) -> list[Experience]:
    """Return the experiences that a head and a tail describe.

    Raises:
        DecodeError: They do not describe valid experiences.
    """
    count, columns, entries = head.get("n"), head.get("columns"), head.get("tensors")
    if type(count) is not int or not isinstance(columns, dict) or not isinstance(entries, dict):
        raise DecodeError(f"the head has {short(list(head))}, wanted n, columns and tensors")
    if not 0 <= count <= MAX_EXPERIENCES:
        raise DecodeError(f"the head claims {count} experiences, wanted at most {MAX_EXPERIENCES}")
    tensors = _Tensors(count, entries, tail)
    if count == 0:
        return []
    if "tokens" not in tensors.lengths:
        # Every experience has tokens: this also bounds what a short body can claim in constant columns.
        raise DecodeError(f"no tokens for {count} experiences")
    if None in tensors.documents:
        raise DecodeError("a tensor of the documents is missing")
    values: Values = dict(tensors.fields)
    _scalars(values, columns, count)
    _check(values, tensors.lengths, count)
    _documents(values, columns, count, DocumentReader(tensors.documents))
    values["eid"] = _eids(columns, count)
    values[MULTI_MODAL] = _multi_modal(tensors.multi_modal, count)
    full = [values.get(name) or repeat(None, count) for name in FIELD_NAMES]
    return [Experience.from_checked(dict(zip(FIELD_NAMES, row, strict=True))) for row in zip(*full, strict=True)]


def _column(columns: dict[str, Any], name: str, count: int, unpack: Callable[[Any, int, str], list[Any]]) -> list[Any]:
    """Return the values of a column, None for all where it is absent."""
    if name not in columns:
        return [None] * count
    if not isinstance(columns[name], dict):
        raise DecodeError(f"{name}: {short(columns[name])}, wanted a column")
    return unpack(columns[name], count, name)


def _scalars(values: Values, columns: dict[str, Any], count: int) -> None:
    for names, unpack in (
        (TEXT_COLUMNS, unpack_texts),
        (INT_COLUMNS, unpack_ints),
        (FLOAT_COLUMNS, unpack_floats),
        ((VERSIONS,), _unpack_versions),
    ):
        for name in names:
            values[name] = _column(columns, name, count, unpack)


def _unpack_versions(column: dict[str, Any], count: int, name: str) -> list[Any]:
    counts = unpack_array(column.get("l"), INT32, count, name)
    flat = unpack_array(column.get("i"), INT64, None, name).tolist()
    if (counts < -1).any() or 3 * int(counts.clip(min=0).sum(dtype="i8")) != len(flat):
        raise DecodeError(f"{name}: the lengths do not add up to {len(flat)} numbers")
    rows = iter(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    return [None if size < 0 else [next(rows) for _ in range(size)] for size in counts.tolist()]


def _check(values: Values, lengths: dict[str, Lengths], count: int) -> None:
    """Check what the constructor checks, a column at a time."""
    kinds, statuses, prompts = values["experience_type"], values["truncate_status"], values["prompt_length"]
    if not set(kinds) <= set(TYPES) or not set(statuses) <= set(TRUNCATE_STATUSES) or None in prompts:
        raise DecodeError("experience_type, truncate_status or prompt_length is missing or not one of the known values")
    try:
        check_batch(kinds, statuses, prompts, lengths)
        for heat in {heat for heat in values["temperature"] if heat is not None}:
            sampling_temperature("temperature", heat)
        masked = lengths["action_mask"].tolist() if "action_mask" in lengths else [None] * count
        values[VERSIONS] = [
            None if rows is None else check_versions(rows, None if kind == DPO else response)
            for rows, kind, response in zip(values[VERSIONS], kinds, masked, strict=True)
        ]
    except ExperienceError as error:
        raise DecodeError(str(error)) from error


def _documents(values: Values, columns: dict[str, Any], count: int, reader: DocumentReader) -> None:
    def unpack(column: Any, count: int, name: str) -> list[Any]:
        return unpack_documents(column, count, name, reader)

    for name, kind in DOCUMENT_COLUMNS.items():
        documents = _column(columns, name, count, unpack)
        wrong = next((item for item in documents if item is not None and not isinstance(item, kind)), None)
        if wrong is not None:
            raise DecodeError(f"{name} is {short(wrong)}, wanted a {kind.__name__}")
        values[name] = documents if kind is list else [{} if item is None else item for item in documents]
    values[CUSTOM_FIELDS] = [_customs(item) for item in _column(columns, CUSTOM_FIELDS, count, unpack)]


def _customs(items: Any) -> list[CustomField]:
    if items is None:
        return []
    if not isinstance(items, list):
        raise DecodeError(f"{CUSTOM_FIELDS} is {short(items)}, wanted a list")
    result = []
    for item in items:
        if not isinstance(item, list) or len(item) != 3 or not all(isinstance(part, str) for part in item):
            raise DecodeError(f"{CUSTOM_FIELDS} holds {short(item)}, wanted source, destination and dtype")
        dtype = getattr(torch, item[2], None)
        if not isinstance(dtype, torch.dtype):
            raise DecodeError(f"{CUSTOM_FIELDS} names the dtype {short(item[2])}, which torch does not have")
        result.append(CustomField(item[0], item[1], dtype))
    return result


def _eids(columns: dict[str, Any], count: int) -> list[EID]:
    ids = [_column(columns, EID_PREFIX + name, count, _unpack_ids) for name in EID_IDS]
    numbers = [_column(columns, EID_PREFIX + name, count, unpack_ints) for name in EID_INTS]
    suffixes = _column(columns, EID_PREFIX + "suffix", count, unpack_texts)
    if any(None in column for column in (*ids, *numbers, suffixes)):
        raise DecodeError("a part of an eid is missing")
    return list(map(EID, *ids, *numbers, suffixes))


def _unpack_ids(column: dict[str, Any], count: int, name: str) -> list[Any]:
    """Return the values of a column of ids that are each a whole number or a text."""
    if "d" in column:
        values = unpack_documents(column, count, name, DocumentReader([]))
        wrong = next((value for value in values if type(value) not in {int, str}), None)
        if wrong is not None:
            raise DecodeError(f"{name} holds {short(wrong)}, wanted whole numbers and texts")
        return values
    return (
        unpack_texts(column, count, name)
        if "s" in column or type(column.get("c")) is str
        else unpack_ints(column, count, name)
    )


def _multi_modal(columns: Values, count: int) -> list[dict[str, Tensor] | None]:
    if not columns:
        return [None] * count
    keys = list(columns)
    return [
        {key: tensor for key, tensor in zip(keys, row, strict=True) if tensor is not None} or None
        for row in zip(*columns.values(), strict=True)
    ]
