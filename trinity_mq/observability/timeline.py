"""Writes the timeline of a run as a trace file."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics
from trinity_mq.telemetry.timeline import chrome_trace, spans

TIMELINE_FILE = "timeline.json"


def write_timeline(folder: Path, out: Path | None = None, steps: tuple[int, int] | None = None) -> Path:
    """Write the timeline of the run in ``folder`` and return the file. ``steps`` limits it to (first, last) batches,
    both included.

    Raises:
        CommandError: The metrics hold no durations, or the file cannot be written.
    """
    metrics, out = folder / METRICS_FILE, out or folder / TIMELINE_FILE
    all_spans = spans(read_metrics(metrics))
    chosen = [span for span in all_spans if steps is None or steps[0] <= span.step <= steps[1]]
    if not chosen:
        missing = (
            f"no batch from {steps[0]} to {steps[1]}" if steps and all_spans else "no line with the duration of a batch"
        )
        raise CommandError(
            f"{metrics} has {missing}: nothing to show; wait for the run's first batch, or look into the file"
        )
    try:
        write_atomic(out, chrome_trace(chosen).encode())
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror or error}; give --out another place") from error
    return out
