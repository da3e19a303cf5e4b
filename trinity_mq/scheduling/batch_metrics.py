"""What a ticket says in numbers, as a whole and task by task. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.messages import SubmissionOutcome, TaskResult
from trinity_mq.scheduling.status import Status
from trinity_mq.scheduling.tickets import SubmissionRef, Ticket
from trinity_mq.telemetry import aggregate_eval_runs, aggregate_eval_tasks, aggregate_runs, aggregate_tasks


def rollout_metrics(ticket: Ticket) -> dict[str, float]:
    """Return ``rollout/*`` of a training ticket: its runs' metrics by task, then over tasks, and the counts of
    outcomes.
    """
    tasks = []
    for task_id in range(len(ticket.tasks)):
        runs = [metrics for result in ticket.results_of(task_id) for metrics in result.metrics]
        if runs:
            tasks.append(aggregate_runs(runs))
    metrics = aggregate_tasks(tasks, "rollout") if tasks else {}
    results = [piece.result for piece in ticket.slices if piece.result is not None]
    for outcome in ("finished", "partial", "failed", "cancelled", "poisoned"):
        metrics[f"rollout/slices/{outcome}"] = float(sum(result.outcome == outcome for result in results))
    metrics["rollout/finished_task_count"] = float(len(tasks))
    metrics["rollout/finished_runs"] = float(sum(len(result.runs) for result in results))
    metrics["rollout/duplicate_results"] = float(ticket.duplicates)
    return metrics


def eval_metrics(ticket: Ticket, name: str) -> dict[str, float]:
    """Return ``eval/<name>/*`` of an evaluation ticket, with the versions that served it.

    A run that did not finish has no metrics and so counts in ``failed_runs`` only; ``finished_task_count`` says how
    many tasks the means are over.
    """
    tasks = []
    results = [piece.result for piece in ticket.slices if piece.result is not None]
    for task_id in range(len(ticket.tasks)):
        runs = [metrics for result in ticket.results_of(task_id) for metrics in result.metrics]
        if runs:
            tasks.append(aggregate_eval_runs(runs))
    metrics = aggregate_eval_tasks(tasks, f"eval/{name}") if tasks else {}
    metrics[f"eval/{name}/finished_task_count"] = float(len(tasks))
    total = sum(piece.repeat_times for piece in ticket.slices)
    metrics[f"eval/{name}/failed_runs"] = float(total - sum(len(result.runs) for result in results))
    lows = [result.version_min for result in results if result.version_min]
    highs = [result.version_max for result in results if result.version_max]
    if lows and highs:
        metrics[f"eval/{name}/version/min"] = float(min(lows)[1])
        metrics[f"eval/{name}/version/max"] = float(max(highs)[1])
    return metrics


def task_status(results: Sequence[TaskResult]) -> Status:
    """Return the status of a task from the outcomes of its slices."""
    runs = [metrics for result in results for metrics in result.metrics]
    completed = sum(len(result.runs) for result in results)
    total = sum(result.repeat_times for result in results)
    names = sorted({name for metrics in runs for name in metrics})
    mean = {name: sum(m[name] for m in runs if name in m) / sum(name in m for m in runs) for name in names}
    message = next((result.message for result in results if result.message), None)
    return Status(
        ok=completed == total, metric=mean, message=message, completed_runs=completed, total_runs=total, metrics=runs
    )


def submission_outcome(ticket: Ticket, submission: SubmissionRef) -> SubmissionOutcome:
    """Return what a submitter is told of its task."""
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
        experiences=sum(r.parts for r in results)
        if submission.want_experiences and ticket.deliver == "pipeline"
        else 0,
    )
