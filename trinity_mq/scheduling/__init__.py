"""The rollout side's logic: cutting tasks into slices, following their outcomes, pacing, running workflows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_mq.scheduling.batch_ids import sort_batch_id
    from trinity_mq.scheduling.scheduler import Scheduler
    from trinity_mq.scheduling.status import Status
    from trinity_mq.scheduling.workflow_runner import WorkflowRunner
    from trinity_mq.scheduling.wrappers import RunnerWrapper, TaskWrapper

_HOMES = {
    "RunnerWrapper": "wrappers",
    "Scheduler": "scheduler",
    "Status": "status",
    "TaskWrapper": "wrappers",
    "WorkflowRunner": "workflow_runner",
    "sort_batch_id": "batch_ids",
}

__all__ = ["RunnerWrapper", "Scheduler", "Status", "TaskWrapper", "WorkflowRunner", "sort_batch_id"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
