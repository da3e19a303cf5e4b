"""The order of records over epochs, with a position that survives restarts."""

from __future__ import annotations

import random
from typing import Literal


class EpochOrder:
    """Gives each record once an epoch, epoch after epoch.

    With ``shuffle`` each epoch has an order of its own, which follows from the seed and the epoch alone: the position
    is two numbers, and going on from it gives the records that would have come.

    Args:
        count: Number of records, at least 1.
        selector: ``sequential``: as they are stored.
        seed: Of the orders.
    """

    def __init__(self, count: int, selector: Literal["sequential", "shuffle"], seed: int) -> None:
        self._count, self._selector, self._seed = count, selector, seed
        self.epoch = 0
        """Number of the current epoch, from 0."""
        self.cursor = 0
        """Number of records of the epoch that were given."""
        self._order = self._order_of(0)

    @property
    def given(self) -> int:
        """Number of records that were given, over all epochs."""
        return self.epoch * self._count + self.cursor

    def take(self, size: int) -> list[int]:
        """Return the indexes of the next ``size`` records; where an epoch ends the next one begins."""
        found: list[int] = []
        while len(found) < size:
            if self.cursor == self._count:
                self.move_to(self.epoch + 1, 0)
            part = self._order[self.cursor : self.cursor + size - len(found)]
            self.cursor += len(part)
            found += part
        return found

    def move_to(self, epoch: object, cursor: object) -> None:
        """Go on from a position.

        Raises:
            ValueError: It is none.
        """
        if not (isinstance(epoch, int) and isinstance(cursor, int) and epoch >= 0 and 0 <= cursor <= self._count):
            raise ValueError(
                f"the saved position is epoch {epoch!r}, cursor {cursor!r}; wanted an epoch from 0 and a cursor from 0 "
                f"to {self._count}"
            )
        if epoch != self.epoch:
            self._order = self._order_of(epoch)
        self.epoch, self.cursor = epoch, cursor

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._count))
        if self._selector == "shuffle":
            random.Random(self._seed + epoch).shuffle(order)
        return order
