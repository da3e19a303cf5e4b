"""The trace of each batch as a tree: the batch, its phases and tasks, and below them the spans that processes recorded.

No I/O. Recorded spans go in, in any order, and spans with ids and parents come out. Recorded spans come out
immediately. The spans of a batch, a phase and a task last from their first to their last recorded span, so they come
out when the batch is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.roles import row_of
from trinity_mq.telemetry.trace import TraceSpan
from trinity_mq.telemetry.trace_ids import VERSION, Sampled, batch_span, phase_span, recorded_span, task_span, trace_id

SETTLED_SECONDS = 15.0
"""Seconds without a new span after which a batch with a weight version counts as over."""
FORGOTTEN_SECONDS = 1800.0
"""Seconds without a new span after which other batches count as over: evaluations, and batches that were not trained
on.
"""
MOST_KNOWN = 1000
"""Maximum number of remembered finished batches."""

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """A span of a batch's trace."""

    trace: str
    id: str
    parent: str
    """Parent span id. Empty for the root."""
    name: str
    start: float
    """Start time in seconds since the epoch. ``end`` has the same unit."""
    end: float
    role: str
    agent: str
    attributes: Mapping[str, Attribute]


@dataclass(slots=True)
class _Batch:
    """The trace of an unfinished batch. ``phases`` and ``tasks`` hold the (first, last) time of each phase and task, in
    seconds since the epoch. ``version`` is the weight version that the batch made; empty: unknown.
    """

    phases: dict[str, list[float]] = field(default_factory=dict)
    tasks: dict[str, list[float]] = field(default_factory=dict)
    version: str = ""

    @property
    def end(self) -> float:
        return max(end for _, end in self.phases.values())


class TraceTree:
    """The traces of a run's batches.

    Args:
        run: Name of the run, an attribute of every span.
        key: Trace key of the run.
        sample: Fraction of the batches that are exported.
        state: :attr:`state` of an earlier tree. None: start empty.

    Raises:
        ValueError: The state is not valid. TypeError, KeyError and AttributeError have the same meaning.
    """

    def __init__(self, run: str, key: str, sample: float = 1.0, state: Mapping[str, Any] | None = None) -> None:
        self._run, self._key, self._sampled = run, key, Sampled(key, sample)
        memory = state or {}
        self._open = {name: _Batch(**batch) for name, batch in memory.get("open", {}).items()}
        self._finished: dict[str, None] = dict.fromkeys(memory.get("over", ()))
        self._now = float(memory.get("now", 0.0))
        """The latest end of a span, in seconds since the epoch."""

    @property
    def state(self) -> dict[str, Any]:
        """The tree's memory as JSON-serializable data."""
        return {
            "open": {
                name: {"phases": batch.phases, "tasks": batch.tasks, "version": batch.version}
                for name, batch in self._open.items()
            },
            "over": list(self._finished),
            "now": self._now,
        }

    def add(self, spans: Sequence[TraceSpan]) -> list[TreeSpan]:
        """Process recorded spans, and return the spans to export: these spans, without spans of batches that are not
        sampled, and the summaries of batches that are over.
        """
        exported: list[TreeSpan] = []
        for span in spans:
            self._now = max(self._now, span.end)
            exported.extend(self._export(span))
        return exported + self._summaries(self._settled())

    def finish(self) -> list[TreeSpan]:
        """Return the spans of all unfinished batches, their phases and their tasks, at the end of the run."""
        return self._summaries(list(self._open))

    def _export(self, span: TraceSpan) -> Iterable[TreeSpan]:
        batch = str(span.batch)
        if batch not in self._sampled:
            return
        trace = trace_id(self._key, batch)
        phase: str = "sync" if span.version is not None else row_of(span.role).phase
        parent = phase_span(trace, phase) if span.task is None else task_span(trace, span.task)
        optional: dict[str, Attribute | None] = {
            "tmq.task": span.task,
            "tmq.first_run": span.first_run,
            VERSION: span.version,
            "tmq.cpu_seconds": span.cpu,
            "tmq.bytes": span.bytes or None,
        }
        attributes = {
            **self._attributes(batch),
            "tmq.role": span.role,
            "tmq.agent": span.agent,
            "tmq.wait": span.wait,
            "tmq.count": span.count,
            **{name: value for name, value in optional.items() if value is not None},
            **(span.attributes or {}),
        }
        if batch not in self._finished:
            open_batch = self._open.setdefault(batch, _Batch())
            _extend(open_batch.phases, phase, span)
            if span.task is not None:
                _extend(open_batch.tasks, str(span.task), span)
            open_batch.version = str(attributes.get(VERSION, open_batch.version))
        task = None if span.task is None or span.first_run is None else (span.task, span.first_run)
        span_id = recorded_span(trace, span.agent, span.what, task, span.ticks)
        yield TreeSpan(trace, span_id, parent, span.what, span.start, span.end, span.role, span.agent, attributes)

    def _settled(self) -> list[str]:
        return [
            name
            for name, batch in self._open.items()
            if batch.end < self._now - (SETTLED_SECONDS if batch.version else FORGOTTEN_SECONDS)
        ]

    def _summaries(self, batches: Sequence[str]) -> list[TreeSpan]:
        """Return the spans of finished batches, of their phases and of their tasks."""
        summaries: list[TreeSpan] = []
        for name in batches:
            batch = self._open.pop(name)
            self._finished[name] = None
            trace = trace_id(self._key, name)
            root = batch_span(trace)
            common = self._attributes(name)
            if batch.version:
                common[VERSION] = batch.version
            start = min(first for first, _ in batch.phases.values())
            title = name if name.startswith("weights ") else f"batch {name}"
            summaries.append(TreeSpan(trace, root, "", title, start, batch.end, "run", self._run, common))
            for phase, (first, last) in batch.phases.items():
                summaries.append(
                    TreeSpan(trace, phase_span(trace, phase), root, phase, first, last, "run", self._run, common)
                )
            task_phase = "rollout" if "rollout" in batch.phases else next(iter(batch.phases))
            for task, (first, last) in batch.tasks.items():
                of_task = {**common, "tmq.task": int(task)}
                span_id, parent = task_span(trace, int(task)), phase_span(trace, task_phase)
                summaries.append(
                    TreeSpan(trace, span_id, parent, f"task {task}", first, last, "run", self._run, of_task)
                )
        while len(self._finished) > MOST_KNOWN:
            del self._finished[next(iter(self._finished))]
        return summaries

    def _attributes(self, batch: str) -> dict[str, Attribute]:
        return {"tmq.run": self._run, "tmq.batch": batch}


def _extend(periods: dict[str, list[float]], name: str, span: TraceSpan) -> None:
    first, last = periods.get(name, (span.start, span.end))
    periods[name] = [min(first, span.start), max(last, span.end)]
