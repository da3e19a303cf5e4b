"""Selectors in Trinity-RFT's class form: the base class, the registry, and the bridge to selectors of trinity_mq."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.records import Record
from trinity_mq.data.selectors.base import TaskStats
from trinity_mq.runtime.errors import custom_code
from trinity_mq.runtime.plugins import Registry

SELECTORS = Registry({}, "SELECTORS")
"""Selectors, by the value of ``data_selector.selector_type``; see :class:`BaseSelector`."""


class Columns(Sequence[Record]):
    """The records of a taskset: by number as records, by name as columns, as in a Hugging Face dataset."""

    def __init__(self, rows: Sequence[Record]) -> None:
        self._rows = rows

    @property
    def column_names(self) -> list[str]:
        """Keys of the records, in the order of their first appearance."""
        return list(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Record]:
        """Yield the records."""
        return iter(self._rows)

    @overload
    def __getitem__(self, key: int) -> Record: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Record]: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        """Return a record, a part of the records, or the column ``key``.

        Raises:
            KeyError: A record has no such key.
        """
        return [row[key] for row in self._rows] if isinstance(key, str) else self._rows[key]


@dataclass(frozen=True)
class DataSource:
    """The data of a selector."""

    dataset: Columns
    """The records."""
    name: str
    """Name of the taskset."""

    @property
    def dataset_size(self) -> int:
        """Number of records."""
        return len(self.dataset)


@dataclass
class SelectorSettings:
    """The settings of a selector, with the names of Trinity-RFT's ``DataSelectorConfig``."""

    selector_type: str
    seed: int
    feature_keys: list[str] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


class BaseSelector:
    """Chooses the records of a taskset. A subclass implements the four methods.

    Args:
        data_source: The records: ``data_source.dataset`` and ``data_source.dataset_size``.
        config: The settings: ``seed``, ``feature_keys`` and ``kwargs``.
    """

    def __init__(self, data_source: DataSource, config: SelectorSettings) -> None:
        self.data_source, self.config = data_source, config

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> Any:
        """Return the numbers of the next ``batch_size`` records, or a pair of the numbers and a mapping. trinity_mq
        does not set ``return_extra_info``, and ignores the mapping.
        """
        raise NotImplementedError

    def feedback(self, indices: list[int], values: list[float]) -> None:
        """Learn the mean rewards of finished tasks."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a small mapping of plain types."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state."""
        raise NotImplementedError


class ClassSelector:
    """A selector that calls an object in class form.

    A resumed explorer creates the object again, calls ``feedback`` with all earlier results in their order, and then
    ``load_state_dict``. So a state needs only the position.

    Args:
        made: The object.
        label: Taskset and class, for error messages.
    """

    def __init__(self, made: Any, label: str) -> None:
        self._made, self._label = made, label

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks.

        Raises:
            TasksetError: The object raised an error, or did not return numbers.
        """
        result = self._called("get_indices", count)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result = result[0]
        try:
            return [int(index) for index in result]
        except (TypeError, ValueError) as error:
            raise TasksetError(
                f"{self._label}: get_indices returns {result!r:.120}, wanted a list of numbers"
            ) from error

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Give the object the mean rewards of the tasks. It is not called without tasks."""
        if stats:
            self._called("feedback", [item.task for item in stats], [item.reward for item in stats])

    def state(self) -> Mapping[str, Any]:
        """Return the object's state in plain types.

        Raises:
            TasksetError: The object raised an error, or its state is not a mapping or has other types.
        """
        state = self._called("state_dict")
        if not isinstance(state, Mapping):
            raise TasksetError(f"{self._label}: state_dict returns {state!r:.120}, wanted a mapping")
        return {str(key): self._plain(str(key), value) for key, value in state.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises ValueError if the object refuses it."""
        self._called("load_state_dict", copy.deepcopy(dict(state)))

    def metrics(self) -> Mapping[str, float]:
        """Return an empty mapping."""
        return {}

    def _called(self, method: str, *args: Any) -> Any:
        with custom_code(TasksetError, f"{self._label}: {method} raised"):
            return getattr(self._made, method)(*args)

    def _plain(self, key: str, value: Any) -> Any:
        if hasattr(value, "tolist"):  # arrays, tensors and their numbers
            value = value.tolist()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Mapping):
            return {str(name): self._plain(key, item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(key, item) for item in value]
        raise TasksetError(
            f"{self._label}: state_dict has a {type(value).__name__} at {key!r}, wanted numbers, texts, lists and "
            "mappings of these"
        )


def is_class_form(kind: Any) -> bool:
    """Return whether a selector has Trinity-RFT's form."""
    return isinstance(kind, type) and callable(getattr(kind, "get_indices", None))


def class_selector(
    kind: type, settings: SelectorSettings, rows: Sequence[Record], taskset: str, label: str
) -> ClassSelector:
    """Return a selector that calls an object of a class.

    Raises:
        TasksetError: The object cannot be created from the records and the settings.
    """
    with custom_code(TasksetError, f"{label} cannot be made with {settings}:"):
        made = kind(DataSource(Columns(rows), taskset), settings)
    return ClassSelector(made, label)
