"""Tells whether all batches of a run have come on its stream, wherever the reading began. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class LastBatch:
    """The batches that have come, as a number up to which all have and those beyond it.

    The batches before the first one that is read are taken to lie before the place where the reading began, and so are
    those before the first one behind a cut.
    """

    def __init__(self) -> None:
        self._batches: int | None = None
        """Batches of the run, once known."""
        self._all_up_to: int | None = None
        self._ahead: set[int] = set()

    @property
    def has_come(self) -> bool:
        """All batches of the run have come, as far as they can."""
        if self._batches is None:
            return False
        return self._batches == 0 or (self._all_up_to is not None and self._all_up_to >= self._batches)

    def batch(self, number: int) -> None:
        """A batch has come, with or without experiences; a repeat is nothing new."""
        if self._all_up_to is None:
            self._all_up_to = number - 1
        if number > self._all_up_to:
            self._ahead.add(number)
        if self._batches is not None and number > self._batches:
            self._batches = None  # the run was extended after its end
        while self._all_up_to + 1 in self._ahead:
            self._all_up_to += 1
            self._ahead.discard(self._all_up_to)

    def cut(self) -> None:
        """Retention has cut what comes next: nobody knows which batches that were."""
        self._all_up_to, self._ahead = None, set()

    def run_ends(self, batches: int) -> None:
        """The run opens no more than so many batches."""
        self._batches = batches

    def state(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"batches": self._batches, "all_up_to": self._all_up_to, "ahead": sorted(self._ahead)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Return what :meth:`state` was taken of."""
        found = cls()
        found._batches, found._all_up_to = state["batches"], state["all_up_to"]
        found._ahead = set(state["ahead"])
        return found
