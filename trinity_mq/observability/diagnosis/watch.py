"""Collects heartbeats over time and makes observations from them: progress, its time, and how busy each stage is."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from trinity_mq.messages import (
    EngineStatus,
    ExplorerStatus,
    GatewayStatus,
    Heartbeat,
    Metrics,
    OperatorStatus,
    RunnerStatus,
    TrainerStatus,
)
from trinity_mq.observability.diagnosis.records import OVER, Observation, Room

WINDOW = 60.0
"""Seconds over which busy shares are measured."""
MIN_SAMPLES = 5
"""Minimum heartbeats of a stage in the window; with fewer, its busy share is unknown."""
METRICS = frozenset({"trainer/idle_frac", "time/batch", "time/sync"})
"""Metrics that measure how busy a stage is. They are averaged, because values of a single step vary."""


class HeartbeatWindow:
    """Keeps the latest heartbeat of each agent and the time of the last progress. Time is an argument, in seconds of
    any clock.

    Args:
        now: The time at which the watch starts.
    """

    def __init__(self, now: float) -> None:
        self._began = self.moved_at = now
        """Time of the last progress."""
        self.moves = 0
        """Number of progress changes seen."""
        self._heartbeats: dict[str, tuple[Heartbeat, float]] = {}
        self._progress: dict[str, tuple[Any, ...]] = {}
        self._busy: dict[str, collections.deque[tuple[float, float]]] = {}
        self._metrics: dict[str, collections.deque[tuple[float, float]]] = {}

    def receive(self, message: object, now: float) -> None:
        """Record a heartbeat or metrics; other messages are ignored."""
        if isinstance(message, Metrics):
            for name in METRICS & message.values.keys():
                _add(self._metrics, name, message.values[name], now)
        if not isinstance(message, Heartbeat):
            return
        last_beat, _ = self._heartbeats.get(message.id, (None, 0.0))
        if last_beat and last_beat.incarnation == message.incarnation and last_beat.seq >= message.seq:
            return
        self._heartbeats[message.id] = message, now
        progress = _progress(message)
        before = self._progress.get(message.id)
        self._progress[message.id] = progress
        if before is not None and progress != before:
            self.moved_at, self.moves = now, self.moves + 1
        for stage, share in _busy(message):
            _add(self._busy, stage, share, now)

    def observation(
        self,
        now: float,
        *,
        depths: Mapping[str, int | None] | None = None,
        broker: str = "",
        expected: Mapping[str, int] | None = None,
        limits: Mapping[str, float] | None = None,
        room: frozenset[Room] | None = None,
    ) -> Observation:
        """Return the observation at ``now``; the arguments are fields of :class:`Observation`."""
        recent = {
            stage: [share for at, share in samples if at >= now - WINDOW] for stage, samples in self._busy.items()
        }
        return Observation(
            heartbeats={name: (beat, now - at) for name, (beat, at) in self._heartbeats.items()},
            depths=depths or {},
            broker=broker,
            still=now - self.moved_at,
            listened=now - self._began,
            expected=expected or {},
            limits=limits or {},
            busy={stage: sum(shares) / len(shares) for stage, shares in recent.items() if len(shares) >= MIN_SAMPLES},
            metrics={
                name: sum(value for _, value in samples) / len(samples) for name, samples in self._metrics.items()
            },
            room=room,
        )


def _add(window: dict[str, collections.deque[tuple[float, float]]], name: str, value: float, now: float) -> None:
    """Add a sample, and remove samples older than the window."""
    samples = window.setdefault(name, collections.deque())
    samples.append((now, value))
    while samples[0][0] < now - WINDOW:
        samples.popleft()


def _progress(beat: Heartbeat) -> tuple[Any, ...]:
    """Return the values of a heartbeat that change when the agent makes progress."""
    match beat.detail:
        case ExplorerStatus() as status:
            return beat.incarnation, status.opened, status.closed, status.evaluating, status.finished
        case RunnerStatus() as status:
            return (status.done,)
        case TrainerStatus() as status:
            return beat.incarnation, status.progress, status.step, status.committed, status.finished
        case EngineStatus() as status:
            return status.tokens, status.version
        case GatewayStatus() as status:
            return status.calls, status.trained, status.open, status.parked
        case OperatorStatus() as status:
            return (status.ticket,)
        case _:
            return ()


def _busy(beat: Heartbeat) -> list[tuple[str, float]]:
    """Return the stages that a heartbeat describes, each with its busy share, 0 to 1, at that moment."""
    if beat.state in OVER:
        return []
    match beat.detail:
        case RunnerStatus(slots=slots, running=running) if slots:
            return [("runner", min(1.0, running / slots))]
        case TrainerStatus(doing=doing):
            return [("trainer", float(bool(doing) and "sync" not in doing)), ("sync", float("sync" in doing))]
        case EngineStatus(url=str(), role="rollout", load=load):
            return [("engine", float(load > 0))]
        case OperatorStatus(ticket=ticket):
            return [("operator", float(ticket is not None))]
        case ExplorerStatus():
            return [("explorer", float(beat.state == "working"))]
        case _:
            return []
