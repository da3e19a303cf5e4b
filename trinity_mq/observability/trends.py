"""Values of a run over time, from heartbeats and metrics: progress, busy shares of stages, and rates of counters."""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_mq.messages import (
    EngineStatus,
    ExplorerStatus,
    GatewayStatus,
    Heartbeat,
    OperatorStatus,
    RunnerStatus,
    TrainerStatus,
)

K = TypeVar("K", bound=Hashable)
Samples = collections.deque[tuple[float, float]]
"""Pairs of a time and a value, oldest first."""

STAGE_METRICS = frozenset({"trainer/idle_frac", "time/batch", "time/sync"})
"""Metrics that measure how busy a stage is. They are averaged, because values of a single step vary."""
WINDOW = 60.0
"""Seconds over which busy shares and the metrics of stages are averaged."""
MIN_SAMPLES = 5
"""Minimum heartbeats of a stage in the window; with fewer, its busy share is unknown."""
RATE_SECONDS = 20.0
"""Seconds over which the rates of counters are measured."""


@dataclass(frozen=True, slots=True)
class _Measures:
    """Values of one heartbeat that are followed over time."""

    progress: tuple[Any, ...] = ()
    """Values that change when the agent makes progress."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters that rise until the process restarts, by name."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Busy share, 0 to 1, at this moment of each stage that the heartbeat describes."""


class Trends:
    """Collects the values of one run. Each time is an argument, in seconds of any clock."""

    def __init__(self) -> None:
        self.began = self.moved_at = math.inf
        """Time of the last progress. Both times are infinite before the first heartbeat."""
        self.moves = 0
        """Number of progress changes seen."""
        self._progress: dict[str, tuple[Any, ...]] = {}
        self._busy: dict[str, Samples] = {}
        self._metrics: dict[str, Samples] = {}
        self._counters: dict[tuple[str, str], Samples] = {}
        """Values of each counter by (agent id, counter name)."""

    def begin(self, now: float) -> None:
        """Measure listening and standstill from ``now``. The first heartbeat does the same."""
        self.began = self.moved_at = now

    def add_metrics(self, values: Mapping[str, float], now: float) -> None:
        """Add the metrics of a step. Metrics before the beginning are ignored."""
        for name in STAGE_METRICS & values.keys() if self.began < math.inf else ():
            _add_sample(self._metrics, name, values[name], now)

    def add_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Add a heartbeat that is newer than the earlier heartbeats of its agent."""
        if self.began == math.inf:
            self.begin(now)
        measures = _measure(beat)
        if self._progress.get(beat.id, measures.progress) != measures.progress:
            self.moved_at, self.moves = now, self.moves + 1
        self._progress[beat.id] = measures.progress
        for name, value in measures.counters.items():
            values = self._counters.get((beat.id, name))
            if values and value < values[-1][1]:
                values.clear()  # a restarted process counts from zero
            _add_sample(self._counters, (beat.id, name), value, now)
        if not beat.has_ended:
            for stage, share in measures.busy.items():
                _add_sample(self._busy, stage, share, now)

    def busy(self, now: float) -> dict[str, float]:
        """Return the busy share, 0 to 1, of each stage over the last minute."""
        recent = {
            stage: [share for at, share in samples if at >= now - WINDOW] for stage, samples in self._busy.items()
        }
        return {stage: sum(shares) / len(shares) for stage, shares in recent.items() if len(shares) >= MIN_SAMPLES}

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric of a stage over the last minute, else its latest value."""
        return {name: sum(value for _, value in samples) / len(samples) for name, samples in self._metrics.items()}

    def rate(self, name: str, now: float) -> float:
        """Return a counter's increase per second, summed over all agents."""
        total = 0.0
        for (_, counter), samples in self._counters.items():
            recent = [(at, value) for at, value in samples if at >= now - RATE_SECONDS]
            if counter == name and len(recent) > 1 and recent[-1][0] > recent[0][0]:
                total += (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        return total


def _add_sample(samples_by_key: dict[K, Samples], key: K, value: float, now: float) -> None:
    """Add a sample, and remove samples older than the window."""
    samples = samples_by_key.setdefault(key, collections.deque())
    samples.append((now, value))
    while samples[0][0] < now - WINDOW:
        samples.popleft()


def _measure(beat: Heartbeat) -> _Measures:
    """Return the values of a heartbeat that are followed over time."""
    works = beat.state == "working"
    progress: tuple[Any, ...]
    match beat.detail:
        case ExplorerStatus() as status:
            progress = beat.incarnation, status.opened, status.closed, status.evaluating, status.finished
            return _Measures(progress, {"closed": status.closed}, {"explorer": works})
        case RunnerStatus() as status:
            busy = {"runner": min(1.0, status.running / status.slots)} if status.slots else {}
            return _Measures((status.done,), {"slices": status.done}, busy)
        case TrainerStatus() as status:
            syncs = "sync" in status.doing
            progress = beat.incarnation, status.progress, status.step, status.committed, status.finished
            counters = {} if status.progress is None else {"progress": status.progress}
            return _Measures(progress, counters, {"trainer": bool(status.doing) and not syncs, "sync": syncs})
        case EngineStatus() as status:
            rollout = status.url is not None and status.role == "rollout"
            busy = {"engine": status.load > 0} if rollout else {}
            return _Measures((status.tokens, status.version), {"tokens": status.tokens}, busy)
        case GatewayStatus() as status:
            progress = status.calls, status.trained, status.open, status.parked
            return _Measures(progress, busy={"gateway": works and beat.waits_for is None})
        case OperatorStatus() as status:
            return _Measures((status.ticket,), busy={"operator": status.ticket is not None})
        case _:
            return _Measures()
