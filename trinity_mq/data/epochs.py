"""The order of records over epochs, with a position that survives restarts."""

from __future__ import annotations

import random
from typing import Literal


class EpochOrder:
    """Returns the indexes of records in order: each record once per epoch, over any number of epochs.

    With ``shuffle`` the order of each epoch is a function of the seed and the epoch only. The position is therefore two
    numbers, and a restart from it continues with the same records.

    Args:
        count: Number of records, at least 1.
        selector: ``sequential``: the stored order. ``shuffle``: a new order in each epoch.
        seed: Seed of the orders.
    """

    def __init__(self, count: int, selector: Literal["sequential", "shuffle"], seed: int) -> None:
        self._count, self._selector, self._seed = count, selector, seed
        self.epoch = 0
        """Number of the current epoch, from 0."""
        self.cursor = 0
        """Number of records of the current epoch that were returned."""
        self._order = self._order_of(0)

    @property
    def given(self) -> int:
        """Number of records that were returned over all epochs."""
        return self.epoch * self._count + self.cursor

    def take(self, size: int) -> list[int]:
        """Return the indexes of the next ``size`` records. At the end of an epoch the next epoch begins."""
        indexes: list[int] = []
        while len(indexes) < size:
            if self.cursor == self._count:
                self.move_to(self.epoch + 1, 0)
            part = self._order[self.cursor : self.cursor + size - len(indexes)]
            self.cursor += len(part)
            indexes += part
        return indexes

    def move_to(self, epoch: object, cursor: object) -> None:
        """Move to a saved position.

        Raises:
            ValueError: The position is invalid.
        """
        before, (self.epoch, self.cursor) = self.epoch, checked_position(epoch, cursor, self._count)
        if self.epoch != before:
            self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._count))
        if self._selector == "shuffle":
            random.Random(self._seed + epoch).shuffle(order)
        return order


def checked_position(epoch: object, cursor: object, count: int) -> tuple[int, int]:
    """Return a saved position in an order of ``count`` records as numbers, after a check.

    Raises:
        ValueError: The position is invalid.
    """
    if not (isinstance(epoch, int) and isinstance(cursor, int) and epoch >= 0 and 0 <= cursor <= count):
        raise ValueError(
            f"the saved position is epoch {epoch!r}, cursor {cursor!r}; wanted an epoch from 0 and a cursor from 0 to "
            f"{count}"
        )
    return epoch, cursor
