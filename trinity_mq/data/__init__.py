"""Tasksets: files, Hugging Face datasets, synthetic problems. Imports no torch."""

from trinity_mq.data.errors import TasksetError
from trinity_mq.data.tasksets import Taskset, open_taskset

__all__ = ["Taskset", "TasksetError", "open_taskset"]
