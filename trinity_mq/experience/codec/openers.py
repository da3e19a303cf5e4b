"""Opens the columns of a body whose values need more than themselves: versions, documents, ids."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch

from trinity_mq.experience.codec.column_rules import Tensors, check_all_versions, responses_of, sound_versions
from trinity_mq.experience.codec.columns import INT32, INT64, unpack_array, unpack_documents, unpack_ints, unpack_texts
from trinity_mq.experience.codec.documents import DocumentReader
from trinity_mq.experience.codec.layout import CUSTOM_FIELDS, DOCUMENT_COLUMNS
from trinity_mq.experience.errors import DecodeError
from trinity_mq.experience.fields import ExperienceError, short
from trinity_mq.experience.ragged import Column, column_copy, column_items
from trinity_mq.experience.record import CustomField


class Openers:
    """Knows what the columns of one body need: types, tensors, and the tensors that documents refer to."""

    def __init__(self, kinds: Sequence[str], tensors: Tensors, held: Column) -> None:
        self._kinds = kinds
        self._tensors = tensors
        self._held = held
        self._reader: DocumentReader | None = None

    def versions(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return runs of policy versions."""
        counts = unpack_array(column.get("l"), INT32, count, name)
        flat = unpack_array(column.get("i"), INT64, None, name)
        sizes = np.maximum(counts, 0).astype(np.int64)
        if (counts < -1).any() or 3 * int(sizes.sum()) != len(flat):
            raise DecodeError(f"{name}: the lengths do not add up to {len(flat)} numbers")
        numbers = iter(flat.tolist())
        rows = list(zip(numbers, numbers, numbers, strict=True))
        ends = sizes.cumsum()
        found: list[Any] = [rows[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
        if not sizes.all():
            found = [item or None for item in found]
        responses = responses_of(self._kinds, self._tensors)
        if sound_versions(sizes, flat.reshape(-1, 3), responses):
            return found
        try:
            return check_all_versions(found, responses)
        except ExperienceError as error:
            raise DecodeError(str(error)) from error

    def documents(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return documents, which may hold tensors of the tail."""
        if self._reader is None:
            # one for all columns: what a body may hold is counted over all of them
            # copies: who is handed a document may write to what is in it
            held = column_items(column_copy(self._held), len(self._held[0])) if self._held else []
            self._reader = DocumentReader([tensor for tensor in held if tensor is not None])  # none is: unpack.py
        found = unpack_documents(column, count, name, self._reader)
        kind = DOCUMENT_COLUMNS.get(name, list)
        if not set(map(type, found)) <= {kind, NoneType}:
            wrong = next(item for item in found if item is not None and not isinstance(item, kind))
            raise DecodeError(f"{name} is {short(wrong)}, wanted a {kind.__name__}")
        return found

    def custom_fields(self, column: dict[str, Any], count: int, name: str) -> list[Any]:
        """Return custom fields, an empty list where there are none."""
        return [[_custom(item) for item in items or ()] for items in self.documents(column, count, name)]


def _custom(item: Any) -> CustomField:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(part, str) for part in item):
        raise DecodeError(f"{CUSTOM_FIELDS} holds {short(item)}, wanted source, destination and dtype")
    dtype = getattr(torch, item[2], None)
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(f"{CUSTOM_FIELDS} names the dtype {short(item[2])}, which torch does not have")
    return CustomField(item[0], item[1], dtype)


def unpack_ids(column: dict[str, Any], count: int, name: str) -> list[Any]:
    """Return the values of a column of ids that are each a whole number or a text."""
    if "d" in column:
        values = unpack_documents(column, count, name, DocumentReader([]))
    elif "s" in column or type(column.get("c")) is str:
        values = unpack_texts(column, count, name)
    else:
        values = unpack_ints(column, count, name)
    if not set(map(type, values)) <= {int, str}:
        wrong = next(value for value in values if type(value) not in {int, str})
        raise DecodeError(f"{name} holds {short(wrong)}, wanted whole numbers and texts")
    return values
