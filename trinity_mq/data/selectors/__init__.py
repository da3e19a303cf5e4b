"""Selectors choose the next task of a taskset, in a fixed order or by earlier rewards of the tasks."""

from trinity_mq.data.selectors.base import Selector, TaskStats
from trinity_mq.data.selectors.class_form import SELECTORS, BaseSelector
from trinity_mq.data.selectors.create import create_selector

__all__ = ["SELECTORS", "BaseSelector", "Selector", "TaskStats", "create_selector"]
