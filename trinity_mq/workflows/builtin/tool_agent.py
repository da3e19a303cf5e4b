"""Tool use over several turns: the model calls functions, sees their results, and then answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.rewards import create_reward
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.rewards.registry import parts_of
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.builtin.simple import question_of, set_reward
from trinity_mq.workflows.builtin.tools import Result, Toolbox
from trinity_mq.workflows.step_wise import FinalRewardWorkflow
from trinity_mq.workflows.sync_async import run_in_thread_if_async
from trinity_mq.workflows.workflow import Task

if TYPE_CHECKING:
    from trinity_mq.models import ModelWrapper

MAX_CALLS = 16
"""Maximum calls executed per turn. Further calls get an answer that says so."""
TOO_MANY = Result(f"error: not executed; at most {MAX_CALLS} calls a turn", False)


class ToolAgentArguments(Arguments):
    """``workflow_args`` of the tool-using workflows."""

    tools: tuple[str, ...] = Field(min_length=1)
    """Dotted paths of the functions that the model may call."""
    max_turns: int = Field(default=5, ge=1, le=1000)
    """Maximum requests to the model in one run."""
    max_result: int = Field(default=4000, ge=1)
    """Maximum characters of a function's result shown to the model."""
    tool_timeout: float = Field(default=30.0, gt=0)
    """Timeout in seconds of one tool call in the asynchronous workflow. In the synchronous workflow only the timeout of
    the run limits a call.
    """


class ToolAgentWorkflow(FinalRewardWorkflow):
    """A tool-using agent, one run at a time.

    Each turn is an experience. All turns get the reward of the answer, which is the text of the turn without calls that
    ends the run. The answer is empty if the run reached the limit of turns or of context first. Tool results are in the
    prompt of the next turn, so they are not trained on.
    """

    arguments_kind = ToolAgentArguments

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._arguments = arguments_of(task, ToolAgentArguments)
        self._toolbox = Toolbox(self._arguments.tools, self._arguments.max_result)
        if not self.is_async:
            self._toolbox.check_synchronous()
        self._answer_reward = create_reward(task.reward_fn or "exact_match", task.reward_fn_args)
        system = task.format_args.system_prompt
        self._conversation: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._conversation.append({"role": "user", "content": question_of(task)})
        self._answer: str | None = None
        self._finished = False
        self._call_count = self._error_count = 0

    @property
    def max_step_num(self) -> int:
        return self._arguments.max_turns

    async def _agent_step(self, step_num: int) -> bool:
        """Ask the model and execute its tool calls; return whether the model made any calls."""
        completion = self.client.chat.completions.create(
            model=self.model.model_name, messages=self._conversation, tools=self._toolbox.schemas
        )
        calls = self._append_message(await completion if self.is_async else completion)
        for number, tool_call in enumerate(calls):
            function = tool_call.function
            if number >= MAX_CALLS:
                result = TOO_MANY
            elif self.is_async:
                limit = self._arguments.tool_timeout
                result = await self._toolbox.call_async(function.name, function.arguments, limit)
            else:
                result = self._toolbox.call(function.name, function.arguments)
            self._call_count += 1
            self._error_count += not result.ok
            self._conversation.append({"role": "tool", "tool_call_id": tool_call.id, "content": result.text})
        return bool(calls)

    async def _run_reward(self, exps: list[Experience]) -> float:
        """Return the reward of the answer; its parts and the tool counters become metrics."""
        # the whole sampled text is judged: the message lacks the thoughts, which the prompt may have opened
        sampled = exps[-1].response_text if exps and self._answer is not None else None
        judge = functools.partial(
            parts_of,
            self._answer_reward,
            (self._answer or "") if sampled is None else sampled,
            truth_text(self.task.truth),
            finished=self._finished,
            record=self.task.raw_task,
            prompt_end=exps[-1].prompt_text if sampled is not None else None,
        )
        parts = await run_in_thread_if_async(self.is_async, judge, "reward")
        metrics = {"tool_calls": float(self._call_count), "tool_errors": float(self._error_count)}
        for experience in exps:
            set_reward(experience, self._answer_reward, parts)
            experience.metrics.update(metrics)
        return sum(parts.values())

    def _append_message(self, completion: Any) -> list[Any]:
        """Append the model's message to the conversation and return the calls to execute. No calls means the end of the
        run.
        """
        choice = completion.choices[0]
        text, calls = choice.message.content or "", list(choice.message.tool_calls or ())
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts := getattr(choice.message, "reasoning_content", None):
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in calls
            ]
        else:
            self._answer, self._finished = text, choice.finish_reason != "length"
        self._conversation.append(message)
        return calls


class AsyncToolAgentWorkflow(ToolAgentWorkflow):
    """:class:`ToolAgentWorkflow` on the event loop; synchronous functions run in threads."""

    is_async = True
