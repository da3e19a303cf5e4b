"""The selector that draws uniformly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity_mq.data.selectors.base import DrawPosition, TaskStats


class RandomOrder(DrawPosition):
    """Chooses tasks uniformly at random. The ``count`` indexes of one :meth:`next` are distinct, unless there are fewer
    tasks.

    Args:
        count: Number of tasks, at least 1.
        seed: Seed of the draws.
    """

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(seed)
        self._count = count

    def next(self, count: int) -> list[int]:
        """Return the indexes of the next ``count`` tasks."""
        indexes: list[int] = []
        while len(indexes) < count:
            part = self.generator().permutation(self._count)[: count - len(indexes)].tolist()
            self.given += len(part)
            indexes += part
        return indexes

    def observe(self, stats: Sequence[TaskStats]) -> None:
        """Do nothing: all tasks are equally likely."""

    def metrics(self) -> Mapping[str, float]:
        """Return an empty mapping."""
        return {}
