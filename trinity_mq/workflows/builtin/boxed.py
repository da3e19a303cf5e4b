r"""Math problems with the answer in ``\boxed{}`` and optionally the reasoning in ``<think>``."""

from __future__ import annotations

import torch
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.rewards import create_reward
from trinity_mq.workflows.arguments import arguments_of
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.builtin.simple import SimpleArguments, SimpleWorkflow
from trinity_mq.workflows.dual import call
from trinity_mq.workflows.workflow import Task

PLAIN = "Solve the problem step by step and end with the answer in \\boxed{}."
THINKING = (
    "Reason about the problem between <think> and </think>. Behind that give a short solution that ends with the "
    "answer in \\boxed{}."
)


class BoxedArguments(SimpleArguments):
    """``workflow_args`` of the boxed math workflows."""

    use_base: bool = False
    """The model is not trained to chat: instruction and problem form one text that the model continues."""
    with_think: bool = False
    """The expected format has ``<think>...</think>`` before the answer."""
    format_score_coef: float = Field(default=0.1, ge=0)
    """Penalty for a response without the expected format."""


class MathBoxedWorkflow(SimpleWorkflow):
    """Boxed math: one request for all runs of a task. A response that was cut at a limit gets a reward, but is not
    trained on, because its final answer is unknown.
    """

    default_reward_fn = "math_boxed"
    arguments_kind = BoxedArguments
    arguments: BoxedArguments

    def reset(self, task: Task) -> None:
        self.arguments = arguments_of(task, BoxedArguments)
        super().reset(task)
        if task.reward_fn is None:
            form = self.arguments.model_dump(include={"with_think", "format_score_coef"})
            self.reward_fn = create_reward(self.default_reward_fn, {**form, **task.reward_fn_args})

    @Replaceable
    def system_prompt(self) -> str:
        """The system prompt of the taskset, else a prompt that asks for the expected format."""
        return self.task.format_args.system_prompt or (THINKING if self.arguments.with_think else PLAIN)

    def prompt(self) -> str:
        """Return instruction and problem as one text, for ``use_base``."""
        return f"{self.system_prompt}\n\nProblem: {self.question()}\nSolution:"

    def rewarded(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with rewards; responses that were cut are masked."""
        for response in super().rewarded(responses):
            if response.truncate_status == RESPONSE_TRUNCATED:
                response.action_mask = torch.zeros(response.response_length, dtype=torch.bool)
        return responses

    async def responses(self) -> list[Experience]:
        """Return one response for each run, to a conversation or, with ``use_base``, to a single text."""
        if not self.arguments.use_base:
            return await super().responses()
        responses: list[Experience] = await call(
            self.is_async, self.model, "generate", [self.prompt()], **self.sampling()
        )
        return check_asked(responses)


class AsyncMathBoxedWorkflow(MathBoxedWorkflow):
    """:class:`MathBoxedWorkflow` on the event loop."""

    is_async = True
