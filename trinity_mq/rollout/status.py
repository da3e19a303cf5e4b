"""Outcomes of tasks and of task slices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trinity_mq.messages import Version

if TYPE_CHECKING:
    from trinity_mq.experience import Experience


@dataclass(frozen=True)
class Status:
    """The outcome of a task."""

    ok: bool
    """Every run finished."""
    metric: Mapping[str, float]
    """Over the finished runs."""
    message: str | None = None
    """The first thing that went wrong."""
    completed_runs: int = 0
    total_runs: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One mapping for each finished run."""
    runners: list[str] = field(default_factory=list)
    """Ids of the runners that worked on the task, in the order of its runs."""


@dataclass(frozen=True)
class Failure:
    """An error that ended an attempt at a run."""

    message: str
    """Error and place in one line."""
    kind: str = "workflow"
    """Label under which metrics count it."""
    retryable: bool = True
    """Whether a further attempt may go well."""


@dataclass(frozen=True, kw_only=True)
class SliceOutcome:
    """The outcome of a slice on one runner."""

    experiences: list[Experience] = field(default_factory=list)
    """Experiences of the finished runs, in their order."""
    runs: list[int] = field(default_factory=list)
    """The runs that finished, rising."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """One mapping for each of ``runs``."""
    message: str | None = None
    """The first thing that went wrong, also where a later attempt went well."""
    failure_kind: str | None = None
    """Kind of the failure that ``message`` tells of, None where there was none."""
    retryable: bool = True
    """False: that failure was declared final."""
    version_min: Version | None = None
    """Oldest weights that sampled a token."""
    version_max: Version | None = None
    """Newest weights that sampled a token."""
    seconds: float = 0.0
