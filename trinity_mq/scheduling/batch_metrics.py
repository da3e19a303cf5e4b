"""What a closed ticket says in numbers. Pure."""

from __future__ import annotations

from trinity_mq.scheduling.tickets import Ticket
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
