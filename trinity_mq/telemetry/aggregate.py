"""Aggregates the metrics of runs into those of tasks, and those of tasks into those of batches: pure functions.

A key may say how it is aggregated by its end ``:mean``, ``:sum``, ``:max``, ``:min`` or ``:last``; any other end is
part of the name, and the mean is taken. Values that are no numbers are left out; a bool counts as 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def _sum(values: Sequence[float]) -> float:
    """Return the sum; nan where there is none, as of infinities of both signs: no metric may end an agent."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _mean(values: Sequence[float]) -> float:
    return _sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) * (value - mean) for value in values]))


HOWS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "sum": _sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}
ACCURACY, MAJORITY = "accuracy", "majority"
"""Metrics of evaluations with a meaning of their own; see :func:`aggregate_eval_runs`."""
_DURATION = "time/"
"""Prefix of the names of durations: "best of k" means nothing there."""


def aggregate_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a training task from those of its runs (or of a run from those of its experiences). Keys
    keep their ends.

    >>> aggregate_runs([{"a": 1, "n:sum": 1}, {"a": 3, "n:sum": 2}])
    {'a': 2.0, 'n:sum': 3.0}
    """
    if len(runs) == 1:  # every way to aggregate a single value gives that value
        return {key: _float(value) for key, value in runs[0].items() if isinstance(value, float | int)}
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
    ... below n, and n: the expected greatest and least of k runs drawn with replacement, the exact value of what a
    bootstrap estimates. Durations (``time/...``) are plain means. n counts the runs that have the key.

    Of an ``accuracy`` of 0 and 1 there is also ``pass@k``, the probability that one of k of the runs is right, drawn
    without replacement, and the accuracy of the answer that most runs gave, ``majority``, is ``majority@n``.
    """
    found: dict[str, float] = {}
    for key, values in _columns(runs).items():
        name, n = _how(key)[0], len(values)
        if name.startswith(_DURATION):
            found[name] = _mean(values)
            continue
        if name == MAJORITY:
            found[f"{name}@{n}"] = _mean(values)
            continue
        if name == ACCURACY and set(values) <= {0.0, 1.0}:
            found |= {f"pass@{k}": pass_at(round(sum(values)), n, k) for k in best_of_sizes(n)}
        found |= {f"{name}/mean@{n}": _mean(values), f"{name}/std@{n}": _deviation(values)}
        for k in best_of_sizes(n):
            found[f"{name}/best@{k}"], found[f"{name}/worst@{k}"] = best_and_worst(values, k)
    return found


def best_of_sizes(n: int) -> list[int]:
    """Return the k of ``best@k`` for n runs: the powers of two below n, and n; none for a single run.

    >>> best_of_sizes(9)
    [2, 4, 8, 9]
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def pass_at(right: int, n: int, k: int) -> float:
    """Return the probability that at least one of ``k`` runs is right, drawn without replacement from ``n`` runs of
    which ``right`` are: ``1 - C(n - right, k) / C(n, k)`` (arXiv 2107.03374, equation 1).
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def best_and_worst(values: Sequence[float], k: int) -> tuple[float, float]:
    """Return the expected greatest and the expected least of ``k`` (at least 1) values drawn with replacement.

    The i-th least of n values is the greatest of the k drawn with probability ``(i/n)**k - ((i-1)/n)**k``: all k are
    among the i least, and not all among the i-1 least (order statistics of the empirical distribution, Efron 1979).
    """
    rising, n = sorted(values), len(values)
    weights = [(i / n) ** k - ((i - 1) / n) ** k for i in range(1, n + 1)]

    def expected(ordered: Iterable[float]) -> float:
        # a workflow may report infinities; a weight of 0 must not make nan of one
        return _sum([weight * value for weight, value in zip(weights, ordered, strict=True) if weight > 0])

    return expected(rising), expected(reversed(rising))


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
        if not detailed:
            found[f"{prefix}/{key}"] = _mean(values)
            continue
        for each in ("mean", "max", "min"):
            found[f"{prefix}/{key}/{each}"] = float(HOWS[each](values))
        found[f"{prefix}/{key}/std"] = _deviation(values)
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


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
