"""Using tools over several turns: the model calls functions, sees what they return, and answers when it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.rewards import create_reward
from trinity_mq.rewards.registry import parts_of
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.builtin.simple import question_of, truth_of
from trinity_mq.workflows.builtin.tools import Result, Toolbox
from trinity_mq.workflows.step_wise import AsyncRewardPropagationWorkflow, RecordedWorkflow, RewardPropagationWorkflow
from trinity_mq.workflows.workflow import Task

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

MAX_CALLS = 16
"""Calls of one turn that are executed; the others get an answer that says so."""
TOO_MANY = Result(f"error: not executed; at most {MAX_CALLS} calls a turn", False)


class ToolAgentArguments(Arguments):
    """``workflow_args`` of the tool-using workflows."""

    tools: tuple[str, ...] = Field(min_length=1)
    """Dotted paths of the functions that the model may call."""
    max_turns: int = Field(default=5, ge=1, le=1000)
    """Requests of one run."""
    max_result: int = Field(default=4000, ge=1)
    """Characters of a function's result that the model is shown."""
    tool_timeout: float = Field(default=30.0, gt=0)
    """Seconds for one call in the asynchronous workflow; in the other a call has the time of the run."""


class ToolAgent(RecordedWorkflow):
    """Base of the tool-using workflows: the conversation, and the reward of the last answer.

    Each turn is an experience. All get the reward of the answer that ends the run, which is empty if the turns or the
    context ended before. What a tool says is in the prompt of the next turn: it is not trained on.
    """

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments = arguments_of(task, ToolAgentArguments)
        self.toolbox = Toolbox(self.arguments.tools, self.arguments.max_result)
        if not self.is_async:
            self.toolbox.need_synchronous()
        self.reward_fn = create_reward(task.reward_fn or "exact_match", task.reward_fn_args)
        system = task.format_args.system_prompt
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": question_of(task)})
        self.answer, self.finished = "", False
        self.calls = self.errors = 0

    @property
    def max_step_num(self) -> int:
        """Most turns of a run."""
        return self.arguments.max_turns

    def request(self) -> dict[str, Any]:
        """Return what to ask the model for in the next turn."""
        return {"model": self.model.model_name, "messages": self.messages, "tools": self.toolbox.schemas}

    def take_calls(self, completion: Any) -> list[Any]:
        """Put what the model said into the conversation and return the calls to execute; none is the end."""
        choice = completion.choices[0]
        text, calls = choice.message.content or "", list(choice.message.tool_calls or ())
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in calls
            ]
        else:
            self.answer, self.finished = text, choice.finish_reason != "length"
        self.messages.append(said)
        return calls

    def returned(self, call: Any, result: Result) -> None:
        """Put what a tool returned into the conversation."""
        self.calls += 1
        self.errors += not result.ok
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result.text})

    def judged(self, experiences: Sequence[Experience]) -> float:
        """Return what the run is worth; its parts and how the tools were used become metrics."""
        parts = parts_of(self.reward_fn, self.answer, truth_of(self.task), finished=self.finished)
        metrics = {**parts, "tool_calls": float(self.calls), "tool_errors": float(self.errors)}
        for experience in experiences:
            experience.metrics.update(metrics)
        return sum(parts.values())


class ToolAgentWorkflow(ToolAgent, RewardPropagationWorkflow):
    """Functions to call, one run at a time, in a thread."""

    def step(self, step_num: int) -> bool:
        """Ask the model and execute what it calls; return whether it called anything."""
        calls = self.take_calls(self.client.chat.completions.create(**self.request()))
        for call in calls[:MAX_CALLS]:
            self.returned(call, self.toolbox.call(call.function.name, call.function.arguments))
        for call in calls[MAX_CALLS:]:
            self.returned(call, TOO_MANY)
        return bool(calls)

    def reward(self, exps: list[Experience]) -> float:
        """Return what the last answer is worth."""
        return self.judged(exps)


class AsyncToolAgentWorkflow(ToolAgent, AsyncRewardPropagationWorkflow):
    """:class:`ToolAgentWorkflow` on the event loop; functions may be asynchronous, others run in threads."""

    async def step_async(self, step_num: int) -> bool:
        """Ask the model and execute what it calls; return whether it called anything."""
        calls = self.take_calls(await self.client.chat.completions.create(**self.request()))
        limit = self.arguments.tool_timeout
        for call in calls[:MAX_CALLS]:
            self.returned(call, await self.toolbox.call_async(call.function.name, call.function.arguments, limit))
        for call in calls[MAX_CALLS:]:
            self.returned(call, TOO_MANY)
        return bool(calls)

    async def reward_async(self, exps: list[Experience]) -> float:
        """Return what the last answer is worth."""
        return self.judged(exps)
