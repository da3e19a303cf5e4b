"""Rules for the rewards and metrics that agents and rewarders report, and for the share of new sessions to record while
training is behind. Answers to calls never wait for training.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from trinity_mq.config.modes.gateway import GatewayConfig
from trinity_mq.messages import SessionEnd, SessionReward

MAX_METRICS = 64
"""Maximum number of metrics per session."""
MAX_METRIC, MAX_REWARD = 1e30, 1e9
"""Maximum absolute values of a metric and of a reward."""
LONGEST_METRIC = 100
"""Maximum characters of a metric name."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)*(:(mean|sum|max|min|last))?")
_RESERVED = re.compile(
    r"(reward|response_tokens|finished_task_count|finished_runs)(:.*)?|session_.*|(time|slices|failures|taskset|version)/.*"
)
"""Metric names that the training run uses for its own metrics."""


def metric_problem(name: str, value: float) -> str | None:
    """Return the reason why a metric is refused. Return None if it is accepted."""
    if len(name) > LONGEST_METRIC or not _NAME.fullmatch(name):
        return (
            f"metric {name[:LONGEST_METRIC]!r}: wanted at most {LONGEST_METRIC} letters, digits and _ . @ -, with / "
            "between parts, and :sum or such at the end"
        )
    if _RESERVED.fullmatch(name):
        return f"metric {name!r} is a name of the run's own; choose another"
    if not abs(value) <= MAX_METRIC:
        return f"metric {name!r} is {value}, wanted a number from {-MAX_METRIC:g} to {MAX_METRIC:g}"
    return None


def _checked_metrics(metrics: dict[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if problem := metric_problem(name, value):
            raise ValueError(problem)
    return metrics


Metrics = Annotated[dict[str, float], Field(max_length=MAX_METRICS), AfterValidator(_checked_metrics)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]


def report_problem(event: SessionReward | SessionEnd) -> str | None:
    """Return the reason why a reward or end event from another program is refused. Return None if it is accepted."""
    if event.reward is not None and not abs(event.reward) <= MAX_REWARD:
        return f"reward is {event.reward}, wanted a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
    if len(event.metrics) > MAX_METRICS:
        return f"{len(event.metrics)} metrics, wanted at most {MAX_METRICS}"
    return next((problem for item in event.metrics.items() if (problem := metric_problem(*item))), None)


def merge_metrics(metrics: dict[str, float], reported: Mapping[str, float]) -> None:
    """Merge reported metrics into the metrics of a session.

    Metrics that :func:`metric_problem` refuses are skipped: an older release may have put them on the stream. Once the
    session has :data:`MAX_METRICS` metrics, new names are skipped: many reports together may have more names.
    """
    for name, value in reported.items():
        if metric_problem(name, value) is None and (name in metrics or len(metrics) < MAX_METRICS):
            metrics[name] = value


def bounded_reward(reward: float) -> float:
    """Return a reward clipped to the bounds, which a sum of rewards may exceed. NaN becomes 0."""
    return 0.0 if math.isnan(reward) else max(-MAX_REWARD, min(reward, MAX_REWARD))


def recorded_share(waiting: int, kept_bytes: int, config: GatewayConfig) -> float:
    """Return the share of new sessions to record, from 0 to 1. The share is 1 while fewer than ``max_waiting`` sessions
    wait to be trained on. It is a quarter at twice as many waiting sessions and a ninth at three times as many. It is 0
    once the stored answers take ``max_kept_bytes``.
    """
    if kept_bytes >= config.max_kept_bytes:
        return 0.0
    if waiting < config.max_waiting:
        return 1.0
    return (config.max_waiting / waiting) ** 2


def is_recorded(share: float, draw: random.Random) -> bool:
    """Return whether a new session is recorded, by a random draw if ``share`` is below 1."""
    return share >= 1.0 or draw.random() < share
