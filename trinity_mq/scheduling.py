"""Re-exports the public names around scheduling.

Names load on first use, so that importing this module does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity_mq.dispatch.tickets import sort_batch_id
    from trinity_mq.rollout.status import Status
    from trinity_mq.rollout.workflow_runner import WorkflowRunner
    from trinity_mq.scheduler.scheduler import Scheduler
    from trinity_mq.scheduler.wrappers import RunnerWrapper, TaskWrapper

_HOMES = {
    "RunnerWrapper": "trinity_mq.scheduler.wrappers",
    "Scheduler": "trinity_mq.scheduler.scheduler",
    "Status": "trinity_mq.rollout.status",
    "TaskWrapper": "trinity_mq.scheduler.wrappers",
    "WorkflowRunner": "trinity_mq.rollout.workflow_runner",
    "sort_batch_id": "trinity_mq.dispatch.tickets",
}

__all__ = ["RunnerWrapper", "Scheduler", "Status", "TaskWrapper", "WorkflowRunner", "sort_batch_id"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
