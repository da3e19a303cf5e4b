"""Gymnasium environments as workflows: observations and actions are text."""

from trinity_mq.workflows.environments.environment import Environment, EnvironmentFailedError, Transition
from trinity_mq.workflows.environments.workflow import AsyncGymnasiumWorkflow, GymnasiumArguments, GymnasiumWorkflow

__all__ = [
    "AsyncGymnasiumWorkflow",
    "Environment",
    "EnvironmentFailedError",
    "GymnasiumArguments",
    "GymnasiumWorkflow",
    "Transition",
]
