"""How long slices take, and the limit that follows from it. No I/O."""

from __future__ import annotations

from trinity_mq.config import ExplorerConfig
from trinity_mq.messages import TaskResult

HAVE_RUN = {"finished", "partial"}


class SliceTimes:
    """Mean seconds of the slices of the train lane since the start of this process.

    Only slices with a finished run count: one that fails at once would otherwise take the time from all others.
    """

    def __init__(self, config: ExplorerConfig) -> None:
        self._config = config.dynamic_timeout
        self._count, self._seconds, self._batches = 0, 0.0, 0

    def slice_done(self, result: TaskResult) -> None:
        """A slice has its outcome."""
        if result.outcome in HAVE_RUN and result.runs:
            self._count += 1
            self._seconds += result.seconds

    def batch_done(self) -> None:
        """All slices of a batch have their outcomes."""
        self._batches += 1

    def limit(self, seconds: float) -> float:
        """Return the limit to use where ``seconds`` is the one that is set: ``mean * ratio`` once warm, never more."""
        if not self._config.enable or self._batches < self._config.warmup_min_steps or not self._seconds:
            return seconds
        return min(seconds, self._seconds / self._count * self._config.ratio)
