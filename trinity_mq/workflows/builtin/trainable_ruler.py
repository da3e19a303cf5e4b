"""RULER with the policy itself as judge. The policy learns to judge on tasks whose ground truth is used.

For a share of the tasks the ground truth is used: the answers get the rule reward, and the policy is asked for as many
verdicts on them as there are runs. Each verdict is rewarded by its closeness to the rule rewards. For all other tasks
the ground truth is treated as unknown: the answers get the scores of one verdict. This is a self-rewarding model (arXiv
2401.10020) whose judge is trained against known answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pydantic import Field, model_validator

from trinity_mq.experience import Experience
from trinity_mq.workflows.arguments import Arguments, arguments_of
from trinity_mq.workflows.builtin.judging import BadVerdictError, answer_of, delimiter_of, has_answer, read_scores
from trinity_mq.workflows.builtin.math import MathAnswerWorkflow
from trinity_mq.workflows.builtin.ruler import RulerArguments, ruler_messages
from trinity_mq.workflows.builtin.simple import question_of
from trinity_mq.workflows.sync_async import call
from trinity_mq.workflows.workflow import Task

JUDGE_GROUP = "judge"
"""Suffix of the group of a task's verdicts. The verdicts are compared with each other and not with the answers."""


class TrainableRulerArguments(Arguments):
    """Arguments of RULER with the policy as judge, in ``workflow_args``."""

    truth_share: float = Field(default=0.2, ge=0, le=1)
    """Share of the tasks whose ground truth is used. The choice is a function of the task."""
    lowest: float = -0.1
    """Rule reward that corresponds to a judge's score of 0."""
    highest: float = 1.1
    """Rule reward that corresponds to a judge's score of 1."""
    criteria: str = ""
    """Further instructions for the judge."""
    max_answer_characters: int = Field(default=8000, ge=100)
    """Maximum characters of an answer shown to the judge."""

    @model_validator(mode="after")
    def _check_bounds(self) -> TrainableRulerArguments:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest:g} and highest {self.highest:g}, wanted lowest below highest")
        return self


class MathTrainableRulerWorkflow(MathAnswerWorkflow):
    """:class:`MathAnswerWorkflow` whose answers are compared by the policy itself, for all runs of a slice at once."""

    arguments_kind = TrainableRulerArguments
    _arguments: TrainableRulerArguments

    def reset(self, task: Task) -> None:
        super().reset(task)
        self._arguments = arguments_of(task, TrainableRulerArguments)

    async def _dual_body(self) -> list[Experience]:
        """Ask for answers, then for verdicts on them; return the answers, and the verdicts if the judge is trained."""
        answers = await self._with_rewards(await self._asked_responses())
        gold = [answer.reward or 0.0 for answer in answers]
        for answer, reward in zip(answers, gold, strict=True):
            answer.metrics["gold_reward"] = reward
        if self.task.is_eval:
            return answers
        uses_truth = random.Random(f"truth {question_of(self)}").random() < self._arguments.truth_share
        verdicts = await self._verdicts(answers, self.repeat_times if uses_truth else 1)
        scores = [_scores(verdict, len(answers)) for verdict in verdicts]
        success = sum(score_list is not None for score_list in scores) / len(scores)
        for answer in answers:
            answer.metrics["judge_success"] = success
        if not uses_truth:
            (answer_scores,) = scores
            for place, answer in enumerate(answers):
                answer.reward = answer_scores[place] if answer_scores is not None and has_answer(answer) else 0.0
            return answers
        for place, (verdict, answer_scores) in enumerate(zip(verdicts, scores, strict=True)):
            verdict.reward = 0.0 if answer_scores is None else 1.0 - self._error(answer_scores, gold)
            verdict.metrics = {"judge_reward": verdict.reward, "judge_success": success}
            verdict.eid.task = f"{self.task.task_id}-{JUDGE_GROUP}"
            verdict.eid.run = self.run_id_base + place
        return [*answers, *verdicts]

    def _error(self, scores: Sequence[float], gold: Sequence[float]) -> float:
        """Return the mean distance between scores and the rule rewards, which are scaled to 0 to 1 first."""
        low, high = self._arguments.lowest, self._arguments.highest
        scaled = [min(max((reward - low) / (high - low), 0.0), 1.0) for reward in gold]
        return sum(abs(score - target) for score, target in zip(scores, scaled, strict=True)) / len(gold)

    async def _verdicts(self, answers: Sequence[Experience], count: int) -> list[Experience]:
        texts = [answer_of(answer) if has_answer(answer) else "" for answer in answers]
        arguments = RulerArguments(
            criteria=self._arguments.criteria, max_answer_characters=self._arguments.max_answer_characters
        )
        question = ruler_messages(question_of(self), texts, delimiter_of(question_of(self), *texts), arguments)
        sampling = {**self.task.rollout_args, "n": count}
        verdicts: list[Experience] = await call(self.is_async, self.model, "chat", question, **sampling)
        return verdicts


def _scores(verdict: Experience, count: int) -> tuple[float, ...] | None:
    try:
        return read_scores(answer_of(verdict), count)
    except BadVerdictError:
        return None


class AsyncMathTrainableRulerWorkflow(MathTrainableRulerWorkflow):
    """:class:`MathTrainableRulerWorkflow` on the event loop."""

    is_async = True
