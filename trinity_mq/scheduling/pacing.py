"""Who may go on: the admission rule of learning.md section 1, pure."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.config import SyncConfig


@dataclass(frozen=True, slots=True)
class Counters:
    """What the trainer has said of itself."""

    progress: int = 0
    """Closed batches consumed, in whatever state."""
    committed_progress: int = 0
    """Progress behind the weights that the engines hold."""


def required_progress(batch: int, config: SyncConfig) -> int:
    """Return the committed progress that batch ``batch`` (counted from 1) waits for under style ``fixed``."""
    interval = config.sync_interval
    return max(0, (batch - 1 - config.sync_offset) // interval * interval)


def may_open(batch: int, counters: Counters, config: SyncConfig) -> bool:
    """Say whether the explorer may open batch ``batch``."""
    return counters.committed_progress >= required_progress(batch, config)


def sync_due(progress: int, config: SyncConfig) -> bool:
    """Say whether the trainer starts a sync on reaching ``progress``."""
    return progress > 0 and progress % config.sync_interval == 0
