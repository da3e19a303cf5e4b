"""Computes metrics, task statuses, submission outcomes and evaluation answers from a ticket. No I/O.

:class:`Failures` counts the failures of slices by kind, for the explorer's heartbeats.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

from trinity_mq.config import FormatConfig
from trinity_mq.dispatch.tickets import SubmissionRef, Ticket
from trinity_mq.messages import FAILURE_KINDS, FailureStatus, Outcome, SubmissionOutcome, TaskBody, TaskResult
from trinity_mq.rewards import ACCURACY
from trinity_mq.rewards.ground_truth import expected_answer, truncate_middle, truth_text
from trinity_mq.rollout.failures import failure_key
from trinity_mq.rollout.status import Status
from trinity_mq.telemetry import (
    aggregate_eval_runs,
    aggregate_eval_tasks,
    aggregate_runs,
    aggregate_tasks,
    mask_passwords,
)
from trinity_mq.telemetry.evaluations.log import EvaluationAnswer, EvaluationQuestion

OUTCOMES = tuple(outcome for outcome in get_args(Outcome) if outcome != "late")
"""Outcomes of slices of open tickets. *late* is missing: it is the outcome of an attempt whose ticket is already
closed.
"""
FAILED = {"failed", "partial", "poisoned"}
"""Outcomes that ``rollout/failures/*`` count. Exception: *partial* does not count if the batch was cut off."""
_KEYS = FormatConfig().as_args()
MAX_QUESTION = 2000
"""Maximum characters of a question in the evaluation log. The middle of a longer question is removed."""

MAX_KINDS = 16
"""Maximum number of distinct kinds of failure. Further kinds are counted together as the last kind."""
MAX_LISTED = 4
"""Maximum number of kinds of failure in a heartbeat."""
MAX_TEXT, MAX_TAIL = 300, 80
"""Maximum characters of a failure text in a heartbeat. A longer text keeps its last ``MAX_TAIL`` characters, because
its end names the file and the line of the failure.
"""
OTHERS = "other failures; each agent's log has them"


def rollout_metrics(ticket: Ticket, *, late: int = 0) -> dict[str, float]:
    """Return the ``rollout/*`` metrics of a training ticket: metrics of its runs aggregated by task and then over
    tasks, and the counts of outcomes and of failures by kind.

    ``late`` is the number of late results since the previous batch was closed. If only whole tasks count, the runs of
    tasks that were cut off are left out of the means and of the numbers of finished tasks and runs.
    """
    results = ticket.results
    cut_off = {result.task_id for result in results if result.outcome == "cancelled" and ticket.whole_tasks_only}
    counted = [result for result in results if result.task_id not in cut_off]
    metrics = aggregate_tasks([aggregate_runs(runs) for runs in _runs_by_task(counted).values()], "rollout")
    for outcome in OUTCOMES:
        metrics[f"rollout/slices/{outcome}"] = float(sum(result.outcome == outcome for result in results))
    failed = [r for r in results if r.outcome in FAILED and (r.outcome != "partial" or ticket.grace is None)]
    kinds = Counter(result.failure_kind or "unknown" for result in failed)
    for kind in {*FAILURE_KINDS, *kinds}:
        metrics[f"rollout/failures/{kind}"] = float(kinds[kind])
    metrics["rollout/slices/duplicate"] = float(ticket.duplicates)
    metrics["rollout/slices/late"] = float(late)
    metrics["rollout/slices/given_back"] = float(sum(result.returned for result in results))
    return metrics | _counts(counted, "rollout")


def taskset_metrics(ticket: Ticket) -> dict[str, float]:
    """Return ``rollout/taskset/<taskset>/*`` of a training ticket: the number of tasks of each taskset, and their mean
    reward. The reward leaves out tasks that were cut off if only whole tasks count, and is missing if no task has a
    reward.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    counts = Counter(task.index["taskset"] for task in ticket.tasks if isinstance(task.index.get("taskset"), str))
    for task_id, task in enumerate(ticket.tasks):
        name = str(task.index.get("taskset"))
        if name not in counts or (ticket.whole_tasks_only and ticket.was_cut_off(task_id)):
            continue
        runs = [run for result in ticket.results_of(task_id) for run in result.metrics]
        if math.isfinite(reward := aggregate_runs(runs).get("reward", math.nan)):
            rewards[name].append(reward)
    metrics = {f"rollout/taskset/{name}/tasks": float(count) for name, count in counts.items()}
    return metrics | {
        f"rollout/taskset/{name}/reward": math.fsum(taskset_rewards) / len(taskset_rewards)
        for name, taskset_rewards in rewards.items()
    }


def eval_metrics(ticket: Ticket, name: str, *, detailed: bool = False) -> dict[str, float]:
    """Return the ``eval/<name>/*`` metrics of an evaluation ticket, including the weight versions that served it.

    A run that did not finish has no metrics, so it counts only in ``failed_runs``. ``finished_task_count`` is the
    number of tasks with at least one finished run.

    Args:
        ticket: Ticket with an outcome for every slice.
        name: Name of the evaluation set.
        detailed: Value of ``monitor.detailed_stats``.
    """
    prefix, results = f"eval/{name}", ticket.results
    tasks = [aggregate_eval_runs(runs) for runs in _runs_by_task(results).values()]
    metrics = aggregate_eval_tasks(tasks, prefix, detailed=detailed) | _counts(results, prefix)
    total = sum(task_slice.repeat_times for task_slice in ticket.slices)
    metrics[f"{prefix}/failed_runs"] = total - metrics[f"{prefix}/finished_runs"]
    lows = [result.version_min for result in results if result.version_min]
    highs = [result.version_max for result in results if result.version_max]
    if lows and highs:
        metrics[f"{prefix}/version/min"] = float(min(lows)[1])
        metrics[f"{prefix}/version/max"] = float(max(highs)[1])
    return metrics


def task_status(results: Sequence[TaskResult]) -> Status:
    """Return the status of a task from the outcomes of its slices."""
    runs = [metrics for result in results for metrics in result.metrics]
    completed = sum(len(result.runs) for result in results)
    total = sum(result.repeat_times for result in results)
    message = next((result.message for result in results if result.message), None)
    latest_first = dict.fromkeys(result.runner for result in reversed(results) if result.runner)
    return Status(
        ok=completed == total,
        metric=aggregate_runs(runs),
        message=message,
        completed_runs=completed,
        total_runs=total,
        metrics=runs,
        runners=list(reversed(latest_first)),
    )


def submission_outcome(ticket: Ticket, submission: SubmissionRef) -> SubmissionOutcome:
    """Return the outcome of a submitted task, in the form sent to its submitter."""
    results = ticket.results_of(submission.task_id)
    status = task_status(results)
    decisive = next((r.outcome for r in results if r.outcome != "finished"), "finished") if results else "cancelled"
    if decisive != "finished" and status.completed_runs:
        decisive = "partial"
    return SubmissionOutcome(
        submission_id=submission.submission_id,
        batch=ticket.batch,
        ticket=ticket.ticket,
        outcome=decisive,
        completed_runs=status.completed_runs,
        total_runs=status.total_runs,
        metrics=status.metric,
        message=status.message,
        experiences=sum(r.parts for r in results if ticket.counts(r))
        if submission.want_experiences and ticket.deliver == "pipeline"
        else 0,
    )


def _runs_by_task(results: Sequence[TaskResult]) -> Mapping[int, list[Mapping[str, float]]]:
    """Return the metrics of the finished runs of each task, and the seconds that a runner worked on each of its
    slices.
    """
    metrics_by_task: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for result in results:
        metrics_by_task[result.task_id] += result.metrics
        if result.attempt:  # slices without an attempt never reached a runner
            metrics_by_task[result.task_id].append({"time/task_execution": result.seconds})
    return metrics_by_task


def _counts(results: Sequence[TaskResult], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/finished_task_count": float(len({result.task_id for result in results if result.runs})),
        f"{prefix}/finished_runs": float(sum(len(result.runs) for result in results)),
    }


def evaluation_questions(ticket: Ticket) -> list[EvaluationQuestion]:
    """Return the questions of an evaluation in the order of its set, each with the answers of its finished runs."""
    return [_question(number, body, ticket.results_of(number)) for number, body in enumerate(ticket.tasks)]


def _question(number: int, body: TaskBody, results: list[TaskResult]) -> EvaluationQuestion:
    keys = {**_KEYS, **body.format_args}
    prompt = body.raw_task.get(keys["prompt_key"], body.raw_task)
    return EvaluationQuestion(
        task=number,
        question=truncate_middle(truth_text(prompt) or "", MAX_QUESTION),
        expected=expected_answer(body.raw_task.get(keys["response_key"])),
        answers=[answer for result in results for answer in _answers(result)],
        failure=next((result.message for result in results if result.message), None),
    )


def _answers(result: TaskResult) -> list[EvaluationAnswer]:
    texts = [*result.answers, *[None] * len(result.runs)]
    return [
        EvaluationAnswer(run=run, answer=text, reward=metrics.get("reward"), accuracy=metrics.get(ACCURACY))
        for run, text, metrics in zip(result.runs, texts, result.metrics, strict=False)
    ]


class Failures:
    """Counts failed slices and slices with a failure message, by kind of failure."""

    def __init__(self) -> None:
        self._kinds: dict[str, FailureStatus] = {}

    def add_ended(self, ticket: Ticket) -> None:
        """Count the failures of a ticket that is pinned to a weight version, once it will not be repeated. Do nothing
        for other tickets, whose failures were counted by :meth:`add`.
        """
        for result in ticket.results if ticket.pinned is not None else ():
            self.add(ticket, result, ended=True)

    def add(self, ticket: Ticket, result: TaskResult, *, ended: bool = False) -> None:
        """Count the failure that the result of a slice reports, if any. Cancelled slices do not count, nor do results
        that arrive after their ticket was cut off.

        The failures of a pinned ticket are counted by :meth:`add_ended` (with ``ended``), because its slices are
        repeated if the engines load the next version before the slices have run.
        """
        if ticket.pinned is not None and not ended:
            return
        # a pinned ticket has no grace time: all its other results arrived before it was cut off
        cut_off = result.outcome in {"cancelled", "late"} or (ticket.grace is not None and not ended)
        failed = result.outcome != "finished"
        if cut_off or not (failed or result.message):
            return
        text = _shortened(result.message or f"slice {result.outcome}")
        key = failure_key(text)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS - 1:
            key = text = OTHERS
        status = self._kinds.get(key) or FailureStatus(text=text, first=_task(ticket, result))
        self._kinds[key] = status.model_copy(update={"count": status.count + 1, "failed": status.failed + failed})

    def listed(self) -> list[FailureStatus]:
        """Return the most frequent kinds, at most :data:`MAX_LISTED`."""
        return sorted(self._kinds.values(), key=lambda kind: -kind.count)[:MAX_LISTED]

    def summary(self) -> str:
        """Return the most frequent kind of failure in a sentence. The result is empty if no failure was counted."""
        return kinds[0].line() if (kinds := self.listed()) else ""


def _task(ticket: Ticket, result: TaskResult) -> str:
    index = ticket.tasks[result.task_id - ticket.first_task].index
    record = f" (record {index['index']} of {index['taskset']})" if {"taskset", "index"} <= index.keys() else ""
    return f"task {result.task_id} of batch {result.batch}{record}"


def _shortened(text: str) -> str:
    text = mask_passwords(" ".join(text.split()))
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - MAX_TAIL]} ... {text[-MAX_TAIL:]}"
