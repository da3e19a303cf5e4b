"""Columns to what a body is made of: the head as a map, and the pieces of the tail."""

from __future__ import annotations

from typing import Any

import numpy as np

from trinity_mq.experience.codec.column_rules import Tensors
from trinity_mq.experience.codec.columns import (
    INT64,
    Column,
    pack_documents,
    pack_floats,
    pack_ints,
    pack_lengths,
    pack_texts,
)
from trinity_mq.experience.codec.documents import DocumentWriter
from trinity_mq.experience.codec.layout import (
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
from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.codec.tail import TailWriter
from trinity_mq.experience.errors import EncodeError
from trinity_mq.experience.ragged import column_of


def pack(count: int, values: PlainColumns, tensors: Tensors, multi_modal: Tensors) -> tuple[dict[str, Any], list[Any]]:
    """Return the head of a body, ready for msgpack, and the pieces of its tail.

    Raises:
        EncodeError: A value does not fit the format.
    """
    tail, documents = TailWriter(), DocumentWriter()
    for name, column in tensors.items():
        tail.add(name, column)
    columns = _columns(values, documents) if count else {}
    for key, column in multi_modal.items():
        tail.add(MULTI_MODAL, column, key)
    if documents.tensors:
        try:
            tail.add(DOCUMENT_TENSORS, column_of(documents.tensors))
        except RuntimeError as error:
            raise EncodeError(f"a tensor in info or messages cannot be read: {error}") from error
    return {"n": count, "columns": columns, "tensors": tail.entries}, tail.buffers()


def _columns(values: PlainColumns, documents: DocumentWriter) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for names, pack_column in (
        (INT_COLUMNS, pack_ints),
        (TEXT_COLUMNS, pack_texts),
        (FLOAT_COLUMNS, pack_floats),
        ((VERSIONS,), _pack_versions),
        ([EID_PREFIX + name for name in EID_IDS], _pack_ids),
        ([EID_PREFIX + name for name in EID_INTS], pack_ints),
        ([EID_PREFIX + "suffix"], pack_texts),
    ):
        for name in names:
            if name in values:
                columns[name] = pack_column(values[name], name)
    for name in DOCUMENT_COLUMNS:
        if name in values:
            columns[name] = pack_documents(values[name], name, documents)
    if CUSTOM_FIELDS in values:
        customs = [
            [[item.source_field, item.destination_field, str(item.data_type).removeprefix("torch.")] for item in fields]
            or None
            for fields in values[CUSTOM_FIELDS]
        ]
        columns[CUSTOM_FIELDS] = pack_documents(customs, CUSTOM_FIELDS, documents)
    return columns


def _pack_versions(values: list[Any], name: str) -> Column:
    counts = [-1 if rows is None else len(rows) for rows in values]
    flat = [part for rows in values if rows is not None for row in rows for part in row]
    try:
        return {"i": np.array(flat, dtype=INT64).tobytes(), "l": pack_lengths(counts)}
    except OverflowError as error:
        raise EncodeError(f"{name} holds a number that does not fit 64 bits: {error}") from error


def _pack_ids(values: list[Any], name: str) -> Column:
    """Return a column of ids that are each a whole number or a text."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return pack_ints(values, name)
    if kinds == {str}:
        return pack_texts(values, name)
    return pack_documents(values, name, DocumentWriter())
