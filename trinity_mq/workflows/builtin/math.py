r"""Math problems: with a number as the answer, with an answer in ``\boxed{}``, and as a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED
from trinity_mq.models.recording.responses import check_asked
from trinity_mq.rewards import create_reward, judge_conversation
from trinity_mq.rewards.ground_truth import truth_text
from trinity_mq.workflows.arguments import arguments_of
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.builtin.simple import SimpleArguments, SimpleWorkflow, question_of, set_reward
from trinity_mq.workflows.sync_async import call
from trinity_mq.workflows.workflow import Task, TaskError

SYSTEM_PROMPT = (
    "Solve the problem step by step. Then give the final answer, a number without units, in \\boxed{} "
    "and write nothing after it."
)
BOXED_PROMPT = "Solve the problem step by step and end with the answer in \\boxed{}."
THOUGHTS_PROMPT = (
    "Reason about the problem between <think> and </think>. Behind that give a short solution that ends with the "
    "answer in \\boxed{}."
)
EVALUATION_PROMPT = "Think through the problem in steps and write what you find at the end as \\boxed{answer}."


class MathAnswerWorkflow(SimpleWorkflow):
    """:class:`SimpleWorkflow` that asks for a boxed number and compares it exactly with the truth."""

    _default_system_prompt: ClassVar[str | None] = SYSTEM_PROMPT
    _default_reward_fn = "math_answer"


class AsyncMathAnswerWorkflow(MathAnswerWorkflow):
    """:class:`MathAnswerWorkflow` on the event loop."""

    is_async = True


class MathRmWorkflow(MathAnswerWorkflow):
    """:class:`MathAnswerWorkflow` with a reward called as ``reward(experience, messages, ground_truth=truth)``, which
    may ask your own reward model.
    """

    def reset(self, task: Task) -> None:
        if not task.reward_fn:
            raise TaskError(
                f"{type(self).__name__} needs buffer.taskset.reward_fn: the dotted path of a function or class that is "
                "called as reward(experience, messages, ground_truth=truth) and returns the reward's parts by name"
            )
        super().reset(task)

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with reward, run number, and the parts of the reward as metrics."""
        messages, truth = self.format_messages(), truth_text(self.truth)
        for response in responses:
            set_reward(response, self.reward_fn, judge_conversation(self.reward_fn, response, messages, truth))
        return self._numbered_responses(responses)


class AsyncMathRmWorkflow(MathRmWorkflow):
    """:class:`MathRmWorkflow` on the event loop; the reward runs in a thread."""

    is_async = True


class BoxedArguments(SimpleArguments):
    """``workflow_args`` of the boxed math workflows."""

    use_base: bool = False
    """True: the model is not trained to chat, so instruction and problem form one text that the model continues."""
    with_think: bool = False
    """True: the expected format has ``<think>...</think>`` before the answer."""
    format_score_coef: float = Field(default=0.1, ge=0)
    """Amount subtracted from the reward of a response without the expected format."""


class BoxedAnswerWorkflow(SimpleWorkflow):
    """Math problems with the answer in a box: one request for all runs of a slice. A response that was cut at a limit
    gets a reward, but is not trained on, because its final answer is unknown.
    """

    _default_reward_fn = "math_boxed"
    arguments_kind: ClassVar[type[BoxedArguments]] = BoxedArguments

    @Replaceable
    def _arguments(self) -> BoxedArguments:
        return arguments_of(self.task, self.arguments_kind)

    use_base = Replaceable[bool](lambda self: self._arguments.use_base)
    with_think = Replaceable[bool](lambda self: self._arguments.with_think)
    format_score_coef = Replaceable[float](lambda self: self._arguments.format_score_coef)

    def reset(self, task: Task) -> None:
        self._arguments = arguments_of(task, self.arguments_kind)
        super().reset(task)

    @Replaceable
    def system_prompt(self) -> str:
        """The system prompt of the taskset, else a prompt that asks for the expected format."""
        return self.format_args.system_prompt or (THOUGHTS_PROMPT if self.with_think else BOXED_PROMPT)

    def _base_prompt(self) -> str:
        """Return instruction and problem as one text, for ``use_base``."""
        return f"{self.system_prompt}\n\nProblem: {question_of(self)}\nSolution:"

    def _reward_arguments(self) -> Mapping[str, Any]:
        return {"with_think": self.with_think, "format_score_coef": self.format_score_coef}

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        """Return ``responses`` with rewards; responses that were cut are masked."""
        for response in super()._rewarded_responses(responses):
            if response.truncate_status == RESPONSE_TRUNCATED:
                response.action_mask = torch.zeros(response.response_length, dtype=torch.bool)
        return responses

    async def _asked_responses(self, **sampling: Any) -> list[Experience]:
        """Return one response for each run, to a conversation or, with ``use_base``, to a single text."""
        if not self.use_base:
            return await super()._asked_responses(**sampling)
        prompts, sampling = [self._base_prompt()], {**self._request_sampling(), **sampling}
        return check_asked(await call(self.is_async, self.model, "generate", prompts, **sampling), self.model)


class AsyncBoxedAnswerWorkflow(BoxedAnswerWorkflow):
    """:class:`BoxedAnswerWorkflow` on the event loop."""

    is_async = True


class MathBenchmarkWorkflow(SimpleWorkflow):
    """Math problems as an evaluation: one request for all runs of a slice. The taskset's system prompt and reward
    function are ignored, so that runs trained with different prompts and rewards can be compared.

    Metrics: ``accuracy``, ``majority`` for several runs, and ``finished``, 0 for a response that was cut at a limit.
    """

    _default_reward_fn = "math_answer"

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: The task is a training task.
        """
        if not task.is_eval:
            raise TaskError(
                f"{type(self).__name__} only measures; name it in buffer.eval_tasksets and train with "
                "math_answer_workflow or boxed_answer_workflow"
            )
        self.task = task
        self.reward_fn = create_reward(self._default_reward_fn, {})

    @Replaceable
    def system_prompt(self) -> str:
        return EVALUATION_PROMPT

    def _rewarded_responses(self, responses: list[Experience]) -> list[Experience]:
        for response in super()._rewarded_responses(responses):
            response.metrics["finished"] = float(response.truncate_status is None)
        return responses


class AsyncMathBenchmarkWorkflow(MathBenchmarkWorkflow):
    """:class:`MathBenchmarkWorkflow` on the event loop."""

    is_async = True
