"""Pacing rules of each sync style: when a batch may be opened and when weights are synchronised. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.config import SyncConfig
from trinity_mq.messages import Version


@dataclass(frozen=True, slots=True)
class TrainerCounters:
    """Counters that the trainer reports."""

    progress: int = 0
    """Number of closed batches that the trainer consumed, with any outcome."""
    committed_progress: int = 0
    """Number of batches, counted as in ``progress``, that the weights in the engines include."""
    answered: int = 0
    """Last batch for which the explorer requested the newest weights and they were committed."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """State of a trainer between two batches."""

    progress: int
    version: Version
    """Version of the weights in the trainer."""
    committed: Version | None
    """Version of the weights in the engines. None: no version was committed since this trainer process started."""
    committed_progress: int
    wanted: int = 0
    """Last batch for which the explorer requests the newest weights."""
    answered: int = 0
    """Last such batch for which the newest weights were committed."""
    first_step: int = 0
    """Number of train steps in the weights with which this trainer process started."""
    at_end: bool = False
    """True if no further batch will be closed."""


def required_progress(batch: int, config: SyncConfig) -> int:
    """Return the progress that batch ``batch`` (counted from 1) waits for. Under style ``fixed`` it is the progress of
    the committed weights, under the other styles the trainer's own progress.
    """
    if config.sync_style == "fixed":
        interval = config.sync_interval
        return max(0, (batch - 1 - config.sync_offset) // interval * interval)
    return max(0, batch - 1 - config.pipeline_depth)


def last_with_room(counters: TrainerCounters, config: SyncConfig) -> int:
    """Return the last batch for which the trainer's progress suffices: the greatest batch that :func:`has_room`
    allows.
    """
    if config.sync_style == "fixed":
        return (counters.committed_progress // config.sync_interval + 1) * config.sync_interval + config.sync_offset
    return counters.progress + config.pipeline_depth + 1


def required_answer(batch: int, config: SyncConfig) -> int:
    """Return the batch whose request for the newest weights must be answered before ``batch`` is opened. Return 0 if no
    request is needed.

    Under ``explorer_driven`` every ``sync_interval``-th batch requests the newest weights. The first ``sync_interval``
    batches use the initial weights.
    """
    if config.sync_style != "explorer_driven":
        return 0
    first = (batch - 1) // config.sync_interval * config.sync_interval + 1
    return first if first > 1 else 0


def has_room(batch: int, counters: TrainerCounters, config: SyncConfig) -> bool:
    """Return whether the trainer's progress suffices for ``batch``. Under ``explorer_driven`` the batch may still wait
    for the newest weights, see :func:`required_answer`.
    """
    progress = counters.committed_progress if config.sync_style == "fixed" else counters.progress
    return progress >= required_progress(batch, config)


def must_ask(batch: int, counters: TrainerCounters, config: SyncConfig) -> bool:
    """Return whether ``batch`` waits only for the newest weights, which the explorer must request."""
    return has_room(batch, counters, config) and counters.answered < required_answer(batch, config)


def may_open(batch: int, counters: TrainerCounters, config: SyncConfig) -> bool:
    """Return whether the explorer may open batch ``batch``."""
    return has_room(batch, counters, config) and counters.answered >= required_answer(batch, config)


def sync_due(now: Boundary, config: SyncConfig) -> bool:
    """Return whether the trainer begins a sync at this boundary. If its weights have not changed since the last sync,
    it commits its progress without a transfer.

    A sync for members that do not hold the committed version begins under every style, independently of this function.
    """
    behind = now.committed != now.version or now.committed_progress < now.progress
    if now.at_end:
        return behind or now.wanted > now.answered
    if config.sync_style == "fixed":
        return behind and now.progress > 0 and now.progress % config.sync_interval == 0
    if config.sync_style == "explorer_driven":
        # a restarted trainer must first regain the progress it had at the request, or its weights would be too old
        return now.wanted > now.answered and now.progress >= required_progress(now.wanted, config)
    base = now.first_step if now.committed is None else now.committed[1]
    return now.version[1] - base >= config.sync_interval
