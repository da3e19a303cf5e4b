"""Names of workflows: the built-in table, and the lookup by name."""

from __future__ import annotations

from typing import Any

from trinity_mq.runtime.plugins import Registry, resolve

_SYNCHRONOUS = {
    "frozen_lake_game_workflow": "trinity_mq.workflows.games.frozen_lake:FrozenLakeWorkflow",
    "gymnasium_workflow": "trinity_mq.workflows.environments.workflow:GymnasiumWorkflow",
    "math_boxed_workflow": "trinity_mq.workflows.builtin.math:MathBoxedWorkflow",
    "math_eval_workflow": "trinity_mq.workflows.builtin.math:MathEvalWorkflow",
    "math_rm_workflow": "trinity_mq.workflows.builtin.math:MathRmWorkflow",
    "math_ruler_workflow": "trinity_mq.workflows.builtin.ruler:MathRulerWorkflow",
    "math_trainable_ruler_workflow": "trinity_mq.workflows.builtin.trainable_ruler:MathTrainableRulerWorkflow",
    "math_workflow": "trinity_mq.workflows.builtin.math:MathWorkflow",
    "on_policy_distill_math_workflow": "trinity_mq.workflows.builtin.distill:OnPolicyDistillMathWorkflow",
    "on_policy_distill_workflow": "trinity_mq.workflows.builtin.distill:OnPolicyDistillWorkflow",
    "rubric_judge_workflow": "trinity_mq.workflows.builtin.rubric:RubricJudgeWorkflow",
    "ruler_workflow": "trinity_mq.workflows.builtin.ruler:RulerWorkflow",
    "simple_workflow": "trinity_mq.workflows.builtin.simple:SimpleWorkflow",
    "sudoku_workflow": "trinity_mq.workflows.games.sudoku:SudokuWorkflow",
    "tool_agent_workflow": "trinity_mq.workflows.builtin.tool_agent:ToolAgentWorkflow",
    "tool_call_workflow": "trinity_mq.workflows.builtin.tool_call:ToolCallWorkflow",
}
_ASYNCHRONOUS = {
    "RAFT_alfworld_workflow": "trinity_mq.workflows.environments.alfworld:RAFTAlfworldWorkflow",
    "RAFT_reflect_alfworld_workflow": "trinity_mq.workflows.environments.alfworld:RAFTReflectAlfworldWorkflow",
    "agentscope_react_math_workflow": "trinity_mq.workflows.agentscope.react:AgentScopeReactMathWorkflow",
    "agentscope_react_workflow": "trinity_mq.workflows.agentscope.react:AgentScopeReActWorkflow",
    "agentscope_v1_react_search_workflow": "trinity_mq.workflows.agentscope.react:AgentScopeV1ReactSearchWorkflow",
    "agentscope_workflow_adapter": "trinity_mq.workflows.agentscope.adapter:AgentScopeWorkflowAdapter",
    "agentscope_workflow_adapter_v1": "trinity_mq.workflows.agentscope.adapter:AgentScopeWorkflowAdapterV1",
    "alfworld_workflow": "trinity_mq.workflows.environments.alfworld:AlfworldWorkflow",
    "as_react_workflow": "trinity_mq.workflows.agentscope.react:AgentScopeReActWorkflow",
    "email_search_workflow": "trinity_mq.workflows.agentscope.email_search:EmailSearchWorkflow",
    "frozen_lake_workflow": "trinity_mq.workflows.environments.lake:TrinityFrozenLakeWorkflow",
    "intercode_sql_workflow": "trinity_mq.workflows.environments.worlds:InterCodeSQLWorkflow",
    "program_workflow": "trinity_mq.workflows.sessions.program:ProgramWorkflow",
    "recorded_sessions": "trinity_mq.workflows.sessions.recorded:RecordedSessionsWorkflow",
    "sciworld_workflow": "trinity_mq.workflows.environments.worlds:SciWorldWorkflow",
    "step_wise_alfworld_workflow": "trinity_mq.workflows.environments.alfworld:StepWiseAlfworldWorkflow",
    "textworld_workflow": "trinity_mq.workflows.environments.worlds:TextWorldWorkflow",
    "verifiers_workflow": "trinity_mq.workflows.sessions.verifiers:VerifiersWorkflow",
    "webshop_workflow": "trinity_mq.workflows.environments.worlds:WebShopWorkflow",
}
WORKFLOWS = Registry(
    _SYNCHRONOUS
    | _ASYNCHRONOUS
    | {f"async_{name}": path.replace(":", ":Async") for name, path in _SYNCHRONOUS.items()},
    "WORKFLOWS",
)
"""Built-in workflows. The workflows that ask the model themselves exist in a synchronous and an asynchronous form.
Installed packages add workflows under the entry-point group ``trinity_mq.workflows``. Name your own workflow by dotted
path, from anywhere on ``PYTHONPATH`` or from a folder in ``plugin_dirs`` of the configuration, or by the name that
``@WORKFLOWS.register_module`` gives it there.
"""

ENTRY_GROUP = "trinity_mq.workflows"


def find_workflow(name: str) -> Any:
    """Return the object that ``name`` refers to: a registered name, an entry point or a dotted path.

    Raises:
        UnknownNameError: The name does not exist or cannot be imported. The message lists near misses.
    """
    return resolve("workflow", name, WORKFLOWS, ENTRY_GROUP)
