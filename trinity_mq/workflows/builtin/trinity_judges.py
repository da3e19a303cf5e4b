"""Workflows with a judge under the names of Trinity-RFT, with its prompts, rewards and metrics.

The prompts define the judge's task. They are taken from Trinity-RFT 0.6.0 (Apache-2.0,
https://github.com/agentscope-ai/Trinity-RFT). Their sources are RULER (https://github.com/OpenPipe/ART) and "Rubrics as
Rewards" (arXiv 2507.17746).
"""

from __future__ import annotations

import ast
import json
import os
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.attributes import Replaceable
from trinity_mq.workflows.auxiliary import AuxiliaryError, Which, auxiliary_index
from trinity_mq.workflows.builtin.judging import JUDGE, MAX_VERDICT, completion_text, judge_answer
from trinity_mq.workflows.builtin.simple import SimpleWorkflow, question_of
from trinity_mq.workflows.builtin.trinity import tags_prompt
from trinity_mq.workflows.sync_async import call, gather
from trinity_mq.workflows.workflow import Task, TaskError

Messages = list[dict[str, Any]]

TRUTH_SHARE = 0.2
"""Share of the tasks whose ground truth is used by :class:`MathTrainableRULERWorkflow`."""
WORST_REWARD, BEST_REWARD = -0.1, 1.1
"""Sums of ``math_reward`` that correspond to a judge's scores 0 and 1."""

# Prompts of Trinity-RFT 0.6.0, Apache-2.0.
_RULER_SYSTEM = (
    "You are a fair judge. The user will provide a question and {count} candidate solutions to it. Your task is to "
    "compare the solutions, see how well they resolve the question, and assign a score within the range [0, 1] for "
    "each solution."
)
_RULER_FORMAT = (
    "Solution format requirement: first think about the reasoning process in the mind and then provides the final "
    "answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
    "respectively, i.e.,\n<think> reasoning process here </think>\n<answer> answer here </answer>."
)
_RULER_SCORES = (
    "Please assign a score within the range [0, 1] for each of them, reflecting how well they solve the question.\n"
    "You may compare them against each other and think step by step before returning your final scores, but keep your "
    "reasoning process brief and concise when possible."
)
_RULER_END = (
    "Conclude your response with a list of scores, in the following format: [score for solution 1, score for solution "
    "2, ..., score for solution {count}]\n"
)
_RUBRIC_SYSTEM = """You are an expert evaluator. Given a user prompt, a generated response, and a list of quality \
rubrics, please rate the overall quality of the response on a scale of 1 to 10 based on how well it satisfies the \
rubrics.
Consider all rubrics holistically when determining your score. A response that violates multiple rubrics should \
receive a lower score, while a response that satisfies all rubrics should receive a higher score.
Start your response with a valid JSON object that starts with "```json" and ends with "```". The JSON object should \
contain
a single key "rating" and the value should be an integer between 1 and 10.
Example response:
```json
{
"rating": 7
}```"""
_RUBRIC_USER = """Given the following prompt, response, and rubrics, please rate the overall quality of the response \
on a scale of 1 to 10 based
on how well it satisfies the rubrics.
<prompt>
{question}
</prompt>
<response>
{response}
</response>
<rubrics>
{rubrics}
</rubrics>
Your JSON Evaluation:"""
RUBRIC_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer.\n    "
)


def ruler_messages(question: str, answers: Sequence[str], between: str) -> Messages:
    """Return the messages that ask a judge to compare answers.

    Args:
        question: The task.
        answers: The answers.
        between: Text between the parts of the message: an empty line, or a line break alone.
    """
    count = len(answers)
    solutions = "\n\n".join(f"Candidate solution {number}: {text}" for number, text in enumerate(answers, 1))
    parts = ["\nBelow is a question and several candidate solutions.", f"Question: {question}\n\n{_RULER_FORMAT}"]
    parts += [solutions, _RULER_SCORES, _RULER_END.format(count=count)]
    system = {"role": "system", "content": _RULER_SYSTEM.format(count=count)}
    return [system, {"role": "user", "content": between.join(parts)}]


def ruler_scores(verdict: str, count: int) -> list[float] | None:
    """Return the last list of a verdict, as ``count`` scores from 0 to 1; a number outside of this range becomes the
    nearer bound. None without such a list.
    """
    text = verdict[-MAX_VERDICT:]
    start, end = text.rfind("["), text.rfind("]")
    if start < 0 or end < start:
        return None
    try:
        values = ast.literal_eval(text[start : end + 1])
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        return None
    return [max(0.0, min(1.0, value)) for value in values]


def rubric_messages(question: str, response: str, rubric: Sequence[Any]) -> Messages:
    """Return the messages that ask a judge to rate one answer.

    Args:
        question: The task.
        response: The answer.
        rubric: Maps with ``weight`` and ``description``.
    """
    lines = [
        f"Rubric {number} (weight: {criterion['weight']}): {criterion['description']}"
        for number, criterion in enumerate(rubric)
    ]
    rubrics = "\n".join(lines) or "Rubrics are not provided."
    user = _RUBRIC_USER.format(question=question, response=response, rubrics=rubrics)
    return [{"role": "system", "content": _RUBRIC_SYSTEM}, {"role": "user", "content": user}]


def rubric_rating(verdict: str) -> float | None:
    """Return a tenth of the rating in the first code block of a verdict, so 0.1 to 1; None without a rating."""
    mark = "```json" if "```json" in verdict else "```"
    _, opened, rest = verdict.partition(mark)
    block, closed, _ = rest.partition("```")
    if not opened or not closed:
        return None
    try:
        rating = json.loads(block.strip()).get("rating")
    except (ValueError, RecursionError, AttributeError):
        return None
    return rating * 0.1 if isinstance(rating, int | float) and 1 <= rating <= 10 else None


class JudgedArguments(Arguments):
    """``workflow_args`` of a workflow with a judge."""

    judge: Which = 0
    """The auxiliary model that judges: its name, or its position from 0."""


class _JudgedWorkflow(SimpleWorkflow):
    """A workflow that asks an auxiliary model about the answers of the policy."""

    arguments_kind: ClassVar[type[JudgedArguments]] = JudgedArguments
    _judge_sampling: ClassVar[dict[str, Any]] = {}

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._choose_judge(task)

    def _choose_judge(self, task: Task) -> None:
        """Find the judge of ``task``.

        Raises:
            TaskError: The run does not have this model.
        """
        self._judge_place = auxiliary_index(self, arguments_of(task, self.arguments_kind).judge, JUDGE)

    async def _verdict(self, messages: Messages) -> str:
        """Return the judge's answer.

        Raises:
            AuxiliaryError: The judge cannot be reached.
        """
        return await judge_answer(self, self._judge_place, messages, stream=False, **self._judge_sampling)


class MathRULERWorkflow(_JudgedWorkflow):
    """Math problems whose answers a judge compares. The rewards of a slice are the judge's scores, or 0 if they cannot
    be read; the rule reward is the metric ``gold_reward``.
    """

    _default_reward_fn = "math_reward"
    system_prompt = Replaceable(tags_prompt)

    async def _dual_body(self) -> list[Experience]:
        """Ask the model, then the judge; return one experience with a reward for each run."""
        responses = await self._with_rewards(await self._asked_responses())
        texts = [response.response_text or "" for response in responses]
        verdict = await self._verdict(ruler_messages(question_of(self), texts, "\n\n"))
        scores = ruler_scores(verdict, len(responses))
        for response, score in zip(responses, scores or [0.0] * len(responses), strict=True):
            response.metrics.update(gold_reward=response.reward or 0.0, judge_success=float(scores is not None))
            response.reward = score
        return responses


class AsyncMathRULERWorkflow(MathRULERWorkflow):
    """:class:`MathRULERWorkflow` on the event loop."""

    is_async = True


class MathTrainableRULERWorkflow(SimpleWorkflow):
    """:class:`MathRULERWorkflow` with the policy as judge.

    For a fifth of the tasks the answers get the rule reward. As many verdicts as answers are then sampled and rewarded
    by their closeness to the rule rewards. The task id of a verdict ends with ``-ruler``. For the other tasks one
    verdict gives the rewards.
    """

    _default_reward_fn = "math_reward"
    system_prompt = Replaceable(tags_prompt)

    async def _dual_body(self) -> list[Experience]:
        """Ask for answers, then for verdicts; return the answers, and the verdicts if the truth is used."""
        choice = random.Random(f"{self.task.batch_id} {self.task.task_id} {question_of(self)}")
        uses_truth = choice.random() < TRUTH_SHARE
        answers = await self._with_rewards(await self._asked_responses())
        gold = [answer.reward or 0.0 for answer in answers]
        messages = ruler_messages(question_of(self), [answer.response_text or "" for answer in answers], "\n")
        sampling = {**self.task.rollout_args, "n": self.repeat_times if uses_truth else 1}
        verdicts: list[Experience] = await call(self.is_async, self.model, "chat", messages, **sampling)
        scores = [ruler_scores(verdict.response_text or "", len(answers)) for verdict in verdicts]
        usable = [score_list for score_list in scores if score_list is not None]
        success = len(usable) / len(verdicts) if verdicts else 0.0
        means = [sum(column) / len(usable) for column in zip(*usable, strict=True)] or [0.0] * len(answers)
        for answer, reward, mean in zip(answers, gold, means, strict=True):
            answer.metrics.update(gold_reward=reward, judge_success=success)
            answer.reward = reward if uses_truth else mean
            answer.eid.task = str(self.task.task_id)
        if not uses_truth:
            return answers
        for verdict, score_list in zip(verdicts, scores, strict=True):
            verdict.reward = 0.0 if score_list is None else 1.0 - _distance(score_list, gold)
            verdict.metrics.update(judge_success=success, reward_for_judge=verdict.reward)
            verdict.eid.task = f"{self.task.task_id}-ruler"
        return [*answers, *self._numbered_responses(verdicts)]


class AsyncMathTrainableRULERWorkflow(MathTrainableRULERWorkflow):
    """:class:`MathTrainableRULERWorkflow` on the event loop."""

    is_async = True


def _distance(scores: Sequence[float], gold: Sequence[float]) -> float:
    """Return the mean distance between scores and rule rewards, which are scaled to 0 to 1."""
    scaled = [(reward - WORST_REWARD) / (BEST_REWARD - WORST_REWARD) for reward in gold]
    return sum(abs(score - target) for score, target in zip(scores, scaled, strict=True)) / len(gold)


class RubricJudgeWorkflow(_JudgedWorkflow):
    """A judge rates each answer from 1 to 10 by the ``rubric`` of the record, a list of maps with ``description`` and
    ``weight``. The reward is a tenth of the rating, or 0 if it cannot be read.
    """

    _judge_sampling: ClassVar[dict[str, Any]] = {"temperature": 0.0}

    def reset(self, task: Task) -> None:
        """Prepare the workflow for ``task``.

        Raises:
            TaskError: The rubric is not a list of maps with ``weight`` and ``description``.
        """
        super().reset(task)
        self._rubric = task.raw_task.get("rubric") or []
        items = self._rubric if isinstance(self._rubric, list) else [None]
        if not all(isinstance(item, dict) and {"weight", "description"} <= item.keys() for item in items):
            raise TaskError(
                f"raw_task['rubric'] is {self._rubric!r:.80}, wanted a list of maps with weight and description"
            )

    @Replaceable
    def system_prompt(self) -> str | None:
        """The system prompt of the taskset, else :data:`RUBRIC_PROMPT`."""
        system: str | None = self.format_args.system_prompt
        return RUBRIC_PROMPT if system is None else system

    async def _dual_body(self) -> list[Experience]:
        """Ask the model, then the judge; return one experience with a reward for each run."""
        responses = await self._asked_responses()
        question = question_of(self)
        requests = [rubric_messages(question, response.response_text or "", self._rubric) for response in responses]
        verdicts = await gather(self.is_async, (self._verdict(messages) for messages in requests))
        ratings = [rubric_rating(verdict) for verdict in verdicts]
        success = sum(rating is not None for rating in ratings) / len(ratings) if ratings else 0.0
        for response, rating in zip(responses, ratings, strict=True):
            response.reward = rating or 0.0
            response.metrics["judge_success"] = success
        return self._numbered_responses(responses)


class AsyncRubricJudgeWorkflow(RubricJudgeWorkflow):
    """:class:`RubricJudgeWorkflow` on the event loop; all responses are judged concurrently."""

    is_async = True


class OutsideJudgeArguments(JudgedArguments):
    """``workflow_args`` of a judge behind an OpenAI API, which is not one of ``explorer.auxiliary_models``; ``judge``
    has no effect.
    """

    judge_model_name: str = Field(min_length=1)
    judge_api_base_url_env: str = "OPENAI_BASE_URL"
    """Environment variable of runners with the address of the API."""
    judge_api_key_env: str = "OPENAI_API_KEY"
    """Environment variable of runners with the key of the API."""


class RubricJudgeWorkflowWithAPI(RubricJudgeWorkflow):
    """:class:`RubricJudgeWorkflow` with a judge whose address and key are environment variables of the runners."""

    arguments_kind = OutsideJudgeArguments

    def _choose_judge(self, task: Task) -> None:
        self._judge_arguments = arguments_of(task, OutsideJudgeArguments)
        variable = self._judge_arguments.judge_api_base_url_env
        self._judge_address = os.environ.get(variable, "")
        if not self._judge_address:
            raise TaskError(
                f"the judge's address is not known: the variable {variable} of the runner is not set; set it in "
                "runner.env, or add the judge to explorer.auxiliary_models and use rubric_judge_workflow"
            )

    async def _verdict(self, messages: Messages) -> str:
        import openai

        arguments = self._judge_arguments
        address, key = self._judge_address, os.environ.get(arguments.judge_api_key_env, "")
        request = {"model": arguments.judge_model_name, "messages": messages, **self._judge_sampling}
        try:
            if self.is_async:
                async with openai.AsyncOpenAI(base_url=address, api_key=key) as asynchronous:
                    return completion_text(await asynchronous.chat.completions.create(**request))
            with openai.OpenAI(base_url=address, api_key=key) as client:
                return completion_text(client.chat.completions.create(**request))
        except openai.OpenAIError as error:
            raise AuxiliaryError(
                f"the judge {arguments.judge_model_name!r} at {address} cannot be asked: "
                f"{type(error).__name__}: {error}"
            ) from None


class AsyncRubricJudgeWorkflowWithAPI(RubricJudgeWorkflowWithAPI):
    """:class:`RubricJudgeWorkflowWithAPI` on the event loop; all responses are judged concurrently."""

    is_async = True
