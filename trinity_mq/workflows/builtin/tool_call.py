"""Single-turn tool selection: the model gets tools and a question, and its calls are judged."""

from __future__ import annotations

import json
from typing import Any

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import arguments_of
from trinity_mq.workflows.builtin.simple import SimpleArguments, SimpleWorkflow
from trinity_mq.workflows.workflow import Task, TaskError


class ToolCallArguments(SimpleArguments):
    """``workflow_args`` of the tool-calling workflows."""

    tools_key: str = "tools"
    """Record key of the tools: a list of OpenAI function tools, or the JSON of such a list."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools of records that do not define tools."""


class ToolChoiceWorkflow(SimpleWorkflow):
    """Tool selection, with one request for all runs of a slice. The ground truth is a JSON list of calls ``{"name",
    "arguments"}``; no tool is executed.
    """

    _default_reward_fn = "tool_call"
    arguments_kind = ToolCallArguments

    def reset(self, task: Task) -> None:
        self._offered_tools = tools_of(task, arguments_of(task, ToolCallArguments))
        super().reset(task)

    def _request_sampling(self) -> dict[str, Any]:
        return {**super()._request_sampling(), "tools": self._offered_tools}

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with rewards, each with its offered tools."""
        for response in super()._rewarded_responses(responses):
            response.tools = self._offered_tools
        return responses


class AsyncToolChoiceWorkflow(ToolChoiceWorkflow):
    """:class:`ToolChoiceWorkflow` on the event loop."""

    is_async = True


def tools_of(task: Task, arguments: ToolCallArguments) -> list[dict[str, Any]]:
    """Return the tools that ``task`` offers, in the form of the OpenAI API; a bare function is wrapped.

    Raises:
        TaskError: The task offers no tools, or a tool has no name.
    """
    key = arguments.tools_key
    tools = task.raw_task.get(key) or list(arguments.tools)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"raw_task[{key!r}] is not JSON: {error}") from error
    if not isinstance(tools, list) or not tools:
        raise TaskError(
            f"the task offers no tools: raw_task[{key!r}] is {repr(task.raw_task.get(key))[:80]}, wanted a list of "
            "function tools; or set workflow_args.tools or workflow_args.tools_key"
        )
    return [_tool(number, tool) for number, tool in enumerate(tools)]


def _tool(number: int, tool: Any) -> dict[str, Any]:
    wrapped = {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool
    match wrapped:
        case {"type": "function", "function": {"name": str(name)}} if name:
            return dict(wrapped)
    raise TaskError(
        f"tool {number} of the task is {repr(tool)[:80]}, wanted "
        '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
    )
