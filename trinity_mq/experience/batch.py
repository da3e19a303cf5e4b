"""Many experiences as columns. In this form they are sent, filtered, given advantages and converted to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trinity_mq.experience.codec import layout
from trinity_mq.experience.codec.body import Body, Compression, decode_frame, encode_frame
from trinity_mq.experience.codec.column_rules import Tensors, check_columns
from trinity_mq.experience.codec.content import check_given_versions, columns_of, convert_column, pack, unpack
from trinity_mq.experience.codec.lazy import PlainColumns
from trinity_mq.experience.codec.tail import read_tail
from trinity_mq.experience.eid import EID, composed_ids
from trinity_mq.experience.errors import EncodeError
from trinity_mq.experience.fields import TENSOR_FIELDS, ExperienceError, short_repr
from trinity_mq.experience.ragged import (
    Column,
    Indexes,
    Ragged,
    column_concat,
    column_copy,
    column_dense,
    column_items,
    column_lengths,
    column_select,
)
from trinity_mq.experience.record import FIELD_NAMES, Experience


class ExperienceBatch(Sequence[Experience]):
    """Experiences as columns, validated like experiences, without one object per experience.

    An index, iteration and :meth:`to_list` give new :class:`Experience` objects, as :meth:`to_list` describes; a slice
    gives a batch. :meth:`replace` returns a batch with other values. Columns may be views into a received body: do not
    write to them.
    """

    __slots__ = ("_count", "_ids", "_multi_modal", "_tensors", "_values")

    def __init__(self, count: int, values: PlainColumns, tensors: Tensors, multi_modal: Tensors) -> None:
        """Take over columns that fit together. Callers use :meth:`of` or :meth:`decode` instead."""
        self._count = count
        self._values = values
        self._tensors = tensors
        self._multi_modal = multi_modal
        self._ids: dict[str, list[str]] = {}

    @classmethod
    def of(cls, experiences: Sequence[Experience]) -> ExperienceBatch:
        """Return ``experiences`` as columns with copies of their tensors. A batch is returned unchanged.

        Fields are checked again as in the constructor, because they may have been assigned since then.

        Raises:
            EncodeError: A field breaks a rule; the message names experience, field and value.
        """
        if isinstance(experiences, ExperienceBatch):
            return experiences
        return cls(len(experiences), *columns_of(experiences))

    @classmethod
    def decode(cls, data: Body) -> ExperienceBatch:
        """Return the experiences in an experience body.

        Tensors are views into ``data``: do not write to them, nor to ``data``. Texts, ids, versions and documents
        (info, metrics, messages) are decoded on first access; :meth:`settle` decodes all of them.

        Raises:
            DecodeError: ``data`` is not exactly one body of experiences whose tensors and numbers agree.
        """
        head, tail = decode_frame(data)
        return cls(*unpack(head, read_tail(tail)))

    @classmethod
    def concat(cls, batches: Iterable[ExperienceBatch]) -> ExperienceBatch:
        """Return the experiences of all batches, in order."""
        parts = [batch for batch in batches if len(batch)]
        if len(parts) == 1:
            return parts[0]
        counts = [len(part) for part in parts]
        plain, *rest = zip(*(part.columns() for part in parts), strict=True) if parts else ((), (), ())
        values = PlainColumns()
        for name in _names(plain):
            join = partial(_concatenated, name, plain, counts)
            if all(batch_columns.opened(name) for batch_columns in plain if name in batch_columns):
                values[name] = join()
            else:
                values.set_lazy(name, join)
        tensors, multi_modal = (
            {
                name: column_concat([batch_columns.get(name, ()) for batch_columns in columns], counts)
                for name in _names(columns)
            }
            for columns in rest
        )
        return cls(sum(counts), values, tensors, multi_modal)

    def encode(self, compression: Compression = "none") -> bytes:
        """Return the batch as one experience body (schemas/README.md).

        Raises:
            EncodeError: A value does not fit the format; the message names experience, field and key.
        """
        if self._count > layout.MAX_EXPERIENCES:
            raise EncodeError(
                f"{self._count} experiences, wanted at most {layout.MAX_EXPERIENCES} in one body; send several"
            )
        return encode_frame(*pack(self._count, self._values, self._tensors, self._multi_modal), compression)

    def __len__(self) -> int:
        """Return the number of experiences."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> ExperienceBatch: ...
    def __getitem__(self, index: int | slice) -> Experience | ExperienceBatch:
        """Return one experience, or the batch of a slice."""
        if isinstance(index, slice):
            return self._taken(index, len(range(*index.indices(self._count))))
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(f"experience {index} of {self._count}")
        return self._taken(slice(at, at + 1), 1).to_list()[0]

    def __iter__(self) -> Iterator[Experience]:
        """Yield the experiences as objects."""
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        """Compare experience by experience with another batch."""
        if not isinstance(other, ExperienceBatch):
            return NotImplemented
        return self is other or self.to_shared_list() == other.to_shared_list()

    __hash__ = None  # type: ignore[assignment]  # what its documents hold can be written to

    def __repr__(self) -> str:
        return f"ExperienceBatch({self._count} experiences, {', '.join([*self._tensors, *self._values])})"

    def settle(self) -> ExperienceBatch:
        """Decode all columns and return the batch; after this call no access can raise DecodeError.

        Raises:
            DecodeError: A text, an id, a version or a document is invalid.
        """
        self._values.open_all()
        return self

    def to_list(self) -> list[Experience]:
        """Return the experiences as objects that may be changed.

        They share nothing with the batch except the texts and lists inside ``messages``, ``info`` and other documents.

        Raises:
            DecodeError: As :meth:`settle`.
        """
        experiences = self.owned().to_shared_list()
        for experience in experiences:
            experience.info, experience.metrics = experience.info.copy(), experience.metrics.copy()
            experience.custom_fields = experience.custom_fields.copy()
        return experiences

    def owned(self) -> ExperienceBatch:
        """Return the same experiences with copies of the tensors, which may be changed."""
        tensors = {name: column_copy(column) for name, column in self._tensors.items()}
        multi_modal = {name: column_copy(column) for name, column in self._multi_modal.items()}
        return ExperienceBatch(self._count, self._values, tensors, multi_modal)

    def to_shared_list(self) -> list[Experience]:
        """Return the experiences as objects that share their tensors and documents with the batch. For callers that
        only read them, or that own the batch alone.

        Raises:
            DecodeError: As :meth:`settle`.
        """
        columns: dict[str, Iterable[Any]] = {
            name: column_items(column, self._count) for name, column in self._tensors.items()
        }
        columns |= {name: column for name, column in self._values.opened_items() if name in FIELD_NAMES}
        for name, kind in layout.OWN_DOCUMENTS.items():
            column = columns.get(name) or [None] * self._count
            columns[name] = [kind() if item is None else item for item in column] if None in column else column
        columns["eid"] = self._eids()
        if self._multi_modal:
            columns[layout.MULTI_MODAL] = self._inputs()
        if not self._count:
            return []
        absent = [None] * self._count
        return list(map(Experience.from_valid_fields, *(columns.get(name, absent) for name in FIELD_NAMES)))

    def _eids(self) -> Iterable[EID]:
        return map(EID, *(self._values[name] for name in layout.EID_COLUMNS)) if self._count else ()

    def _inputs(self) -> list[dict[str, Tensor] | None]:
        keys = list(self._multi_modal)
        items = [column_items(self._multi_modal[key], self._count) for key in keys]
        rows = zip(*items, strict=True)
        return [{key: item for key, item in zip(keys, row, strict=True) if item is not None} or None for row in rows]

    def select(self, indexes: Sequence[int] | Indexes | npt.NDArray[np.bool_]) -> ExperienceBatch:
        """Return the experiences at ``indexes``, in that order, or the experiences where a boolean array is True.

        Tensors are not copied. If all experiences are selected in their order, the batch itself is returned.

        Raises:
            IndexError: An index is out of range, or a boolean array has the wrong shape.
        """
        chosen = np.asarray(indexes)
        if chosen.dtype == np.bool_:
            if chosen.shape != (self._count,):
                raise IndexError(f"a choice of shape {chosen.shape}, wanted one boolean for each of {self._count}")
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64, copy=False).reshape(-1)
        if len(chosen) and not -self._count <= chosen.min() <= chosen.max() < self._count:
            raise IndexError(f"indexes from {chosen.min()} to {chosen.max()} of {self._count} experiences")
        if len(chosen) == self._count and (chosen == np.arange(self._count)).all():
            return self
        return self._taken(chosen, len(chosen))

    def _taken(self, indexes: Indexes | slice, count: int) -> ExperienceBatch:
        take: Callable[[list[Any]], list[Any]]
        if isinstance(indexes, slice):
            take = itemgetter(indexes)
        else:
            listed = indexes.tolist()

            def take(column: list[Any]) -> list[Any]:
                return list(map(column.__getitem__, listed))

        values = self._values.map(take)
        tensors, multi_modal = (
            {name: part_rows for name, column in columns.items() if (part_rows := column_select(column, indexes))}
            for columns in (self._tensors, self._multi_modal)
        )
        taken = ExperienceBatch(count, values, tensors, multi_modal)
        taken._ids = {kind: take(names) for kind, names in self._ids.items()}
        return taken

    def replace(self, **columns: Sequence[Any] | Ragged) -> ExperienceBatch:
        """Return the batch with other values in some fields, except ``eid`` and ``multi_modal_inputs``.

        Args:
            columns: By field, one value per experience (None for a missing value); for a tensor field also a
                :class:`Ragged`. A list of tensors is copied, all other values are taken over.

        Raises:
            ExperienceError: A field does not exist, or a value breaks a rule.
        """
        values, tensors = PlainColumns(self._values), dict(self._tensors)
        for name, new_values in columns.items():
            if name not in TENSOR_FIELDS and name not in layout.PLAIN_COLUMNS:
                replaceable = (*TENSOR_FIELDS, *layout.PLAIN_COLUMNS)
                raise ExperienceError(f"{name!r} is not a field that can be replaced, wanted one of {replaceable}")
            if len(new_values) != self._count:
                raise ExperienceError(f"{name} has {len(new_values)} values, wanted one for each of {self._count}")
            values.pop(name, None)
            tensors.pop(name, None)
            if isinstance(new_values, Ragged):
                tensors[name] = (_fitting(name, new_values),)
            elif len(new_values) and (column := convert_column(name, list(new_values))):
                (tensors if name in TENSOR_FIELDS else values)[name] = column
        if self._count:
            check_columns(values, tensors, self._count)
            has_others = not columns.keys().isdisjoint(("versions", "action_mask", "experience_type"))
            if has_others and layout.VERSIONS in values and values.opened(layout.VERSIONS):
                check_given_versions(values, tensors)
        replaced = ExperienceBatch(self._count, values, tensors, self._multi_modal)
        replaced._ids = self._ids
        return replaced

    def values(self, name: str) -> list[Any]:
        """Return one value per experience of a field without tensors, or of a part of the ids, such as ``eid.task``.
        Missing values are None, also an empty ``info`` or ``metrics``; empty ``custom_fields`` are None or an empty
        list. The list belongs to the batch: do not write to it.

        Raises:
            KeyError: The name is not such a field or part.
        """
        if name not in layout.PLAIN_COLUMNS and name not in layout.EID_COLUMNS:
            raise KeyError(
                f"{name!r} is not a field without tensors, wanted one of {layout.PLAIN_COLUMNS} or {layout.EID_COLUMNS}"
            )
        return self._values.get(name) or [None] * self._count

    def column(self, name: str) -> Column:
        """Return the column of a tensor field: a tuple of parts, empty if no experience has the field."""
        if name not in TENSOR_FIELDS:
            raise KeyError(f"{name!r} is not a tensor field, wanted one of {tuple(TENSOR_FIELDS)}")
        return self._tensors.get(name, ())

    def columns(self) -> tuple[PlainColumns, Tensors, Tensors]:
        """Return the plain columns, the tensor columns and the multi-modal columns. They belong to the batch."""
        return self._values, self._tensors, self._multi_modal

    def lengths(self, name: str) -> Indexes:
        """Return the first dimension of a tensor field for each experience, -1 without the field; int64."""
        column = self.column(name)
        return column_lengths(column) if column else np.full(self._count, -1, dtype=np.int64)

    def dense(self, name: str) -> Tensor:
        """Return a tensor field of all experiences, concatenated; a view if no data has to move.

        Raises:
            KeyError: No experience has the field.
        """
        column = self.column(name)
        if not column:
            raise KeyError(f"no experience has {name}")
        return column_dense(column)

    def prompt_lengths(self) -> Indexes:
        """Return the prompt length of each experience, int64."""
        return np.array(self._values.get("prompt_length", []), dtype=np.int64)

    def ids(self, kind: str) -> list[str]:
        """Return the ``uid``, ``sid``, ``rid`` or ``tid`` of each experience. The list belongs to the batch."""
        if kind not in self._ids:
            parts = [self._values[name] for name in layout.EID_COLUMNS] if self._count else [[]] * 5
            self._ids[kind] = composed_ids(kind, *parts)
        return self._ids[kind]


def _names(columns: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    return dict.fromkeys(name for batch_columns in columns for name in batch_columns)


def _concatenated(name: str, plain: Sequence[PlainColumns], counts: Sequence[int]) -> list[Any]:
    absent: Any = [] if name == layout.CUSTOM_FIELDS else None
    return [
        value
        for batch_columns, count in zip(plain, counts, strict=True)
        for value in batch_columns.get(name) or [absent] * count
    ]


def _fitting(name: str, part: Ragged) -> Ragged:
    _, dtypes, dims = TENSOR_FIELDS.get(name, (None, (), 0))
    if part.flat.dtype not in dtypes or part.flat.dim() != dims:
        raise ExperienceError(
            f"{name} is a {short_repr(part.flat)}, wanted {dims} dimensions of {sorted(map(str, dtypes))}"
        )
    return part


def encode(experiences: Sequence[Experience], compression: Compression = "none") -> bytes:
    """Return ``experiences`` as one body; see :meth:`ExperienceBatch.of` and :meth:`ExperienceBatch.encode`."""
    return ExperienceBatch.of(experiences).encode(compression)


def decode(data: Body) -> list[Experience]:
    """Return the experiences in ``data``, from a copy of ``data``; see :meth:`ExperienceBatch.decode`."""
    head, tail = decode_frame(bytearray(data))
    return ExperienceBatch(*unpack(head, read_tail(tail))).to_shared_list()
