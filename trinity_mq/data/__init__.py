"""Data of a run: tasksets with their selectors, storages, and priorities of replayed groups. Imports no torch."""

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.mixture import TasksetMixture
from trinity_mq.data.priorities import PRIORITY_FUNC, PriorityFunction
from trinity_mq.data.selectors import Selector, TaskStats
from trinity_mq.data.storage import Storage
from trinity_mq.data.tasksets import Taskset, open_taskset

__all__ = [
    "PRIORITY_FUNC",
    "PriorityFunction",
    "Selector",
    "Storage",
    "TaskStats",
    "Taskset",
    "TasksetError",
    "TasksetMixture",
    "open_taskset",
]
