"""Aggregates the metrics of runs into those of tasks, and those of tasks into those of batches: pure functions.

A key may say how it is aggregated by its end ``:mean``, ``:sum``, ``:max``, ``:min`` or ``:last``; any other end is
part of the name, and the mean is taken. Values that are no numbers are left out; a bool counts as 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def _sum(values: Sequence[float]) -> float:
    """Return the sum; nan where there is none, as of infinities of both signs: no metric may end an agent."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _mean(values: Sequence[float]) -> float:
    return _sum(values) / len(values)


HOWS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "sum": _sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
_DURATION = "time/"
"""Prefix of the names of durations: "best of k" means nothing there."""


def aggregate_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a training task from those of its runs (or of a run from those of its experiences). Keys
    keep their ends.

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


def aggregate_eval_runs(tasks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, float]]:
    """Return the metrics of each evaluation task from those of its n runs, all tasks in one go.

    ``<key>/mean@n`` and ``<key>/std@n`` (of the population); for n > 1 also ``best@k`` and ``worst@k`` for k = 2, 4, 8
    ... below n, and n: the expected greatest and least of k runs drawn with replacement, the exact value of what a
    bootstrap estimates. Durations (``time/...``) are plain means. n counts the runs that have the key.
    """
    found: list[dict[str, float]] = [{} for _ in tasks]
    tables: dict[tuple[str, int], tuple[list[int], list[list[float]]]] = {}
    for task, runs in enumerate(tasks):
        for key, values in _columns(runs).items():
            name, _ = _how(key)
            if name.startswith(_DURATION):
                found[task][name] = _mean(values)
                continue
            whose, rows = tables.setdefault((name, len(values)), ([], []))
            whose.append(task)
            rows.append(values)
    for (name, n), (whose, rows) in tables.items():
        columns = dict(zip((f"{name}/mean@{n}", f"{name}/std@{n}"), _mean_and_deviation(rows), strict=True))
        for k in best_of_sizes(n):
            columns[f"{name}/best@{k}"], columns[f"{name}/worst@{k}"] = best_and_worst(rows, k)
        for column, values in columns.items():
            for task, value in zip(whose, values, strict=True):
                found[task][column] = value
    return found


def best_of_sizes(n: int) -> list[int]:
    """Return the k of ``best@k`` for n runs: the powers of two below n, and n; none for a single run.

    >>> best_of_sizes(9)
    [2, 4, 8, 9]
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def best_and_worst(rows: Sequence[Sequence[float]], k: int) -> tuple[list[float], list[float]]:
    """Return for each row the expected greatest and the expected least of k values drawn from it with replacement.

    The i-th least of n values is the greatest of the k drawn with probability ``(i/n)**k - ((i-1)/n)**k``: all k are
    among the i least, and not all among the i-1 least (order statistics of the empirical distribution, Efron 1979).

    Args:
        rows: Values, each row of the same length n.
        k: Draws, at least 1.
    """
    import numpy as np  # a fifteenth of a second, which only evaluations need

    rising = np.sort(np.asarray(rows, dtype=np.float64), axis=1)
    weights = np.diff((np.arange(rising.shape[1] + 1) / rising.shape[1]) ** k)
    with np.errstate(all="ignore"):  # a workflow may report infinities; a weight of 0 must not make nan of one
        best, worst = (np.where(weights > 0, each * weights, 0.0).sum(axis=1) for each in (rising, rising[:, ::-1]))
    return best.tolist(), worst.tolist()


def _mean_and_deviation(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the mean and the standard deviation (of the population) of each row; the rows are equally long."""
    import numpy as np

    table = np.asarray(rows, dtype=np.float64)
    with np.errstate(all="ignore"):  # what a workflow reports may be infinite, and then so are these, or nan
        return table.mean(axis=1).tolist(), table.std(axis=1).tolist()


def aggregate_eval_tasks(
    tasks: Sequence[Mapping[str, Any]], prefix: str, *, detailed: bool = False
) -> dict[str, float]:
    """Return the metrics of an evaluation from those of its tasks: ``<prefix>/<key>``, the mean over tasks.

    Args:
        tasks: Metrics as :func:`aggregate_eval_runs` returns them.
        prefix: Such as ``eval/gsm8k``.
        detailed: Give ``/mean``, ``/max``, ``/min`` and ``/std`` (of the population) of each instead.
    """
    found: dict[str, float] = {}
    for key, values in _columns(tasks).items():
        mean = _mean(values)
        if not detailed:
            found[f"{prefix}/{key}"] = mean
            continue
        for each in ("mean", "max", "min"):
            found[f"{prefix}/{key}/{each}"] = float(HOWS[each](values))
        found[f"{prefix}/{key}/std"] = math.sqrt(_mean([(value - mean) * (value - mean) for value in values]))
    return found


def _how(key: str) -> tuple[str, str]:
    name, colon, how = key.rpartition(":")
    return (name, how) if colon and how in HOWS else (key, "mean")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float):
                columns.setdefault(key, []).append(value)
            elif isinstance(value, int):
                columns.setdefault(key, []).append(_float(value))
    return columns


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
