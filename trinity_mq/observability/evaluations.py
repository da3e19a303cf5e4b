"""Evaluation answers as the page shows them: by question, across the labels at which a set was evaluated. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity_mq.telemetry.evaluations.log import Evaluation, EvaluationQuestion

PREVIEW = 96
"""Maximum characters of a question shown in the table."""


def evaluation_sets(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the sets with their labels and questions. Each question has its mean reward at each label."""
    return [
        _set(name, [evaluation for evaluation in evaluations if evaluation.set == name])
        for name in dict.fromkeys(evaluation.set for evaluation in evaluations)
    ]


def _set(name: str, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    by_label = {
        evaluation.label: {question.task: question for question in evaluation.questions} for evaluation in evaluations
    }
    last = {task: question for questions in by_label.values() for task, question in questions.items()}
    rows = [
        {
            "task": task,
            "question": question.question[:PREVIEW],
            "expected": question.expected,
            "rewards": [mean_reward(questions.get(task)) for questions in by_label.values()],
        }
        for task, question in sorted(last.items())
    ]
    return {"set": name, "labels": list(by_label), "questions": rows, "left_out": evaluations[-1].left_out}


def mean_reward(question: EvaluationQuestion | None) -> float | None:
    """Return the mean reward of the answers to a question, or None if no answer has a reward."""
    rewards = (
        [answer.reward for answer in question.answers if answer.reward is not None] if question is not None else []
    )
    return round(sum(rewards) / len(rewards), 6) if rewards else None


def question_history(evaluations: Sequence[Evaluation], name: str, task: int) -> list[dict[str, Any]]:
    """Return a question with its answers, once per label at which it was asked."""
    return [
        {"label": evaluation.label, "time": evaluation.time, **question.model_dump(exclude={"task"})}
        for evaluation in evaluations
        if evaluation.set == name
        for question in evaluation.questions
        if question.task == task
    ]
