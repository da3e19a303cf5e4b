"""Outcomes of tasks and of task slices, and failures of their runs."""

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
    """Whether every run finished."""
    metric: Mapping[str, float]
    """Metrics aggregated over the finished runs."""
    message: str | None = None
    """Message of the first failure, or the reason why another runner did the work. None: neither."""
    completed_runs: int = 0
    total_runs: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each finished run."""
    runners: list[str] = field(default_factory=list)
    """Ids of the runners that worked on the task, in the order of their last runs."""


@dataclass(frozen=True)
class RunFailure:
    """A failure of a run: an error that ended an attempt, a reward that cannot be used, or the end of the slice's time
    limit.
    """

    message: str
    """The failure in one line, with the place of an error in the user's code."""
    kind: str = "workflow"
    """Label under which metrics count the failure."""
    retryable: bool = True
    """Whether a further attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class SliceOutcome:
    """The outcome of one execution of a slice, or of a task by :class:`WorkflowRunner`."""

    experiences: list[Experience] = field(default_factory=list)
    """Experiences of the finished runs, in the order of the runs."""
    runs: list[int] = field(default_factory=list)
    """Numbers of the finished runs, ascending."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each run in ``runs``."""
    message: str | None = None
    """Message of the first failure, even if a later attempt succeeded."""
    failure_kind: str | None = None
    """Kind of the failure in ``message``. None: no attempt failed."""
    retryable: bool = True
    """False if no further attempt can succeed after the failure in ``message``."""
    version_min: Version | None = None
    """Version of the oldest weights that sampled a token. None: no token has a version."""
    version_max: Version | None = None
    """Version of the newest weights that sampled a token. None: no token has a version."""
    seconds: float = 0.0
