"""Rows of the list of runs below a folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from trinity_mq.config import ConfigError, load_config
from trinity_mq.observability.report.figures import REWARD, evaluations, format_duration
from trinity_mq.observability.report.text import distinct
from trinity_mq.runtime.process import is_run_over
from trinity_mq.targets.run_folder import CONFIG_FILE, LOCK_FILE, LockedFolder
from trinity_mq.telemetry import METRICS_FILE, read_metrics

COLUMNS = ("name", "state", "step", "accuracy", "reward", "last metric", "folder")


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run of the list."""

    name: str
    state: str
    """``runs``, ``finished`` or ``stopped``. An unfinished run of agents without a supervisor is listed as stopped."""
    step: str
    accuracy: str
    """Result of the first taskset of the last evaluation, as text; ``-`` without evaluations."""
    reward: str
    age: float | None
    """Seconds since the last metrics line. None: no metrics."""


def find_runs(top: Path) -> list[Path]:
    """Return the run folders below ``top``, at any depth, sorted by path."""
    # Agents without ``trinity-mq run`` write metrics but no configuration. A run that has just started has a
    # configuration but no metrics.
    folders = sorted({path.parent for name in (METRICS_FILE, CONFIG_FILE) for path in top.glob(f"**/{name}")})
    return [folder for folder in folders if (folder / METRICS_FILE).exists() or (folder / LOCK_FILE).exists()]


def row(folder: Path) -> RunRow:
    """Return the row of the list for the run in a folder."""
    try:
        config = load_config(folder / CONFIG_FILE)
    except ConfigError:
        config = None
    runs = LockedFolder(folder, LOCK_FILE, "").holder() is not None
    lines = distinct(read_metrics(folder / METRICS_FILE))
    step = max((line["step"] for line in lines if line["role"] == "trainer"), default=0)
    total = None if config is None else config.buffer.total_steps
    results = [value for line in lines for value in list(evaluations(line).values())[:1]]
    rewards = [line[REWARD] for line in lines if isinstance(line.get(REWARD), int | float)]
    times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
    return RunRow(
        name=folder.name if config is None else config.name,
        state="runs" if runs else "finished" if is_run_over(folder) else "stopped",
        step=f"{step}/{'?' if total is None else total}",
        accuracy=f"{results[-1]:.3f}" if results else "-",
        reward=f"{rewards[-1]:.3f}" if rewards else "-",
        age=max(0.0, time.time() - max(times)) if times else None,
    )


def ago(seconds: float | None) -> str:
    """Return an age in seconds as text, ``-`` if the age is unknown."""
    return "-" if seconds is None else f"{format_duration(seconds)} ago"
