"""The signatures of the documented interface: each parameter is there, in its place, and all others are optional."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest

import trinity_mq

EXPERIENCE = (
    "*eid=None *tokens *logprobs=None *reward=None *token_level_reward=None *advantages=None *returns=None "
    "*truncate_status=None *info=None *metrics=None *prompt_length=1 *response_text=None *prompt_text=None "
    "*action_mask=None *messages=None *tools=None *chosen=None *rejected=None *chosen_messages=None "
    "*rejected_messages=None *multi_modal_inputs=None *teacher_logprobs=None *custom_fields=None"
)
STEPS = "*task *model *auxiliary_models=None *use_openai_client=True"
DOCUMENTED = {
    "CustomField": "source_field destination_field data_type",
    "EID": "batch='' task='' run=0 step=0 suffix",
    "EID.to_dict": "",
    "Experience": EXPERIENCE,
    "Experience.deserialize": "data",
    "Experience.deserialize_many": "data",
    "Experience.serialize": "",
    "Experience.serialize_many": "experiences",
    "Experience.to_dict": "",
    "ExperienceOperator.close": "",
    "ExperienceOperator.process": "exps",
    "ExperienceOperatorV1.close": "",
    "ExperienceOperatorV1.prepare": "",
    "ExperienceOperatorV1.process": "exps",
    "ExperienceOperatorV1.set_auxiliary_model": "auxiliary_models=None",
    "Explorer": "config",
    "Explorer.explore": "",
    "Explorer.get_weight": "name",
    "Explorer.setup_weight_sync_group": "master_address master_port state_dict_meta=None",
    "RewardPropagationWorkflow": STEPS,
    "RewardPropagationWorkflow.reward": "exps",
    "RewardPropagationWorkflow.run": "",
    "RewardPropagationWorkflow.step": "step_num",
    "RunnerWrapper": "runner_id rollout_model auxiliary_models config",
    "RunnerWrapper.restart_runner": "",
    "RunnerWrapper.run_with_retry": "task",
    "Scheduler": "config rollout_model auxiliary_models=None",
    "Scheduler.get_results": "batch_id min_num=None timeout=None clear_timeout_tasks=True",
    "Scheduler.has_step": "batch_id",
    "Scheduler.schedule": "tasks batch_id",
    "Scheduler.start": "",
    "Scheduler.stop": "",
    "Scheduler.task_done_callback": "async_task",
    "Scheduler.wait_all": "timeout=None clear_timeout_tasks=True",
    "Status": "ok metric message=None",
    "StepWiseRewardWorkflow": STEPS,
    "StepWiseRewardWorkflow.reward": "exps step_num",
    "StepWiseRewardWorkflow.run": "",
    "StepWiseRewardWorkflow.step": "step_num",
    "TaskWrapper": "task batch_id run_id_base=0 repeat_times=1",
    "WorkflowRunner": "config model auxiliary_models=None runner_id=None",
    "WorkflowRunner.run_task": "task repeat_times=1 run_id_base=0",
    "create_operators": "operator_configs auxiliary_models=None",
    "from_hf_datasets": "dataset",
    "gather_action_masks": "experiences max_response_length",
    "gather_attention_masks": "experiences max_prompt_length max_response_length",
    "gather_multi_modal_inputs": "experiences",
    "gather_response_attrs": "experiences attr_name max_response_length pad_value=0",
    "gather_token_ids": "experiences max_prompt_length max_response_length pad_token_id",
    "group_by": "experiences id_type",
    "sort_batch_id": "batch_id",
    "split_dpo_experience_to_single_turn": "experiences",
    "to_hf_datasets": "experiences",
}
"""Parameters by name in ``trinity_mq``; those behind ``*`` are given by keyword."""
COROUTINES = {
    *("Explorer.explore", "Explorer.get_weight", "Explorer.setup_weight_sync_group", "RunnerWrapper.run_with_retry"),
    *("Scheduler.get_results", "Scheduler.start", "Scheduler.stop", "Scheduler.wait_all"),
    *("ExperienceOperatorV1.close", "ExperienceOperatorV1.prepare", "ExperienceOperatorV1.process"),
}
PROPERTIES = {"EID": "uid sid rid tid", "Workflow": "repeatable resettable", "StepWiseRewardWorkflow": "max_step_num"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_documented_can_be_called_so(name: str) -> None:
    called: Any = functools.reduce(getattr, name.split("."), trinity_mq)
    given = [one for one in inspect.signature(called).parameters.values() if one.name not in {"self", "cls"}]
    for place, documented in enumerate(DOCUMENTED[name].split()):
        spelled, _, default = documented.partition("=")
        by_keyword, spelled = spelled.startswith("*"), spelled.removeprefix("*")
        parameter = next((one for one in given if one.name == spelled), None)
        assert parameter is not None, f"{name} has no parameter {spelled}"
        if not by_keyword:
            assert given.index(parameter) == place
            assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if default:
            assert repr(parameter.default) == default
    wanted = {one.partition("=")[0].removeprefix("*") for one in DOCUMENTED[name].split()}
    required = [one.name for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    assert [one for one in required if one not in wanted] == [], "what is not documented is optional"
    if "." in name:
        assert inspect.iscoroutinefunction(called) == (name in COROUTINES)


def test_documented_properties() -> None:
    for owner, names in PROPERTIES.items():
        kind = getattr(trinity_mq, owner)
        assert [name for name in names.split() if not isinstance(getattr(kind, name, None), property)] == []
