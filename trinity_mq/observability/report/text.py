"""The report at the end of a run: learning results, duration, losses and the paths of the outputs."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.config.modes.mode import Mode
from trinity_mq.messages import FailureStatus
from trinity_mq.observability.report.evaluations import evaluation_table
from trinity_mq.observability.report.figures import REWARD, TRAIN_STEPS, evaluations, format_duration
from trinity_mq.observability.timeline import TIMELINE_FILE
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics, sparkline
from trinity_mq.telemetry.group_drops import GROUP_DROPS
from trinity_mq.training.checkpoints.checkpoint import Checkpoint, find_checkpoints

LOST: Mapping[str, str] = {
    "rollout/slices/failed": "slices failed",
    "rollout/slices/poisoned": "slices poisoned",
    "rollout/tasks/left_over": "unfinished tasks of the last batches",
    **{drop.metric: drop.lost for drop in GROUP_DROPS if drop.lost},
    "sample/skipped_step": "steps skipped",
    "data/unfit_records": "records that could not be used",
    "data/too_long": "records too long",
    "actor/skipped_nonfinite_loss": "optimizer steps without a finite loss",
    "actor/skipped_nonfinite_norm": "optimizer steps without a finite gradient",
    "actor/skipped_norm_spike": "optimizer steps with too large a gradient",
    "actor/skipped_mismatch": "optimizer steps on logprobs that are not the trainer's",
    "trainer/damaged_checkpoints": "checkpoints damaged",
}
"""Metrics that count losses (slices, tasks, groups, records, steps, checkpoints), each with its name in reports."""

EVALUATIONS_FILE = "evaluations.csv"
"""File in the folder of a run of mode ``bench`` with the evaluation results of the checkpoints."""
FAILURES_FILE = "failures.json"
"""File in a run's folder with the failures that the explorer reported to the run's supervisor."""

OTHERS = (
    "actor/ce_loss",
    "actor/pair_margin",
    "rollout/accuracy/mean",
    "advantage/kl/mean",
    "actor/pg_loss",
    "actor/entropy",
    "rollout/rollout_vs_train_logprob_diff/mean",
)
"""Fallback metrics for the report: if neither accuracy nor reward changed, the first of these metrics that changed is
shown.
"""

Point = tuple[int, float]


def make_report(run: str, run_dir: Path, mode: Mode = "both") -> str:
    """Return the report on the run folder ``run_dir`` as text of several lines; a single line if it has no metrics."""
    all_lines = read_metrics(run_dir / METRICS_FILE)
    if not all_lines:
        return f"run {run}: no metrics yet in {run_dir / METRICS_FILE}"
    lines = distinct(all_lines)
    results = evaluation_curves(lines)
    rows = [
        ("accuracy", f"{_rise(points)}  {taskset}, steps {points[0][0]} to {points[-1][0]}")
        for taskset, points in sorted(results.items())
    ]
    curves = [*results.values(), metric_curve(lines, REWARD)]
    if curves[-1]:
        rows.append(("reward", _rise(curves[-1])))
    if not any(map(_moved, curves)) and (name := next((n for n in OTHERS if _moved(metric_curve(lines, n))), None)):
        rows.append((name, _rise(metric_curve(lines, name))))
    rows.append(("lost", ", ".join(f"{count} {label}" for label, count in loss_counts(lines).items()) or "nothing"))
    rows += [("failures", failure.line()) for failure in load_failures(run_dir)]
    rows += [(name, text) for name, text in _places(run_dir) if mode != "bench" or name not in {"model", "checkpoint"}]
    steps = max((line["step"] for line in lines if line["role"] == "trainer"), default=0)
    unit = "checkpoint" if mode == "bench" else "step"
    times = [line["time"] for line in all_lines if isinstance(line.get("time"), int | float)]
    took = format_duration(max(times) - min(times)) if times else "an unknown time"
    head = f"run {run}: {steps} {unit}{'' if steps == 1 else 's'}, {took} from first to last"
    return "\n".join([head, *(f"  {name:<11} {text}" for name, text in rows)])


def write_evaluations(run_dir: Path) -> list[str]:
    """Write the table of a run's evaluations as CSV and return it as lines for a person. Without evaluations, write
    nothing and return an empty list.
    """
    table = evaluation_table(distinct(read_metrics(run_dir / METRICS_FILE)))
    if not table.rows:
        return []
    path = run_dir / EVALUATIONS_FILE
    write_atomic(path, table.as_csv().encode())
    return [*table.as_text(), f"the table is in {path}"]


def save_failures(run_dir: Path, failures: Sequence[FailureStatus]) -> None:
    """Store the slice failures that the explorer reported, for reports after the end of the run. Without failures,
    remove the file of an earlier start.
    """
    if failures:
        write_atomic(run_dir / FAILURES_FILE, json.dumps([failure.as_map() for failure in failures], indent=1).encode())
    else:
        (run_dir / FAILURES_FILE).unlink(missing_ok=True)


def load_failures(run_dir: Path) -> list[FailureStatus]:
    """Return the failures stored by :func:`save_failures`, or an empty list if the file is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError):
        return [FailureStatus.model_validate(entry) for entry in json.loads((run_dir / FAILURES_FILE).read_bytes())]
    return []


def train_steps(run_dir: Path) -> int | None:
    """Return the number of train steps that changed the weights, or None if no trainer has reported it."""
    values = [value for _, value in metric_curve(read_metrics(run_dir / METRICS_FILE), TRAIN_STEPS)]
    return round(max(values)) if values else None


def distinct(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one metrics line per role and step, sorted by step. Lines without role or step are skipped.

    Lines of the same role and step are merged, later values override earlier values. Such lines occur because a
    restarted agent repeats steps.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        step, role = line.get("step"), line.get("role")
        if isinstance(step, int) and isinstance(role, str):
            merged.setdefault((role, step), {}).update(line)
    return [merged[key] for key in sorted(merged, key=lambda key: key[1])]


def metric_curve(lines: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return (step, value) pairs of one metric. If several agents report the metric for a step, the last value
    counts.
    """
    return list({line["step"]: float(line[name]) for line in lines if isinstance(line.get(name), int | float)}.items())


def evaluation_curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return (step, result) pairs of each evaluation taskset, by its name."""
    curves: dict[str, list[Point]] = {}
    for line in lines:
        for taskset, value in evaluations(line).items():
            curves.setdefault(taskset, []).append((line["step"], value))
    return curves


def loss_counts(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the non-zero counts of :data:`LOST` by their names in reports."""
    sums = {label: round(sum(value for _, value in metric_curve(lines, name))) for name, label in LOST.items()}
    return {label: count for label, count in sums.items() if count}


def _moved(points: Sequence[Point]) -> bool:
    return len({value for _, value in points if math.isfinite(value)}) > 1


def _rise(points: Sequence[Point]) -> str:
    values = [value for _, value in points]
    return f"{values[0]:.3f} -> {values[-1]:.3f}  {sparkline(values)}"


def _places(run_dir: Path) -> list[tuple[str, str]]:
    tensorboard = shlex.join(["tensorboard", "--logdir", str(run_dir / "tensorboard")])
    final, timeline = run_dir / "final", run_dir / TIMELINE_FILE
    return [
        ("model", f"{final}  (Hugging Face folder)" if final.is_dir() else "none yet"),
        ("checkpoint", str(newest_checkpoint(run_dir) or "none yet")),
        ("metrics", f"{run_dir / METRICS_FILE}, and `{tensorboard}`"),
        *([("experiences", f"{written}  (a file a batch)")] if (written := run_dir / "experiences").is_dir() else []),
        *([("timeline", str(timeline))] if timeline.is_file() else []),
        ("logs", str(run_dir / "logs")),
    ]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint from which a trainer would resume, or None if no checkpoint exists."""
    checkpoints = saved_checkpoints(run_dir)
    return checkpoints[0].path if checkpoints else None


def saved_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the undamaged checkpoints of a run, newest first."""
    folder = run_dir / "checkpoints"
    return find_checkpoints(folder)[0] if folder.is_dir() else []
