"""Tracks whether all batches of a run have arrived on its stream, wherever the reader began. Pure logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class LastBatch:
    """The batches that have arrived: a number up to which all have arrived, and the set of later batches.

    Batches before the first batch that is read count as arrived, because they may lie before the start offset. The
    same applies to batches before the first batch after a retention cut.
    """

    def __init__(self) -> None:
        self._batches: int | None = None
        """Number of batches of the run, None while unknown."""
        self._all_up_to: int | None = None
        self._ahead: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all batches of the run that can still arrive have arrived."""
        if self._batches is None:
            return False
        return self._batches == 0 or (self._all_up_to is not None and self._all_up_to >= self._batches)

    def batch(self, number: int) -> None:
        """Record the arrival of a batch, with or without experiences; a repeat has no effect."""
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
        """Record that retention has removed the next messages, which belong to unknown batches."""
        self._all_up_to, self._ahead = None, set()

    def set_batch_count(self, batches: int) -> None:
        """Record that the run has exactly ``batches`` batches, unless it is extended later."""
        self._batches = batches

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"batches": self._batches, "all_up_to": self._all_up_to, "ahead": sorted(self._ahead)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Return an object with the ``state`` that :meth:`state` returned."""
        last_batch = cls()
        last_batch._batches, last_batch._all_up_to = state["batches"], state["all_up_to"]
        last_batch._ahead = set(state["ahead"])
        return last_batch
