"""Figures of a run that reports, lists and displays share, and the format of durations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REWARD = "rollout/reward/mean"
TRAIN_STEPS = "trainer/step"
_EVALUATION = re.compile(r"eval/(?P<taskset>.+)/(?P<key>[^/]+)/mean@\d+(?:/mean)?")


def evaluations(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the result of each evaluation taskset in one metrics line, by taskset name.

    The result is the accuracy, or the reward if the workflow reports no accuracy.
    """
    results: dict[str, dict[str, float]] = {"reward": {}, "accuracy": {}}
    for name, value in values.items():
        match = _EVALUATION.fullmatch(name)
        if match and match["key"] in results and isinstance(value, int | float):
            results[match["key"]][match["taskset"]] = float(value)
    return {**results["reward"], **results["accuracy"]}


def format_duration(seconds: float) -> str:
    """Return a duration for a person, such as ``4 min 05 s``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
