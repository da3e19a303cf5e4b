"""Timeline of a run, read from its metrics and written as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from trinity_mq.errors import CommandError
from trinity_mq.runtime.process import write_atomic
from trinity_mq.telemetry import METRICS_FILE, read_metrics

TIMELINE_FILE = "timeline.json"
Activity = Literal["explore", "eval", "operators", "train", "skip", "sync", "save"]

DURATIONS: Mapping[tuple[str, str], Activity] = {
    ("explorer", "time/explore"): "explore",
    ("explorer", "time/eval"): "eval",
    ("operator", "time/operators"): "operators",
    ("trainer", "time/batch"): "train",
    ("trainer", "time/sync"): "sync",
    ("trainer", "time/save"): "save",
    ("trainer", "time/sync_weight"): "sync",  # names of earlier releases
    ("trainer", "time/save_checkpoint"): "save",
}
"""Activity by role and metric. The metric's value is the activity's duration in seconds. The activity ended when the
metric was written."""
PHASES = ("wait", "pause", "transfer", "apply", "resume")
"""Phases of a sync, given as ``sync/<phase>_ms`` in the same line."""
SLACK = 0.002
"""Seconds by which two spans of a track may overlap, because both are rounded."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of an agent, in seconds since the epoch."""

    agent: str
    role: str
    what: Activity
    step: int
    start: float
    end: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of each known phase, if the activity is a sync; else empty."""


def spans(lines: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the activities in the lines of a metrics file, sorted by start. Other lines are skipped."""
    activities: list[Span] = []
    for line in lines:
        agent, role, step, end = (line.get(name) for name in ("agent", "role", "step", "time"))
        if not (isinstance(agent, str) and isinstance(role, str) and isinstance(step, int) and _is_number(end)):
            continue
        for (owner, name), what in DURATIONS.items():
            seconds = line.get(name)
            if owner != role or not _is_number(seconds) or seconds < 0:
                continue
            activity: Activity = "skip" if what == "train" and line.get("sample/skipped_step") else what
            phases = {phase: line.get(f"sync/{phase}_ms") for phase in PHASES} if what == "sync" else {}
            phase_ms = {phase: float(value) for phase, value in phases.items() if _is_number(value)}
            activities.append(Span(agent, role, activity, step, end - seconds, end, phase_ms))
    return sorted(activities, key=lambda span: (span.start, span.end))


def chrome_trace(every: Iterable[Span]) -> str:
    """Return the spans as a Chrome trace in JSON. Each agent is a process, with enough threads that no span hides
    another span.

    A sync is also shown for each explorer, because its engines take the weights.
    """
    by_agent: dict[str, list[Span]] = {}
    for span in sorted(every, key=lambda span: (span.role, span.agent, span.start, span.end)):
        by_agent.setdefault(span.agent, []).append(span)
    syncs = [span for agent_spans in by_agent.values() for span in agent_spans if span.what == "sync"]
    first = min((agent_spans[0].start for agent_spans in by_agent.values()), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (agent, agent_spans) in enumerate(by_agent.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": agent}})
        process_spans = [*agent_spans, *syncs] if agent_spans[0].role == "explorer" else agent_spans
        for thread, track in enumerate(tracks(process_spans)):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": agent}})
            events += [_event(span, first, process, thread) for span in track]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def tracks(agent_spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of an agent in as few tracks as possible. Spans of a track overlap at most by :data:`SLACK`."""
    layout: list[list[Span]] = []
    for span in sorted(agent_spans, key=lambda span: (span.start, span.end)):
        free = next((track for track in layout if track[-1].end <= span.start + SLACK), None)
        if free is None:
            layout.append([span])
        else:
            free.append(span)
    return layout


def _event(span: Span, first: float, process: int, thread: int) -> dict[str, Any]:
    unit = "progress" if span.role == "trainer" else "batch"
    return {
        "ph": "X",
        "name": f"{span.what} {span.step}",
        "cat": span.what,
        "pid": process,
        "tid": thread,
        "ts": round((span.start - first) * 1e6),
        "dur": round((span.end - span.start) * 1e6),
        "args": {unit: span.step, **{f"{phase}_ms": value for phase, value in span.phases.items()}},
    }


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_timeline(folder: Path, out: Path | None = None, steps: tuple[int, int] | None = None) -> Path:
    """Write the timeline of the run in ``folder`` and return the file.

    Args:
        folder: Folder of the run.
        out: The file. None: ``timeline.json`` in the folder.
        steps: First and last batch to write, both included. None: all batches.

    Raises:
        CommandError: The metrics hold no durations for these batches, or the file cannot be written.
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
