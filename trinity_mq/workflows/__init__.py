"""Workflows: code that runs a task with a model and rewards the result."""

from trinity_mq.workflows.arguments import Arguments, arguments_of, check_arguments
from trinity_mq.workflows.attributes import FormatArgs, RolloutArgs
from trinity_mq.workflows.builtin.simple import AsyncSimpleWorkflow, SimpleWorkflow
from trinity_mq.workflows.builtin.tool_agent import AsyncToolAgentWorkflow, ToolAgentWorkflow
from trinity_mq.workflows.builtin.trinity import (
    AsyncMathBoxedWorkflow,
    AsyncMathEvalWorkflow,
    AsyncMathWorkflow,
    MathBoxedWorkflow,
    MathEvalWorkflow,
    MathWorkflow,
    ToolCallWorkflow,
)
from trinity_mq.workflows.errors import RunFailedError, SandboxFailed
from trinity_mq.workflows.execution import execute
from trinity_mq.workflows.registry import WORKFLOWS
from trinity_mq.workflows.step_wise import (
    AsyncRewardPropagationWorkflow,
    AsyncStepWiseRewardWorkflow,
    RewardPropagationWorkflow,
    StepWiseRewardWorkflow,
)
from trinity_mq.workflows.workflow import (
    AsyncMultiTurnWorkflow,
    MultiTurnWorkflow,
    Task,
    TaskError,
    Workflow,
    load_workflow,
)

__all__ = [
    "WORKFLOWS",
    "Arguments",
    "AsyncMathBoxedWorkflow",
    "AsyncMathEvalWorkflow",
    "AsyncMathWorkflow",
    "AsyncMultiTurnWorkflow",
    "AsyncRewardPropagationWorkflow",
    "AsyncSimpleWorkflow",
    "AsyncStepWiseRewardWorkflow",
    "AsyncToolAgentWorkflow",
    "FormatArgs",
    "MathBoxedWorkflow",
    "MathEvalWorkflow",
    "MathWorkflow",
    "MultiTurnWorkflow",
    "RewardPropagationWorkflow",
    "RolloutArgs",
    "RunFailedError",
    "SandboxFailed",
    "SimpleWorkflow",
    "StepWiseRewardWorkflow",
    "Task",
    "TaskError",
    "ToolAgentWorkflow",
    "ToolCallWorkflow",
    "Workflow",
    "arguments_of",
    "check_arguments",
    "execute",
    "load_workflow",
]
