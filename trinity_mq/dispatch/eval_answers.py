"""Questions of an evaluation and the answers to them, taken from its ticket. No I/O."""

from __future__ import annotations

from trinity_mq.config import FormatConfig
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.messages import TaskBody, TaskResult
from trinity_mq.rewards import ACCURACY
from trinity_mq.rewards.ground_truth import expected_answer, truncate_middle, truth_text
from trinity_mq.telemetry.evaluations.log import EvaluationAnswer, EvaluationQuestion

MOST_QUESTION = 2000
"""Maximum characters of a question."""


def questions_of(ticket: Ticket) -> list[EvaluationQuestion]:
    """Return the questions of an evaluation in the order of its set, each with the answers of its finished runs."""
    return [_question(number, body, ticket.results_of(number)) for number, body in enumerate(ticket.tasks)]


def _question(number: int, body: TaskBody, results: list[TaskResult]) -> EvaluationQuestion:
    keys = FormatConfig.model_validate(body.format_args)
    prompt = body.raw_task.get(keys.prompt_key, body.raw_task)
    return EvaluationQuestion(
        task=number,
        question=truncate_middle(truth_text(prompt) or "", MOST_QUESTION),
        expected=expected_answer(body.raw_task.get(keys.response_key)),
        answers=[answer for result in results for answer in _answers(result)],
        failure=next((result.message for result in results if result.message), None),
    )


def _answers(result: TaskResult) -> list[EvaluationAnswer]:
    texts = [*result.answers, *[None] * len(result.runs)]
    return [
        EvaluationAnswer(run=run, answer=text, reward=metrics.get("reward"), accuracy=metrics.get(ACCURACY))
        for run, text, metrics in zip(result.runs, texts, result.metrics, strict=False)
    ]
