"""Names of workflows: the built-in table."""

from __future__ import annotations

from trinity_mq.runtime.plugins import Registry

_BUILTIN = "trinity_mq.workflows.builtin"
_SYNCHRONOUS = {
    "boxed_answer_workflow": f"{_BUILTIN}.math:BoxedAnswerWorkflow",
    "distill_workflow": f"{_BUILTIN}.distill:DistillWorkflow",
    "frozen_lake_game_workflow": "trinity_mq.workflows.games.frozen_lake:FrozenLakeWorkflow",
    "gymnasium_workflow": "trinity_mq.workflows.environments.workflow:GymnasiumWorkflow",
    "math_answer_ruler_workflow": f"{_BUILTIN}.ruler:MathRulerWorkflow",
    "math_answer_workflow": f"{_BUILTIN}.math:MathAnswerWorkflow",
    "math_benchmark_workflow": f"{_BUILTIN}.math:MathBenchmarkWorkflow",
    "math_boxed_workflow": f"{_BUILTIN}.trinity:MathBoxedWorkflow",
    "math_distill_workflow": f"{_BUILTIN}.distill:MathDistillWorkflow",
    "math_eval_workflow": f"{_BUILTIN}.trinity:MathEvalWorkflow",
    "math_rm_workflow": f"{_BUILTIN}.trinity:MathRMWorkflow",
    "math_ruler_workflow": f"{_BUILTIN}.trinity_judges:MathRULERWorkflow",
    "math_trainable_ruler_workflow": f"{_BUILTIN}.trinity_judges:MathTrainableRULERWorkflow",
    "math_workflow": f"{_BUILTIN}.trinity:MathWorkflow",
    "reward_model_workflow": f"{_BUILTIN}.math:MathRmWorkflow",
    "rubric_judge_openai_workflow": f"{_BUILTIN}.trinity_judges:RubricJudgeWorkflowWithAPI",
    "rubric_judge_workflow": f"{_BUILTIN}.trinity_judges:RubricJudgeWorkflow",
    "rubric_workflow": f"{_BUILTIN}.rubric:RubricWorkflow",
    "ruler_workflow": f"{_BUILTIN}.ruler:RulerWorkflow",
    "self_ruler_workflow": f"{_BUILTIN}.trainable_ruler:MathTrainableRulerWorkflow",
    "simple_workflow": f"{_BUILTIN}.simple:SimpleWorkflow",
    "sudoku_game_workflow": "trinity_mq.workflows.games.sudoku:SudokuWorkflow",
    "sudoku_workflow": "trinity_mq.workflows.games.sudoku_moves:SudokuMovesWorkflow",
    "thinking_budget_workflow": f"{_BUILTIN}.trinity_thinking:ThinkingBudgetWorkflow",
    "tool_agent_workflow": f"{_BUILTIN}.tool_agent:ToolAgentWorkflow",
    "tool_choice_workflow": f"{_BUILTIN}.tool_call:ToolChoiceWorkflow",
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
    "cod_grid_navigation_workflow": "trinity_mq.workflows.environments.dots:GridNavigationPackWorkflow",
    "email_search_workflow": "trinity_mq.workflows.agentscope.email_search:EmailSearchWorkflow",
    "frozen_lake_workflow": "trinity_mq.workflows.environments.lake:TrinityFrozenLakeWorkflow",
    "intercode_sql_workflow": "trinity_mq.workflows.environments.worlds:InterCodeSQLWorkflow",
    "on_policy_distill_math_workflow": f"{_BUILTIN}.trinity:OnPolicyDistillMathWorkflow",
    "on_policy_distill_workflow": f"{_BUILTIN}.trinity:OnPolicyDistillWorkflow",
    "program_workflow": "trinity_mq.workflows.sessions.program:ProgramWorkflow",
    "recorded_sessions": "trinity_mq.workflows.sessions.recorded:RecordedSessionsWorkflow",
    "sciworld_workflow": "trinity_mq.workflows.environments.worlds:SciWorldWorkflow",
    "step_wise_alfworld_workflow": "trinity_mq.workflows.environments.alfworld:StepWiseAlfworldWorkflow",
    "textworld_workflow": "trinity_mq.workflows.environments.worlds:TextWorldWorkflow",
    "tool_call_workflow": f"{_BUILTIN}.trinity:ToolCallWorkflow",
    "toolcall_workflow": f"{_BUILTIN}.trinity:ToolCallWorkflow",
    "verifiers_workflow": "trinity_mq.workflows.sessions.verifiers:VerifiersWorkflow",
    "webshop_workflow": "trinity_mq.workflows.environments.worlds:WebShopWorkflow",
}
_FORMER = {
    "async_frozen_lake_workflow": "trinity_mq.workflows.environments.lake:TrinityFrozenLakeWorkflow",
    "async_on_policy_distill_math_workflow": f"{_BUILTIN}.trinity:OnPolicyDistillMathWorkflow",
    "async_on_policy_distill_workflow": f"{_BUILTIN}.trinity:OnPolicyDistillWorkflow",
    "async_tool_call_workflow": f"{_BUILTIN}.trinity:ToolCallWorkflow",
}
"""Names of release 0.2.0. Their workflows are asynchronous under the names without ``async_`` too."""
WORKFLOWS = Registry(
    _SYNCHRONOUS
    | _ASYNCHRONOUS
    | _FORMER
    | {f"async_{name}": path.replace(":", ":Async") for name, path in _SYNCHRONOUS.items()},
    "WORKFLOWS",
)
"""Built-in workflows. The asynchronous form of a workflow of ``_SYNCHRONOUS`` has the prefix ``async_``. A name that
Trinity-RFT also has means Trinity-RFT's workflow; :data:`trinity_mq.renamed.CHANGED_NAMES` lists such names that meant
another workflow before. Installed packages add workflows under the entry-point group ``trinity_mq.workflows``. Name
your own workflow by dotted path, from anywhere on ``PYTHONPATH`` or from a folder in ``plugin_dirs`` of the
configuration, or by the name that ``@WORKFLOWS.register_module`` gives it there.
"""

ENTRY_GROUP = "trinity_mq.workflows"
