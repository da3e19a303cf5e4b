"""A budget for thoughts, under the name of Trinity-RFT.

Trinity-RFT leaves the budget to vLLM. Here any engine works: an answer whose thoughts use up the budget is continued
behind the text that ends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trinity_mq.experience import Experience
from trinity_mq.experience.rules import RESPONSE_TRUNCATED, SINGLE_TURN, Versions
from trinity_mq.models.recording.responses import check_asked, is_asked
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.builtin.distill import ONE_TOKEN
from trinity_mq.workflows.builtin.simple import SimpleWorkflow
from trinity_mq.workflows.sync_async import call, gather
from trinity_mq.workflows.workflow import Task, TaskError


class ThinkingBudgetArguments(Arguments):
    """``workflow_args`` of a budget for thoughts."""

    thinking_token_budget: int = Field(ge=0)
    """Number of tokens after which the thoughts are ended."""
    reasoning_end_str: str = Field(default="</think>", min_length=1)
    """Text that ends the thoughts."""


class ThinkingBudgetWorkflow(SimpleWorkflow):
    """Asks for an answer to the record's ``messages`` for each run, with at most ``thinking_token_budget`` tokens of
    thoughts.

    The tokens of the first text that ends the thoughts are not trained on, whether the model or this workflow wrote
    them. The task's reward function gives the reward. Without one, a subclass or an operator must give it.
    """

    arguments_kind: ClassVar[type[ThinkingBudgetArguments]] = ThinkingBudgetArguments

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: An argument is missing, or the record has no messages.
        """
        super().reset(task)
        self._arguments = arguments_of(task, self.arguments_kind)
        messages = task.raw_task.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise TaskError(f"raw_task['messages'] is {messages!r:.80}, wanted a list of messages")

    def format_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the record."""
        messages: list[dict[str, Any]] = self.raw_task["messages"]
        return messages

    async def _dual_body(self) -> list[Experience]:
        """Ask for the thoughts, end thoughts that exceed the budget, and return one experience for each run."""
        budget, sampling = self._arguments.thinking_token_budget, self._request_sampling()
        limit = sampling.get("max_tokens") or self.model.sampling.get("max_tokens")
        first = min(max(budget, 1), limit or max(budget, 1))
        begun: list[Experience] = check_asked(
            await call(self.is_async, self.model, "chat", self.format_messages(), **{**sampling, "max_tokens": first}),
            self.model,
        )
        end = await self._end_tokens()
        responses = await gather(self.is_async, [self._continued(answer, end, limit) for answer in begun])
        for response in responses:
            place = _place(response.tokens[response.prompt_length :].tolist(), end)
            if place is not None and response.action_mask is not None:
                response.action_mask = response.action_mask.clone()
                response.action_mask[place : place + len(end)] = False
        if self.task.reward_fn is not None:
            return await self._with_rewards(responses)
        return self._numbered_responses(responses)

    async def _continued(self, answer: Experience, end: list[int], limit: int | None) -> Experience:
        """Return ``answer``, continued if it used up the budget and ``limit`` and the model's context allow more
        tokens.
        """
        tokens = answer.tokens.tolist()
        begun_tokens = tokens[answer.prompt_length :]
        budget = self._arguments.thinking_token_budget
        has_ended = _place(begun_tokens, end) is not None
        if not is_asked([answer]) or (budget and answer.truncate_status != RESPONSE_TRUNCATED):
            return answer
        begun_tokens = begun_tokens[:budget]
        forced = [] if has_ended and budget else end
        rest = None if limit is None else limit - len(begun_tokens) - len(forced)
        if rest is not None and rest < 1:
            return answer
        prefix = [*tokens[: answer.prompt_length], *begun_tokens, *forced]
        # the thoughts do not belong to the prompt, so only the context limits them
        sampling = {**self._request_sampling(), "n": 1, "max_prompt_tokens": None}
        sampling |= {} if rest is None else {"max_tokens": rest}
        [tail] = await call(self.is_async, self.model, "generate", [prefix], **sampling)
        if not is_asked([tail]):
            return answer
        return _joined(answer, len(begun_tokens), forced, tail, self._arguments.reasoning_end_str)

    async def _end_tokens(self) -> list[int]:
        """Return the tokens of the text that ends thoughts, as the engine's tokenizer has them.

        Raises:
            TaskError: The text has no tokens.
        """
        texts = [self._arguments.reasoning_end_str, "a"]
        student = self.model.clone_with_isolated_history()
        answers: list[Experience] = await call(self.is_async, student, "generate", texts, **ONE_TOKEN)
        end, other = (answer.tokens[: answer.prompt_length].tolist() for answer in answers)
        begins = len(end) > 1 and len(other) > 1 and end[0] == other[0]  # a token before each text
        end = end[1:] if begins else end
        if not end:
            raise TaskError(f"workflow_args.reasoning_end_str is {texts[0]!r}, which has no tokens")
        return end


class AsyncThinkingBudgetWorkflow(ThinkingBudgetWorkflow):
    """:class:`ThinkingBudgetWorkflow` on the event loop; all answers are continued concurrently."""

    is_async = True


def _place(tokens: list[int], part: list[int]) -> int | None:
    """Return the index of the first occurrence of ``part`` in ``tokens``, or None."""
    places = range(len(tokens) - len(part) + 1)
    return next((place for place in places if tokens[place : place + len(part)] == part), None)


def _joined(answer: Experience, kept: int, forced: Sequence[int], tail: Experience, end: str) -> Experience:
    """Return one experience whose response is the first ``kept`` response tokens of ``answer``, the ``forced`` tokens
    and the response of ``tail``.
    """

    def joined(first: Tensor | None, last: Tensor | None) -> Tensor | None:
        if first is None or last is None:
            return None
        return torch.cat([first[:kept], first.new_zeros(len(forced)), last])

    begun = (answer.response_text or "") if kept else ""
    return Experience(
        experience_type=SINGLE_TURN,
        tokens=tail.tokens,
        prompt_length=answer.prompt_length,
        logprobs=joined(answer.logprobs, tail.logprobs),
        action_mask=joined(answer.action_mask, tail.action_mask),
        response_text=begun + (end if forced else "") + (tail.response_text or ""),
        prompt_text=answer.prompt_text,
        truncate_status=tail.truncate_status,
        temperature=answer.temperature,
        versions=_joined_versions(answer, kept, tail, kept + len(forced)),
        eid=answer.eid,
        info=answer.info,
        metrics={**answer.metrics, **tail.metrics},
    )


def _joined_versions(answer: Experience, kept: int, tail: Experience, start: int) -> Versions | None:
    """Return the weight versions of a joined response: the first ``kept`` tokens of ``answer``, then ``tail`` from
    token ``start`` on.
    """
    if answer.versions is None or tail.versions is None:
        return None
    rows = [row for row in answer.versions if row[0] < kept]
    rows += [(start + first, generation, step) for first, generation, step in tail.versions]
    return [(0, *rows[0][1:]), *rows[1:]]
