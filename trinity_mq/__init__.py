"""Reinforcement fine-tuning of language models as a message-queue event-driven actor system on RabbitMQ.

The public names are available here. Each is loaded on first use, so ``import trinity_mq`` alone does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trinity_mq import renamed
from trinity_mq.release import VERSION

if TYPE_CHECKING:
    from trinity_agents.explorer import Explorer as Explorer
    from trinity_mq.config import Config as Config
    from trinity_mq.config import load_config as load_config
    from trinity_mq.experience import EID as EID
    from trinity_mq.experience import CustomField as CustomField
    from trinity_mq.experience import Experience as Experience
    from trinity_mq.experience import ExperienceBatch as ExperienceBatch
    from trinity_mq.experience import from_hf_datasets as from_hf_datasets
    from trinity_mq.experience import gather_action_masks as gather_action_masks
    from trinity_mq.experience import gather_attention_masks as gather_attention_masks
    from trinity_mq.experience import gather_multi_modal_inputs as gather_multi_modal_inputs
    from trinity_mq.experience import gather_response_attrs as gather_response_attrs
    from trinity_mq.experience import gather_token_ids as gather_token_ids
    from trinity_mq.experience import group_by as group_by
    from trinity_mq.experience import split_dpo_experience_to_single_turn as split_dpo_experience_to_single_turn
    from trinity_mq.experience import to_hf_datasets as to_hf_datasets
    from trinity_mq.launch.api import MetricsLine as MetricsLine
    from trinity_mq.launch.api import RunError as RunError
    from trinity_mq.launch.api import RunHandle as RunHandle
    from trinity_mq.launch.api import RunResult as RunResult
    from trinity_mq.launch.api import run as run
    from trinity_mq.models import InferenceModel as InferenceModel
    from trinity_mq.models import ModelWrapper as ModelWrapper
    from trinity_mq.operators import ColumnOperator as ColumnOperator
    from trinity_mq.operators import ExperienceOperator as ExperienceOperator
    from trinity_mq.operators import ExperienceOperatorV1 as ExperienceOperatorV1
    from trinity_mq.operators import create_operators as create_operators
    from trinity_mq.scheduling import RunnerWrapper as RunnerWrapper
    from trinity_mq.scheduling import Scheduler as Scheduler
    from trinity_mq.scheduling import Status as Status
    from trinity_mq.scheduling import TaskWrapper as TaskWrapper
    from trinity_mq.scheduling import WorkflowRunner as WorkflowRunner
    from trinity_mq.scheduling import sort_batch_id as sort_batch_id
    from trinity_mq.workflows import WORKFLOWS as WORKFLOWS
    from trinity_mq.workflows import AsyncMultiTurnWorkflow as AsyncMultiTurnWorkflow
    from trinity_mq.workflows import AsyncRewardPropagationWorkflow as AsyncRewardPropagationWorkflow
    from trinity_mq.workflows import AsyncStepWiseRewardWorkflow as AsyncStepWiseRewardWorkflow
    from trinity_mq.workflows import MultiTurnWorkflow as MultiTurnWorkflow
    from trinity_mq.workflows import RewardPropagationWorkflow as RewardPropagationWorkflow
    from trinity_mq.workflows import StepWiseRewardWorkflow as StepWiseRewardWorkflow
    from trinity_mq.workflows import Task as Task
    from trinity_mq.workflows import Workflow as Workflow

__version__ = VERSION
renamed.install()

_NAMES: Mapping[str, str] = {
    "launch.api": "MetricsLine RunError RunHandle RunResult run",
    "config": "Config load_config",
    "experience": (
        "EID CustomField Experience ExperienceBatch from_hf_datasets gather_action_masks gather_attention_masks "
        "gather_multi_modal_inputs gather_response_attrs gather_token_ids group_by "
        "split_dpo_experience_to_single_turn to_hf_datasets"
    ),
    "models": "InferenceModel ModelWrapper",
    "operators": "ColumnOperator ExperienceOperator ExperienceOperatorV1 create_operators",
    "scheduling": "RunnerWrapper Scheduler Status TaskWrapper WorkflowRunner sort_batch_id",
    "workflows": (
        "WORKFLOWS AsyncMultiTurnWorkflow AsyncRewardPropagationWorkflow AsyncStepWiseRewardWorkflow MultiTurnWorkflow "
        "RewardPropagationWorkflow StepWiseRewardWorkflow Task Workflow"
    ),
}
_HOMES = {name: f"trinity_mq.{package}" for package, names in _NAMES.items() for name in names.split()}
_HOMES["Explorer"] = "trinity_agents.explorer"  # the only public name that is defined in trinity_agents

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - strings all, which the table above says once


if not TYPE_CHECKING:  # a type checker sees the imports above, and reports unknown names

    def __getattr__(name: str) -> Any:
        """Import a public name from its module and cache it."""
        if name not in _HOMES:
            raise AttributeError(f"module 'trinity_mq' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names and the names already loaded."""
    return sorted({*globals(), *_HOMES})
