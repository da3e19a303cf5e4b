"""Several tasksets as one taskset: interleaved by ratio, or in proportion to size."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.selectors import TaskStats
from trinity_mq.data.tasksets import Taskset
from trinity_mq.messages import TaskBody


class TasksetMixture:
    """Tasksets with interleaved turns, shuffled differently in each epoch.

    An epoch has as many tasks as there are records in total. Each taskset has a share of the turns, by its ``ratio`` or
    by its size, and iterates over its own records with its own selector. With ratios a small taskset restarts before a
    large taskset has ended.

    Args:
        tasksets: At least one taskset. Either all have a ratio or none has.
        seed: Seed of the order of turns.

    Raises:
        TasksetError: The ratio of a taskset is so small that it gets no turn in an epoch.
    """

    def __init__(self, tasksets: Sequence[Taskset], seed: int) -> None:
        self._tasksets, self._seed = tasksets, seed
        ratios = [len(taskset) if taskset.config.ratio is None else taskset.config.ratio for taskset in tasksets]
        self._turns = shares(ratios, len(self))
        if empty := [taskset.config.name for taskset, turns in zip(tasksets, self._turns, strict=True) if not turns]:
            raise TasksetError(
                f"taskset {empty[0]!r}: a ratio of {tasksets[self._turns.index(0)].config.ratio:g} gives it no task "
                f"among the {len(self)} of an epoch; raise it, or remove the taskset"
            )
        self._returned = 0
        self._epoch, self._order = 0, self._order_of(0)

    def __len__(self) -> int:
        """Return the number of tasks in one epoch."""
        return sum(map(len, self._tasksets))

    @property
    def learns(self) -> bool:
        """Whether a selector must receive the rewards of finished tasks."""
        return any(taskset.learns for taskset in self._tasksets)

    def next_batch(self, size: int) -> list[TaskBody]:
        """Return the next ``size`` tasks. The tasks of each taskset are chosen in one call of its selector."""
        turns = [self._turn(place) for place in range(self._returned, self._returned + size)]
        self._returned += size
        chosen = [iter(taskset.next_batch(turns.count(number))) for number, taskset in enumerate(self._tasksets)]
        return [next(chosen[number]) for number in turns]

    def observe(self, stats: Mapping[str, Sequence[TaskStats]]) -> None:
        """Pass statistics of finished tasks, by taskset name, to the selectors."""
        for taskset in self._tasksets:
            if taskset.config.name in stats:
                taskset.observe(stats)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the selectors, ``selector/<taskset>/*``, of each taskset."""
        return {name: value for taskset in self._tasksets for name, value in taskset.metrics().items()}

    def state(self) -> dict[str, Any]:
        """Return the position, for :meth:`restore` of tasksets opened with the same settings."""
        epoch, cursor = divmod(self._returned, len(self))
        return {
            "turns": {taskset.config.name: turns for taskset, turns in zip(self._tasksets, self._turns, strict=True)},
            "seed": self._seed,
            "epoch": epoch,
            "cursor": cursor,
            "tasksets": {taskset.config.name: taskset.state() for taskset in self._tasksets},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            TasksetError: The position was saved with other tasksets, ratios, records, selectors or another seed, or
                with a single taskset.
        """
        if "tasksets" not in state:
            names = ", ".join(taskset.config.name for taskset in self._tasksets)
            raise TasksetError(
                "buffer.tasksets: the saved position belongs to a single taskset (buffer.taskset), wanted a position "
                f"in several tasksets (buffer.tasksets: {names}); put the old settings back, or start over with "
                "`trinity-mq run CONFIG --fresh`"
            )
        before = state["tasksets"]
        # The tasksets are restored first, because their errors explain how the records have changed. Changed records
        # also change the turns.
        for taskset in self._tasksets:
            if taskset.config.name in before:
                taskset.restore(before[taskset.config.name])
        now = self.state()
        for key in ("turns", "seed"):
            if state.get(key) != now[key]:
                raise TasksetError(
                    f"buffer.tasksets: the saved position belongs to {key} {state.get(key)!r}, these have "
                    f"{now[key]!r}; put the old data and settings back, or start over with `trinity-mq run CONFIG "
                    "--fresh`"
                )
        self._returned = state["epoch"] * len(self) + state["cursor"]

    def _turn(self, place: int) -> int:
        """Return the number of the taskset that has turn ``place``."""
        epoch, cursor = divmod(place, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self._order[cursor]

    def _order_of(self, epoch: int) -> list[int]:
        order = [number for number, turns in enumerate(self._turns) for _ in range(turns)]
        random.Random(self._seed + epoch).shuffle(order)
        return order


def shares(ratios: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` by ratios into whole numbers: each share is rounded down, and the rest goes to the largest
    remainders.

    >>> shares([1, 1, 2], 7)
    [2, 2, 3]
    """
    exact = [ratio / sum(ratios) * total for ratio in ratios]
    rounded = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(ratios)), key=lambda place: rounded[place] - exact[place])
    for place in by_remainder[: total - sum(rounded)]:
        rounded[place] += 1
    return rounded
