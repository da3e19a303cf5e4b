"""Workflows: how a model is used on a task, and what that was worth."""

from trinity_mq.workflows.execution import RunFailedError, execute
from trinity_mq.workflows.math import AsyncMathWorkflow, MathWorkflow
from trinity_mq.workflows.registry import WORKFLOWS, load_workflow
from trinity_mq.workflows.simple import AsyncSimpleWorkflow, SimpleWorkflow
from trinity_mq.workflows.step_wise import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from trinity_mq.workflows.task import Task, TaskError
from trinity_mq.workflows.workflow import AsyncMultiTurnWorkflow, MultiTurnWorkflow, Workflow

__all__ = [
    "WORKFLOWS",
    "AsyncMathWorkflow",
    "AsyncMultiTurnWorkflow",
    "AsyncRewardPropagationWorkflow",
    "AsyncSimpleWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "MathWorkflow",
    "MultiTurnWorkflow",
    "RewardPropagationWorkflow",
    "RunFailedError",
    "SimpleWorkflow",
    "StepWiseRewardWorkflow",
    "Task",
    "TaskError",
    "Workflow",
    "execute",
    "load_workflow",
]
