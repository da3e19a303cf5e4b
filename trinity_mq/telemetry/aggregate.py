"""From the metrics of runs to those of tasks and of batches: pure functions.

A key may say how it is aggregated by its end ``:mean``, ``:sum``, ``:max``, ``:min`` or ``:last``; any other end is
part of the name, and the mean is taken. Values that are no numbers are left out; a bool counts as 0 or 1.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HOWS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
BOOTSTRAP_RESAMPLES = 1000
BOOTSTRAP_SEED = 42
_PLAIN_MEAN = ("time/run_execution", "time/task_execution")
"""Durations: samples of one task say nothing about "best of k" here."""


def aggregate_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a training task from those of its runs. Keys keep their ends.

    >>> aggregate_runs([{"a": 1, "n:sum": 1}, {"a": 3, "n:sum": 2}])
    {'a': 2.0, 'n:sum': 3.0}
    """
    return {key: float(HOWS[_how(key)[1]](values)) for key, values in _columns(runs).items()}


def aggregate_tasks(tasks: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Return the metrics of a training batch from those of its tasks.

    A key under the mean gives ``<prefix>/<key>/mean``, ``/max`` and ``/min``; any other one value, named by its end.
    """
    found: dict[str, float] = {}
    for key, values in _columns(tasks).items():
        name, how = _how(key)
        for each in ("mean", "max", "min") if how == "mean" else (how,):
            found[f"{prefix}/{name}/{each}"] = float(HOWS[each](values))
    return found


def aggregate_eval_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation task from those of its n runs.

    ``<key>/mean@n`` and ``<key>/std@n`` (of the population); for n > 1 also ``best@k`` and ``worst@k`` for k = 2, 4, 8
    ... below n, and n: the mean, over 1000 resamples of k runs with replacement (seed 42), of the greatest and least.
    Durations are plain means.
    """
    found: dict[str, float] = {}
    for key, values in _columns(runs).items():
        name, _ = _how(key)
        if name in _PLAIN_MEAN:
            found[name] = statistics.fmean(values)
            continue
        n = len(values)
        found[f"{name}/mean@{n}"] = statistics.fmean(values)
        found[f"{name}/std@{n}"] = statistics.pstdev(values)
        for k in _sizes(n):
            found[f"{name}/best@{k}"], found[f"{name}/worst@{k}"] = _extremes(values, k)
    return found


def aggregate_eval_tasks(
    tasks: Sequence[Mapping[str, Any]], prefix: str, *, detailed: bool = False
) -> dict[str, float]:
    """Return the metrics of an evaluation from those of its tasks: ``<prefix>/<key>``, the mean over tasks.

    Args:
        tasks: What :func:`aggregate_eval_runs` gave for each.
        prefix: Such as ``eval/gsm8k``.
        detailed: Give ``/mean``, ``/max``, ``/min`` and ``/std`` of each instead.
    """
    found: dict[str, float] = {}
    for key, values in _columns(tasks).items():
        if not detailed:
            found[f"{prefix}/{key}"] = statistics.fmean(values)
            continue
        for each in ("mean", "max", "min"):
            found[f"{prefix}/{key}/{each}"] = float(HOWS[each](values))
        found[f"{prefix}/{key}/std"] = statistics.pstdev(values)
    return found


def _how(key: str) -> tuple[str, str]:
    name, colon, how = key.rpartition(":")
    return (name, how) if colon and how in HOWS else (key, "mean")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int | float):
                columns.setdefault(key, []).append(value)
    return columns


def _sizes(n: int) -> list[int]:
    if n < 2:
        return []
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n]


def _extremes(values: Sequence[float], k: int) -> tuple[float, float]:
    drawn = [[values[i] for i in resample] for resample in _resamples(len(values), k)]
    return statistics.fmean(max(row) for row in drawn), statistics.fmean(min(row) for row in drawn)


@functools.lru_cache(maxsize=64)
def _resamples(n: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Indices of the resamples: the same for every metric, so that tasks compare."""
    import numpy as np

    drawn = np.random.RandomState(BOOTSTRAP_SEED).randint(0, n, size=(BOOTSTRAP_RESAMPLES, k))
    return tuple(tuple(row) for row in drawn.tolist())
