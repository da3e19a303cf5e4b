"""Columns that are decoded on first access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Opener = Callable[[], list[Any]]


class Once:
    """Calls an opener on the first call, and returns the same column on every call."""

    __slots__ = ("_column", "_opener")

    def __init__(self, opener: Opener) -> None:
        self._opener, self._column = opener, None

    _column: list[Any] | None

    def __call__(self) -> list[Any]:
        if self._column is None:
            self._column = self._opener()
        return self._column


class PlainColumns(dict[str, Any]):
    """Columns of values by name, without columns that are None in all experiences.

    An entry is a list, or a function that returns a list; the function is called once, on first access.
    """

    def set_lazy(self, name: str, opener: Opener) -> None:
        """Set a column that ``opener`` returns on first access."""
        self[name] = Once(opener)

    def __getitem__(self, name: str) -> list[Any]:
        """Return a column, and open it first if necessary."""
        entry = super().__getitem__(name)
        column: list[Any] = entry() if callable(entry) else entry
        return column

    def get(self, name: str, default: Any = None) -> Any:
        """Return a column, opened first if necessary, or ``default``."""
        entry = super().get(name, default)
        return entry() if callable(entry) else entry

    def map(self, change: Callable[[list[Any]], list[Any]]) -> PlainColumns:
        """Return the columns changed by ``change``. Columns that are not open yet are changed when they are opened."""
        result = PlainColumns()
        for name in self:
            if self.opened(name):
                result[name] = change(self[name])
            else:
                result.set_lazy(name, partial(self._changed, name, change))
        return result

    def _changed(self, name: str, change: Callable[[list[Any]], list[Any]]) -> list[Any]:
        return change(self[name])

    def opened_items(self) -> Iterator[tuple[str, list[Any]]]:
        """Open every column, and yield its name and the column."""
        for name, entry in super().items():
            yield name, entry() if callable(entry) else entry

    def open_all(self) -> None:
        """Open every column."""
        for name in self:
            self[name] = self[name]  # a list from now on

    def opened(self, name: str) -> bool:
        """Return whether a column is already open."""
        return not callable(super().__getitem__(name))
