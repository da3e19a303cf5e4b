"""Names the stage that limits the throughput of a moving run, from busy shares, queue depths and metrics. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trinity_mq.messages import GatewayStatus
from trinity_mq.observability.diagnosis.levers import lever
from trinity_mq.observability.diagnosis.records import Bottleneck, Observation, Stage

HIGH = 0.8
"""Busy share, 0 to 1, above which a stage counts as always busy."""
SYNC_HIGH = 0.3
"""Share of the time, 0 to 1, above which weight syncs count as the limit. During a sync, neither engines nor trainer
work."""
ENGINE_HIGH = 0.7
"""Share of an engine's heartbeats with sequences to generate, above which engines count as always busy."""


def bottleneck(observation: Observation) -> Bottleneck | None:
    """Return the stage that limits throughput. None: no busy share is known, as in the first seconds of a run, or no
    stage is busy enough to be the limit.

    The trainer's shares come from ``trainer/idle_frac`` and ``time/*`` if available, because short steps fall between
    two heartbeats. The shares of the other stages come from samples of heartbeats.
    """
    busy = _shares(observation)
    if not busy:
        return None
    for stage, words in _limits(observation, busy):
        return Bottleneck(stage, words, lever(f"slow_{stage}", room=observation.room), busy)
    return None


def _limits(observation: Observation, busy: Mapping[str, float]) -> Iterator[tuple[Stage, str]]:
    """Yield the candidate stages with their evidence; the first candidate is the limit."""
    sync, trainer, operator = (busy.get(stage, 0.0) for stage in ("sync", "trainer", "operator"))
    engine, runner, explorer = (busy.get(stage) for stage in ("engine", "runner", "explorer"))
    closed, slices = (observation.depths.get(queue) or 0 for queue in ("closed", "tasks.train"))
    if sync >= SYNC_HIGH and sync >= trainer:
        yield "sync", f"weight syncs limit it: they take {_percent(sync)} of the time"
    if trainer >= HIGH:
        yield "trainer", f"the trainer limits it: it trains {_percent(trainer)} of the time"
    if operator >= HIGH or closed > 1:
        words = f"operators limit it: they are at work {_percent(operator)} of the time, {closed} closed batches wait"
        yield "operator", words
    if engine is not None and engine >= ENGINE_HIGH:
        yield "engine", f"engines limit it: they generate {_percent(engine)} of the time"
    if runner is not None and (runner >= HIGH or slices):
        words = f"runners limit it: {_percent(runner)} of their slots are taken, {slices} messages of slices wait"
        yield "runner", words
    if _waits_for_sessions(observation):
        yield "sessions", "sessions limit it: the trainer waits for more of them"
    if explorer is not None and explorer < 1 - HIGH:
        yield "explorer", f"pacing limits it: the explorer may open batches {_percent(explorer)} of the time"


def _shares(observation: Observation) -> dict[str, float]:
    busy = {stage: min(1.0, max(0.0, share)) for stage, share in observation.busy.items()}
    metrics = observation.metrics
    idle = metrics.get("trainer/idle_frac")
    step = metrics.get("time/batch")
    sync = metrics.get("time/sync")
    if idle is not None and 0 <= idle <= 1:
        active = 1.0 - idle
        if step and sync and step > 0 and sync > 0:
            busy["sync"], busy["trainer"] = active * sync / (step + sync), active * step / (step + sync)
        else:
            busy["trainer"] = active
    return busy


def _waits_for_sessions(observation: Observation) -> bool:
    gateways = [beat.detail for beat, _ in observation.heartbeats.values() if isinstance(beat.detail, GatewayStatus)]
    return bool(gateways) and all(gateway.waiting == 0 for gateway in gateways)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
