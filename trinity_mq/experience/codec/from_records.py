"""Converts experiences to columns: each field of all experiences at once, with the checks of the constructor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_mq.experience.codec import layout
from trinity_mq.experience.codec.column_rules import Tensors, check_all_versions, check_columns, responses_of
from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.eid import EID
from trinity_mq.experience.errors import EncodeError
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, number, short_repr, whole
from trinity_mq.experience.ragged import Column, Indexes, Ragged, column_of, concatenate
from trinity_mq.experience.record import CustomField, Experience

Rows = list[dict[str, Any]]

_EID_PARTS = attrgetter("batch", "task", "run", "step", "suffix")
_DTYPE = attrgetter("dtype")
_SHAPE = attrgetter("shape")


def columns_of(experiences: Sequence[Experience]) -> tuple[PlainColumns, Tensors, Tensors]:
    """Return plain columns, tensor columns and multi-modal columns, without fields that are None in all experiences.

    Raises:
        EncodeError: A field breaks a rule, or is a tensor that cannot be read.
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
    """Return a field's values in the stored form of a column; None or no parts if all values are missing.

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
