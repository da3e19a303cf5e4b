"""Names of the metrics that the command line shows, and curves over steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REWARD = "rollout/reward/mean"
STALENESS = "sample/staleness/max"
TOKENS_PER_SECOND = ("rollout/tokens_per_second", "perf/tokens_per_second")
"""The first one that is there: tokens sampled, else tokens trained on."""
LOST: Mapping[str, str] = {
    "rollout/slices/failed": "slices failed",
    "rollout/slices/poisoned": "slices poisoned",
    "rollout/partial_groups": "groups too small",
    "sample/dropped_stale_groups": "groups too old",
    "sample/skipped_step": "steps skipped",
}
"""Counters of lost samples, each with its name in reports."""

_EVALUATION = re.compile(r"eval/(?P<taskset>.+)/(?P<key>[^/]+)/mean@\d+(?:/mean)?")

Point = tuple[int, float]


def evaluations(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the result of each evaluation taskset in one line of metrics, by its name.

    That is its accuracy, or, where a workflow reports none, its reward.
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        match = _EVALUATION.fullmatch(name)
        if match and isinstance(value, int | float):
            found.setdefault(match["taskset"], {})[match["key"]] = float(value)
    return {
        taskset: keys["accuracy"] if "accuracy" in keys else keys["reward"]
        for taskset, keys in found.items()
        if "accuracy" in keys or "reward" in keys
    }


def distinct(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per role and step, in the order of steps.

    A restarted agent does steps again: what it wrote last counts, also for a step that two lines share.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        step, role = line.get("step"), line.get("role")
        if isinstance(step, int) and isinstance(role, str):
            merged.setdefault((role, step), {}).update(line)
    return [merged[key] for key in sorted(merged, key=lambda key: key[1])]


def curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return ``(step, value)`` of one metric where it is known; of agents that report it alike the last one counts."""
    found = {line["step"]: float(line[name]) for line in lines if isinstance(line.get(name), int | float)}
    return list(found.items())


def evaluation_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return ``(step, result)`` of each evaluation taskset."""
    curves: dict[str, list[Point]] = {}
    for line in lines:
        for taskset, value in evaluations(line).items():
            curves.setdefault(taskset, []).append((line["step"], value))
    return curves


def lost(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts of :data:`LOST` that are not zero, by their name for a person."""
    sums = {words: round(sum(value for _, value in curve(lines, name))) for name, words in LOST.items()}
    return {words: count for words, count in sums.items() if count}


def duration(seconds: float) -> str:
    """Return a time span for a person, such as ``4 min 05 s``."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
