"""The selector that draws uniformly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity_mq.data.selectors.base import Draws, TaskStats


class RandomOrder(Draws):
    """Uniformly random tasks; no index comes twice among ``count`` of :meth:`next` unless there are fewer tasks.

    Args:
        count: Number of tasks, at least 1.
        seed: Of the draws.
    """

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(seed)
        self._count = count

    def next(self, count: int) -> list[int]:
        """Return the next indexes."""
        found: list[int] = []
        while len(found) < count:
            part = self.generator().permutation(self._count)[: count - len(found)].tolist()
            self.given += len(part)
            found += part
        return found

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Do nothing: every task is as likely as any other."""

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}
