"""Aggregates metrics of runs to metrics of tasks, and metrics of tasks to metrics of batches. Pure functions.

The suffix ``:mean``, ``:sum``, ``:max``, ``:min`` or ``:last`` of a key selects its aggregation. Any other suffix is
part of the name, and the mean is used. Values that are not numbers are ignored. A bool counts as 0 or 1. In the metrics
of evaluations a suffix has no effect, see :func:`aggregate_eval_runs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def _sum(values: Sequence[float]) -> float:
    """Return the sum, or nan if no sum exists, for example for infinities of both signs. No error is raised, because a
    metric must never end an agent.
    """
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
"""Aggregations that a key can select."""
_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    **{name: HOWS[name] for name in ("mean", "max", "min")},
    "std": _deviation,
}
ACCURACY, MAJORITY = "accuracy", "majority"
"""Metrics of evaluations with a special meaning; see :func:`aggregate_eval_runs`."""
_DURATION = "time/"
"""Prefix of the names of durations, for which "best of k" has no meaning."""


def aggregate_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of a training task from the metrics of its runs (or of a run from the metrics of its
    experiences). Keys keep their suffixes.

    >>> aggregate_runs([{"a": 1, "n:sum": 1}, {"a": 3, "n:sum": 2}])
    {'a': 2.0, 'n:sum': 3.0}
    """
    if len(runs) == 1:  # every aggregation of a single value returns that value
        return {key: _float(value) for key, value in runs[0].items() if isinstance(value, float | int)}
    return {key: float(HOWS[_how(key)[1]](values)) for key, values in _columns(runs).items()}


def aggregate_tasks(tasks: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, float]:
    """Return the metrics of a training batch from the metrics of its tasks.

    A key that is aggregated by its mean yields ``<prefix>/<key>/mean``, ``/max`` and ``/min``. Any other key yields a
    single value, named by its suffix.
    """
    return aggregate_metrics(tasks, prefix)


def aggregate_metrics(
    metric_dicts: Sequence[Mapping[str, Any]], prefix: str = "", default_output_stats: Sequence[str] | None = None
) -> dict[str, float]:
    """Return the aggregated metrics of many maps, with keys as from :func:`aggregate_tasks`. The function has the name
    and the arguments of Trinity-RFT's function.

    Args:
        metric_dicts: The maps.
        prefix: Prefix of the keys. Empty: no prefix.
        default_output_stats: Statistics of a key that is aggregated by its mean: ``mean``, ``max``, ``min``, ``std``
            (population standard deviation). None: the first three. Other names are ignored.
    """
    statistics = ("mean", "max", "min") if default_output_stats is None else tuple(default_output_stats)
    start = f"{prefix}/" if prefix else ""
    metrics: dict[str, float] = {}
    for key, values in _columns(metric_dicts).items():
        name, how = _how(key)
        if how != "mean":
            metrics[f"{start}{name}/{how}"] = float(HOWS[how](values))
            continue
        for statistic in statistics:
            if statistic in _STATISTICS:
                metrics[f"{start}{name}/{statistic}"] = float(_STATISTICS[statistic](values))
    return metrics


def aggregate_eval_runs(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of an evaluation task from the metrics of its n runs. The suffix of a key, such as ``:sum``,
    is removed and has no effect.

    Keys are ``<key>/mean@n`` and ``<key>/std@n`` (population standard deviation). For n > 1 there are also ``best@k``
    and ``worst@k`` for k = 2, 4, 8 ... below n, and for k = n: the expected maximum and minimum of k runs drawn with
    replacement. This is the exact value that a bootstrap estimates. Durations (``time/...``) are plain means. n is the
    number of runs that have the key.

    An ``accuracy`` of only 0 and 1 also yields ``pass@k``: the probability that at least one of k runs, drawn without
    replacement, is right. The metric ``majority``, the accuracy of the answer that most runs gave, yields only
    ``majority@n``, its mean.
    """
    metrics: dict[str, float] = {}
    for key, values in _columns(runs).items():
        name, n = _how(key)[0], len(values)
        if name.startswith(_DURATION):
            metrics[name] = _mean(values)
            continue
        if name == MAJORITY:
            metrics[f"{name}@{n}"] = _mean(values)
            continue
        if name == ACCURACY and set(values) <= {0.0, 1.0}:
            metrics |= {f"pass@{k}": pass_at(round(sum(values)), n, k) for k in best_of_sizes(n)}
        metrics |= {f"{name}/mean@{n}": _mean(values), f"{name}/std@{n}": _deviation(values)}
        for k in best_of_sizes(n):
            metrics[f"{name}/best@{k}"], metrics[f"{name}/worst@{k}"] = best_and_worst(values, k)
    return metrics


def best_of_sizes(n: int) -> list[int]:
    """Return the k of ``best@k`` for n runs: the powers of two below n, and n. The list is empty for a single run.

    >>> best_of_sizes(9)
    [2, 4, 8, 9]
    """
    return [2**power for power in range(1, n.bit_length()) if 2**power < n] + [n] if n > 1 else []


def pass_at(right: int, n: int, k: int) -> float:
    """Return the probability that at least one of ``k`` runs is right. The runs are drawn without replacement from
    ``n`` runs, and ``right`` of the ``n`` runs are right: ``1 - C(n - right, k) / C(n, k)`` (arXiv 2107.03374, equation
    1).
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def best_and_worst(values: Sequence[float], k: int) -> tuple[float, float]:
    """Return the expected maximum and the expected minimum of ``k`` (at least 1) values drawn with replacement.

    The i-th smallest of n values is the maximum of the k draws with probability ``(i/n)**k - ((i-1)/n)**k``: all k
    draws are among the i smallest, and not all are among the i-1 smallest (order statistics of the empirical
    distribution, Efron 1979).
    """
    rising, n = sorted(values), len(values)
    weights = [(i / n) ** k - ((i - 1) / n) ** k for i in range(1, n + 1)]

    def expected(ordered: Iterable[float]) -> float:
        # a workflow may report infinities, and a weight of 0 times infinity would be nan
        return _sum([weight * value for weight, value in zip(weights, ordered, strict=True) if weight > 0])

    return expected(rising), expected(reversed(rising))


def aggregate_eval_tasks(
    tasks: Sequence[Mapping[str, Any]], prefix: str, *, detailed: bool = False
) -> dict[str, float]:
    """Return the metrics of an evaluation from the metrics of its tasks: ``<prefix>/<key>``, the mean over tasks.

    Args:
        tasks: Metrics as returned by :func:`aggregate_eval_runs`.
        prefix: Prefix of the keys, for example ``eval/gsm8k``.
        detailed: Return ``/mean``, ``/max``, ``/min`` and ``/std`` (population standard deviation) of each key instead.
    """
    if detailed:
        return aggregate_metrics(tasks, prefix, tuple(_STATISTICS))
    return {f"{prefix}/{key}": _mean(values) for key, values in _columns(tasks).items()}


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
