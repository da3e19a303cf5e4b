"""One tensor field of many experiences: concatenated, with the length and the start of each item."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Indexes = npt.NDArray[np.int64]

FEW = 128
"""Up to this many numbers, Python's ``min`` is faster than numpy's."""


def least(numbers: Indexes) -> int:
    """Return the minimum of ``numbers``, which must not be empty."""
    return min(numbers.tolist()) if len(numbers) <= FEW else int(numbers.min())


def equal(left: Indexes, right: Indexes) -> bool:
    """Return whether two arrays hold the same numbers."""
    return left.tobytes() == right.tobytes()


@dataclass(frozen=True, slots=True)
class Ragged:
    """A sequence of items; each item has a tensor or none. All tensors have the same dtype and trailing shape.

    Items may lie anywhere in ``flat``, so that a selection of items, in any order, needs no copy.
    """

    flat: Tensor
    """Rows of all items, ``[rows, ...]``."""
    lengths: Indexes
    """Number of rows of each item, -1 for an item without a tensor."""
    starts: Indexes
    """First row of each item."""
    scalar: bool = False
    """True if items are tensors without dimensions; each takes one row."""
    gapless: bool = False
    """True if items follow each other from the first row to the last and cover ``flat``."""

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.lengths)

    @classmethod
    def packed(cls, flat: Tensor, lengths: Indexes, scalar: bool = False) -> Ragged:
        """Return items that follow each other in ``flat`` without gaps and cover it."""
        rows = np.maximum(lengths, 0)
        return cls(flat, lengths, rows.cumsum() - rows, scalar, True)

    @property
    def empty(self) -> bool:
        """Whether no item has a tensor."""
        if self.gapless and self.flat.shape[0]:
            return False  # every row belongs to an item
        return not len(self.lengths) or bool(self.lengths.max() < 0)

    def select(self, indexes: Indexes | slice) -> Ragged:
        """Return the items at ``indexes``, without copying their data."""
        return Ragged(self.flat, self.lengths[indexes], self.starts[indexes], self.scalar)

    def dense(self) -> Tensor:
        """Return the items' rows in order; a view if they are contiguous already."""
        if self.gapless:
            return self.flat
        rows = np.maximum(self.lengths, 0)
        total = int(rows.sum())
        moved = self.starts - (rows.cumsum() - rows)
        shifts = moved[rows > 0]
        if total == 0:
            return self.flat[:0]
        if (shifts == shifts[0]).all():
            return self.flat.narrow(0, int(shifts[0]), total)
        return self.flat[torch.from_numpy(np.repeat(moved, rows) + np.arange(total))]

    def items(self) -> list[Tensor | None]:
        """Return the tensor of each item, None for an item without a tensor; views."""
        lengths = self.lengths.tolist()
        if lengths and not self.scalar and min(lengths) >= 0:
            # "unsafe" concerns only autograd, which is not used here; the views are the same and cost less
            return list(torch.unsafe_split_with_sizes(self.dense(), lengths))
        return [self[number] for number in range(len(self))]

    def __getitem__(self, number: int) -> Tensor | None:
        """Return the tensor of one item, None if it has no tensor; a view."""
        length, start = int(self.lengths[number]), int(self.starts[number])
        if length < 0:
            return None
        return self.flat[start] if self.scalar else self.flat.narrow(0, start, length)


Column = tuple[Ragged, ...]
"""A tensor field: one part for each dtype and trailing shape, usually a single part. An item is in at most one part."""


def column_of(tensors: Sequence[Tensor | None]) -> Column:
    """Return a column of copies of ``tensors`` on the CPU; it has no part if all are None."""
    groups: dict[Any, tuple[list[Tensor], list[int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None:
            continue
        dims = tensor.dim()
        kind = (tensor.dtype, None if dims == 1 else tensor.shape[1:] if dims else dims)
        members, numbers = groups.setdefault(kind, ([], []))
        members.append(tensor)
        numbers.append(number)
    return tuple(_part(members, numbers, len(tensors)) for members, numbers in groups.values())


def _part(members: list[Tensor], numbers: list[int], count: int) -> Ragged:
    scalar = members[0].dim() == 0
    lengths = np.full(count, -1, dtype=np.int64)
    lengths[numbers] = 1 if scalar else [member.shape[0] for member in members]
    return Ragged.packed(concatenate(members), lengths, scalar)


def concatenate(members: Sequence[Tensor]) -> Tensor:
    """Return tensors of the same dtype and trailing shape as one tensor, detached and on the CPU; always a copy."""
    cpu_members = [member if member.is_cpu else member.cpu() for member in members]
    return (torch.cat(cpu_members) if cpu_members[0].dim() else torch.stack(cpu_members)).detach()


def column_items(column: Column, count: int) -> list[Tensor | None]:
    """Return the tensor of each of ``count`` items, None for an item without a tensor."""
    if len(column) == 1:
        return column[0].items()
    result: list[Tensor | None] = [None] * count
    for part in column:
        for number in np.flatnonzero(part.lengths >= 0).tolist():
            result[number] = part[number]
    return result


def column_lengths(column: Column) -> Indexes:
    """Return the number of rows of each item, -1 for an item without a tensor. The column must have a part."""
    lengths = column[0].lengths
    for part in column[1:]:
        lengths = np.maximum(lengths, part.lengths)
    return lengths


def column_dense(column: Column) -> Tensor:
    """Return the rows of all items in order, in the dtype that holds all of them (torch's promotion). The column must
    have a part, and its trailing shapes must agree.
    """
    if len(column) == 1:
        return column[0].dense()
    return torch.cat([item for item in column_items(column, len(column[0])) if item is not None])


def column_select(column: Column, indexes: Indexes | slice) -> Column:
    """Return the column of the items at ``indexes``, without parts that none of these items uses."""
    parts = (part.select(indexes) for part in column)
    return tuple(part for part in parts if not part.empty)


def column_copy(column: Column) -> Column:
    """Return the column with copied rows, without gaps."""
    return tuple(Ragged.packed(part.dense().clone(), part.lengths, part.scalar) for part in column)


def column_concat(columns: Sequence[Column], counts: Sequence[int]) -> Column:
    """Return the concatenated columns. ``counts`` are their numbers of items, which a column without parts does not
    hold.
    """
    groups: dict[Any, list[tuple[int, Ragged]]] = {}
    for number, column in enumerate(columns):
        kind_counts: Counter[Any] = Counter()
        for part in column:
            kind = (part.flat.dtype, part.flat.shape[1:], part.scalar)
            groups.setdefault((*kind, kind_counts[kind]), []).append((number, part))
            kind_counts[kind] += 1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    result = []
    for members in groups.values():
        lengths = np.full(int(offsets[-1]), -1, dtype=np.int64)
        for number, part in members:
            lengths[offsets[number] : offsets[number + 1]] = part.lengths
        flat = torch.cat([part.dense() for _, part in members])
        result.append(Ragged.packed(flat, lengths, members[0][1].scalar))
    return tuple(result)
