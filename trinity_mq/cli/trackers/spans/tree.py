"""The trace of each batch as a tree: the batch, its phases and tasks, and below them the spans that processes recorded.

No I/O. Recorded spans go in, in any order, and spans with ids and parents come out. Recorded spans come out
immediately. The spans of a batch, a phase and a task last from their first to their last recorded span, so they come
out when the batch is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trinity_mq.telemetry.trace import TraceSpan
from trinity_mq.telemetry.trace_ids import Sampled, batch_span, phase_span, recorded_span, task_span, trace_id

Phase = Literal["explore", "rollout", "operators", "train", "sync"]
PHASES: Mapping[str, Phase] = {
    "explorer": "explore",
    "scheduler": "explore",
    "runner": "rollout",
    "engine": "rollout",
    "gateway": "rollout",
    "operator": "operators",
    "trainer": "train",
}
"""Phase of the spans recorded for a batch, by role. Spans recorded for a weight version belong to the phase
``sync``.
"""
SETTLED_SECONDS = 15.0
"""Seconds without a new span after which a batch with a weight version counts as over."""
FORGOTTEN_SECONDS = 1800.0
"""Seconds without a new span after which other batches count as over: evaluations, and batches that were not trained
on.
"""
HELD_SECONDS = 600.0
"""Maximum seconds that a sync span waits for the span that links its weight version to a batch."""
MOST_HELD = 5000
"""Maximum number of waiting sync spans, over all syncs."""
MOST_KNOWN = 1000
"""Maximum number of remembered finished batches, and of remembered weight versions."""

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
    """An unfinished batch. ``phases`` and ``tasks`` hold the (first, last) time of each, in seconds since the epoch."""

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
        known = state or {}
        self._open = {name: _Batch(**one) for name, one in known.get("open", {}).items()}
        self._over: dict[str, None] = dict.fromkeys(known.get("over", ()))
        self._made: dict[str, str] = dict(known.get("made", {}))
        """The batch whose train step made a weight version, by version. ``weights <version>``: no batch made the
        version.
        """
        self._held = [TraceSpan(**one) for one in known.get("held", ())]
        self._now = float(known.get("now", 0.0))
        """The latest end of a span, in seconds since the epoch."""

    @property
    def state(self) -> dict[str, Any]:
        """The tree's memory as JSON-serializable data."""
        return {
            "open": {
                name: {"phases": one.phases, "tasks": one.tasks, "version": one.version}
                for name, one in self._open.items()
            },
            "over": list(self._over),
            "made": self._made,
            "held": [{name: getattr(one, name) for name in TraceSpan.__slots__} for one in self._held],
            "now": self._now,
        }

    def add(self, spans: Sequence[TraceSpan]) -> list[TreeSpan]:
        """Return the spans to export after these spans were recorded."""
        found: list[TreeSpan] = []
        for one in spans:
            self._now = max(self._now, one.end)
            if one.version is not None and one.batch is not None:
                self._made[one.version] = str(one.batch)
        held, self._held = self._held, []
        for one in (*held, *spans):
            batch = self._batch_of(one)
            if batch is not None:
                found.extend(self._recorded(one, batch))
            else:
                self._held.append(one)
        return found + self._summaries(self._settled())

    def finish(self) -> list[TreeSpan]:
        """Return the held spans and the summaries of unfinished batches, at the end of the run."""
        held, self._held = self._held, []
        found = [span for one in held for span in self._recorded(one, self._own_trace(one))]
        return found + self._summaries(list(self._open))

    def _batch_of(self, one: TraceSpan) -> str | None:
        """Return the batch of a span, or None if the batch is not known yet."""
        if one.batch is not None:
            return str(one.batch)
        made = self._made.get(one.version or "")
        if made is None and (one.end < self._now - HELD_SECONDS or len(self._held) >= MOST_HELD):
            return self._own_trace(one)
        return made

    def _own_trace(self, one: TraceSpan) -> str:
        """Return the name of the separate trace for a weight version that no batch made, such as the initial
        version.
        """
        return self._made.setdefault(one.version or "", f"weights {one.version}")

    def _recorded(self, one: TraceSpan, batch: str) -> Iterable[TreeSpan]:
        if batch not in self._sampled:
            return
        trace = trace_id(self._key, batch)
        phase: str = "sync" if one.batch is None else PHASES.get(one.role, "rollout")
        if batch not in self._over:
            known = self._open.setdefault(batch, _Batch())
            _extend(known.phases, phase, one)
            if one.task is not None:
                _extend(known.tasks, str(one.task), one)
            known.version = one.version or known.version
        parent = phase_span(trace, phase) if one.task is None else task_span(trace, one.task)
        optional: dict[str, Attribute | None] = {
            "tmq.task": one.task,
            "tmq.first_run": one.first_run,
            "tmq.version": one.version,
            "tmq.cpu_seconds": one.cpu,
            "tmq.bytes": one.bytes or None,
        }
        attributes = {
            **self._attributes(batch),
            "tmq.role": one.role,
            "tmq.agent": one.agent,
            "tmq.wait": one.wait,
            "tmq.count": one.count,
            **{name: value for name, value in optional.items() if value is not None},
            **(one.attributes or {}),
        }
        task = None if one.task is None or one.first_run is None else (one.task, one.first_run)
        own = recorded_span(trace, one.agent, one.what, task, one.ticks)
        yield TreeSpan(trace, own, parent, one.what, one.start, one.end, one.role, one.agent, attributes)

    def _settled(self) -> list[str]:
        return [
            name
            for name, one in self._open.items()
            if one.end < self._now - (SETTLED_SECONDS if one.version else FORGOTTEN_SECONDS)
        ]

    def _summaries(self, batches: Sequence[str]) -> list[TreeSpan]:
        """Return the spans of finished batches, of their phases and of their tasks."""
        found: list[TreeSpan] = []
        for name in batches:
            one = self._open.pop(name)
            self._over[name] = None
            trace = trace_id(self._key, name)
            root = batch_span(trace)
            common = self._attributes(name)
            if one.version:
                common["tmq.version"] = one.version
            start = min(first for first, _ in one.phases.values())
            title = name if name.startswith("weights ") else f"batch {name}"
            found.append(TreeSpan(trace, root, "", title, start, one.end, "run", self._run, common))
            for phase, (first, last) in one.phases.items():
                found.append(
                    TreeSpan(trace, phase_span(trace, phase), root, phase, first, last, "run", self._run, common)
                )
            above = "rollout" if "rollout" in one.phases else next(iter(one.phases))
            for task, (first, last) in one.tasks.items():
                of_task = {**common, "tmq.task": int(task)}
                own, parent = task_span(trace, int(task)), phase_span(trace, above)
                found.append(TreeSpan(trace, own, parent, f"task {task}", first, last, "run", self._run, of_task))
        for memory in (self._over, self._made):
            while len(memory) > MOST_KNOWN:
                del memory[next(iter(memory))]
        return found

    def _attributes(self, batch: str) -> dict[str, Attribute]:
        return {"tmq.run": self._run, "tmq.batch": batch}


def _extend(known: dict[str, list[float]], name: str, one: TraceSpan) -> None:
    first, last = known.get(name, (one.start, one.end))
    known[name] = [min(first, one.start), max(last, one.end)]
