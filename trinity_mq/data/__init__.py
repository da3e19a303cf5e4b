"""Where tasks come from: files, Hugging Face datasets, problems made here. Imports no torch."""

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.tasksets import Taskset, open_taskset

__all__ = ["Taskset", "TasksetError", "open_taskset"]
