"""Who may go on, and when weights travel: the rules of learning.md section 1 for every style, pure."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.config import SyncConfig
from trinity_mq.messages import Version


@dataclass(frozen=True, slots=True)
class Counters:
    """What the trainer has said of itself."""

    progress: int = 0
    """Closed batches consumed, in whatever state."""
    committed_progress: int = 0
    """Progress behind the weights that the engines hold."""
    answered: int = 0
    """The last batch for which the explorer asked for the newest weights and for which they were committed."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A trainer between two batches."""

    progress: int
    version: Version
    """Of the weights it holds."""
    committed: Version | None
    """Of the weights that the engines hold; None: nothing of this life of the trainer."""
    committed_progress: int
    wanted: int = 0
    """The last batch for which the explorer asks for the newest weights."""
    answered: int = 0
    """The last such batch that was answered."""
    first_step: int = 0
    """Steps in the weights with which this life of the trainer began."""
    at_end: bool = False
    """No batch is left to come."""


def required_progress(batch: int, config: SyncConfig) -> int:
    """Return the progress that batch ``batch`` (counted from 1) waits for: under style ``fixed`` that behind the
    committed weights, in the others the trainer's own.
    """
    if config.sync_style == "fixed":
        interval = config.sync_interval
        return max(0, (batch - 1 - config.sync_offset) // interval * interval)
    return max(0, batch - 1 - config.pipeline_depth)


def required_answer(batch: int, config: SyncConfig) -> int:
    """Return the batch for which the newest weights must have been asked for and committed before ``batch`` is opened;
    0: none. Every ``sync_interval`` batches under ``explorer_driven``; the first ones take what a run begins with.
    """
    if config.sync_style != "explorer_driven":
        return 0
    first = (batch - 1) // config.sync_interval * config.sync_interval + 1
    return first if first > 1 else 0


def has_room(batch: int, counters: Counters, config: SyncConfig) -> bool:
    """Say whether the trainer is far enough for ``batch``; it may still lack weights that must be asked for."""
    known = counters.committed_progress if config.sync_style == "fixed" else counters.progress
    return known >= required_progress(batch, config)


def must_ask(batch: int, counters: Counters, config: SyncConfig) -> bool:
    """Say whether only the newest weights, for which the explorer has to ask, keep it from opening ``batch``."""
    return has_room(batch, counters, config) and counters.answered < required_answer(batch, config)


def may_open(batch: int, counters: Counters, config: SyncConfig) -> bool:
    """Say whether the explorer may open batch ``batch``."""
    return has_room(batch, counters, config) and counters.answered >= required_answer(batch, config)


def sync_due(now: Boundary, config: SyncConfig) -> bool:
    """Say whether the trainer offers its weights at this boundary; where they have not changed since the last time, it
    commits its progress without a transfer.

    Members that do not hold the committed version are another reason to offer them, in every style.
    """
    behind = now.committed != now.version or now.committed_progress < now.progress
    if now.at_end:
        return behind or now.wanted > now.answered
    if config.sync_style == "fixed":
        return behind and now.progress > 0 and now.progress % config.sync_interval == 0
    if config.sync_style == "explorer_driven":
        return now.wanted > now.answered
    base = now.first_step if now.committed is None else now.committed[1]
    return now.version[1] - base >= config.sync_interval
