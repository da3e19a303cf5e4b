"""Values of runs, and the experiences that belong to a task, as operators need them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, TypeGuard

from trinity_mq.experience.access import Experiences, ids, values


def valid(number: Any) -> TypeGuard[float]:
    """Return whether ``number`` is a finite number."""
    return isinstance(number, Real) and math.isfinite(number)


def run_values(exps: Experiences, numbers: Sequence[Any]) -> dict[str, list[float]]:
    """Return the values of the runs of each task (``tid``), in the order in which tasks and runs appear.

    The value of a run is the number of its last step (largest ``eid.step``; of equals the one listed last). A run whose
    number is none, or not finite, does not count; its task may be left with an empty list.

    Args:
        exps: A whole batch.
        numbers: One for each experience, None for none.
    """
    steps = values(exps, "eid.step")
    last: dict[str, int] = {}
    for number, rid in enumerate(ids(exps, "rid")):
        if rid not in last or steps[number] >= steps[last[rid]]:
            last[rid] = number
    tids = ids(exps, "tid")
    groups: dict[str, list[float]] = {tid: [] for tid in tids}
    for number in last.values():
        value = numbers[number]
        if valid(value):
            groups[tids[number]].append(float(value))
    return groups


def of_tasks(exps: Experiences, tids: Collection[str]) -> list[int]:
    """Return the numbers of the experiences of these tasks."""
    return [number for number, tid in enumerate(ids(exps, "tid")) if tid in tids]


def spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """Return ``{name}/mean``, ``/max`` and ``/min``; nothing without numbers."""
    if not numbers:
        return {}
    return {f"{name}/mean": statistics.fmean(numbers), f"{name}/max": max(numbers), f"{name}/min": min(numbers)}
