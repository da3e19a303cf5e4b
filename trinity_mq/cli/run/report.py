"""The report at the end of a run: what was learnt, what it took, where things are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity_mq.cli.commands.timeline import TIMELINE_FILE
from trinity_mq.cli.run.metric_names import REWARD, Point, curve, distinct, duration, evaluation_curves, lost
from trinity_mq.telemetry import METRICS_FILE, read_metrics, sparkline


def make_report(run: str, run_dir: Path) -> str:
    """Return the report on what ``run_dir`` holds, several lines of text."""
    every = read_metrics(run_dir / METRICS_FILE)
    if not every:
        return f"run {run}: no metrics yet in {run_dir / METRICS_FILE}"
    lines = distinct(every)
    rows: list[tuple[str, str]] = []
    for taskset, points in sorted(evaluation_curves(lines).items()):
        rows.append(("accuracy", f"{_rise(points)}  {taskset}, steps {points[0][0]} to {points[-1][0]}"))
    rewards = curve(lines, REWARD)
    if rewards:
        rows.append(("reward", _rise(rewards)))
    rows.append(("lost", ", ".join(f"{count} {words}" for words, count in lost(lines).items()) or "nothing"))
    rows += _places(run_dir)
    steps = max((line["step"] for line in lines if line["role"] == "trainer"), default=0)
    head = f"run {run}: {steps} step{'' if steps == 1 else 's'}, {_time(every)} from first to last"
    return "\n".join([head, *(f"  {name:<12}{text}" for name, text in rows)])


def _rise(points: Sequence[Point]) -> str:
    values = [value for _, value in points]
    return f"{values[0]:.3f} -> {values[-1]:.3f}  {sparkline(values)}"


def _time(lines: Sequence[dict[str, Any]]) -> str:
    times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
    return duration(max(times) - min(times)) if times else "an unknown time"


def _places(run_dir: Path) -> list[tuple[str, str]]:
    final = run_dir / "final"
    newest = newest_checkpoint(run_dir)
    return [
        ("model", f"{final}  (Hugging Face folder)" if final.is_dir() else "none yet"),
        ("checkpoint", str(newest) if newest else "none yet"),
        ("metrics", f"{run_dir / METRICS_FILE}, and `tensorboard --logdir {run_dir / 'tensorboard'}`"),
        *([("timeline", str(picture))] if (picture := run_dir / TIMELINE_FILE).is_file() else []),
        ("logs", str(run_dir / "logs")),
    ]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint written last, None where there is none. Names that begin with a dot are unfinished ones."""
    folder = run_dir / "checkpoints"
    found = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
