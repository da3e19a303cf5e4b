"""Selectors: which task of a taskset comes next, in a fixed order or by what was learnt of the tasks."""

from trinity_mq.data.selectors.base import Selector, TaskStats
from trinity_mq.data.selectors.create import create_selector

__all__ = ["Selector", "TaskStats", "create_selector"]
