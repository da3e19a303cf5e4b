"""Shows the answers to evaluation questions, which are stored in a run's folder: on the command line
(``trinity-mq inspect --evaluation``), and on the page.

The page compares the evaluations of a set: for each question it shows the mean reward and the answers at each label.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trinity_mq.errors import CommandError
from trinity_mq.targets.target import find_configuration
from trinity_mq.telemetry.evaluations.log import EVALUATIONS_FOLDER, Evaluation, EvaluationQuestion, read_evaluations

PREVIEW = 96
"""Maximum characters of a question shown in the table."""


def show_evaluations(arguments: argparse.Namespace) -> int:
    """Print the stored answers by question, for the last evaluation of each set, or of the set in ``--evaluation``, or
    for the evaluation at ``--step``. Return 0, or 1 if no question was printed.

    Raises:
        CommandError: The run's folder is not on this machine, or its evaluations cannot be read.
    """
    config = find_configuration(arguments.target, arguments.overrides)
    if config is None or not config.path.is_dir():
        raise CommandError(f"answers to evaluations are in the run's folder; {arguments.target!r} has none here")
    try:
        evaluations = read_evaluations(config.path)
    except OSError as error:
        raise CommandError(f"{config.path / EVALUATIONS_FOLDER} cannot be read: {error.strerror or error}") from error
    chosen = select_evaluations(evaluations, arguments.evaluation, arguments.step)
    rows = [
        (evaluation, question)
        for evaluation in chosen
        for question in evaluation.questions
        if _fits(question, arguments.task)
    ]
    shown = rows[-arguments.limit :] if arguments.last else rows[: arguments.limit]
    for evaluation, question in shown:
        _print(evaluation, question, as_json=arguments.json)
    _note_rest(arguments, evaluations, len(rows), len(shown))
    return 0 if shown else 1


def select_evaluations(evaluations: Sequence[Evaluation], name: str, step: str | None) -> list[Evaluation]:
    """Return the evaluations of a set, or of all sets if ``name`` is empty: the evaluations at ``step``, or the last
    evaluation per set if ``step`` is None.
    """
    fits = [
        evaluation
        for evaluation in evaluations
        if name in {"", evaluation.set} and (step is None or str(evaluation.label) == step)
    ]
    return fits if step is not None else list({evaluation.set: evaluation for evaluation in fits}.values())


def _fits(question: EvaluationQuestion, task: str | None) -> bool:
    return task is None or str(question.task) == task


def _print(evaluation: Evaluation, question: EvaluationQuestion, *, as_json: bool) -> None:
    from trinity_mq.observability.experiences.show_experience import line, open_console, print_title
    from trinity_mq.telemetry.jsonline import dump_line

    if as_json:
        header = {"set": evaluation.set, "label": evaluation.label, "time": evaluation.time}
        print(dump_line({**header, **question.model_dump()}), flush=True)
        return
    console = open_console(sys.stdout)
    print_title(console, f"{evaluation.set} at {evaluation.label}, question {question.task}", "cyan")
    line(console, "asked", question.question)
    line(console, "expected", "unknown" if question.expected is None else question.expected)
    for answer in question.answers:
        reward = "none" if answer.reward is None else f"{answer.reward:g}"
        line(
            console, f"run {answer.run}", f"reward {reward}: {'(not kept)' if answer.answer is None else answer.answer}"
        )
    if question.failure is not None:
        line(console, "failure", question.failure)


def _note_rest(arguments: argparse.Namespace, evaluations: Sequence[Evaluation], matching: int, shown: int) -> None:
    """Print on stderr how many questions are not shown, or why no question is shown."""
    if 0 < shown == matching:
        return
    if shown:
        remark = f"{shown} of {matching} questions shown (--limit, --last, --task, --step)"
    elif evaluations:
        remark = (
            "no question matches; answers are kept of: "
            f"{', '.join(f'{evaluation.set} at {evaluation.label}' for evaluation in evaluations)}"
        )
    else:
        remark = "the run keeps no answers: none of its evaluations has ended, or monitor.eval_answers_max_bytes is 0"
    print(remark, file=sys.stderr, flush=True)


def evaluation_sets(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the evaluation sets with their labels and questions. Each question has its mean reward at each label; None
    where no answer has a reward.
    """
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
    """Return question ``task`` of the set ``name`` with its answers, once per label at which the question was asked."""
    return [
        {"label": evaluation.label, "time": evaluation.time, **question.model_dump(exclude={"task"})}
        for evaluation in evaluations
        if evaluation.set == name
        for question in evaluation.questions
        if question.task == task
    ]
