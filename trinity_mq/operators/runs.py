"""Values of runs, and the experiences that belong to a task, as operators need them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, TypeGuard

from trinity_mq.experience import ExperienceBatch


def valid(number: Any) -> TypeGuard[float]:
    """Return whether ``number`` is a finite number."""
    return isinstance(number, Real) and math.isfinite(number)


def run_values(batch: ExperienceBatch, numbers: Sequence[Any]) -> dict[str, list[float]]:
    """Return the values of the runs of each task (``tid``), in the order in which tasks and runs appear.

    The value of a run is the number of its last step (largest ``eid.step``; of equals the one listed last). A run whose
    number is none, or not finite, does not count; its task may be left with an empty list.

    Args:
        batch: A whole batch.
        numbers: One for each experience, None for none.
    """
    steps = batch.values("eid.step")
    last: dict[str, int] = {}
    for number, rid in enumerate(batch.ids("rid")):
        if rid not in last or steps[number] >= steps[last[rid]]:
            last[rid] = number
    tids = batch.ids("tid")
    groups: dict[str, list[float]] = {tid: [] for tid in tids}
    for number in last.values():
        value = numbers[number]
        if valid(value):
            groups[tids[number]].append(float(value))
    return groups


def of_tasks(batch: ExperienceBatch, tids: Collection[str]) -> list[int]:
    """Return the numbers of the experiences of these tasks."""
    return [number for number, tid in enumerate(batch.ids("tid")) if tid in tids]


def spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """Return ``{name}/mean``, ``/max`` and ``/min``; nothing without numbers."""
    if not numbers:
        return {}
    return {f"{name}/mean": statistics.fmean(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)}
