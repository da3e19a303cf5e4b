"""Where the time of a sync goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_mq.messages import SyncEvent

PHASES = ("wait", "pause", "transfer", "apply", "resume")
"""``wait``: for an open evaluation, then from prepare until all are ready, their pausing left out.
``pause``: the slowest engine's way to a standstill. ``transfer``: from go until our side of the broadcast is through.
``apply``: from there until the last member has the weights in place and has answered the canary. ``resume``: the
slowest engine's way from commit to serving."""


@dataclass(slots=True)
class Phases:
    """One try, in seconds of the coordinator's clock; durations at members are of their own clocks."""

    started: float = 0.0
    held: float = 0.0
    """Seconds for which the try was put off."""
    ready: float | None = None
    transferred: float | None = None
    committed: float | None = None
    _pauses: dict[str, float] = field(default_factory=dict)
    _resumes: dict[str, float] = field(default_factory=dict)

    def paused(self, ready: SyncEvent) -> None:
        """Take in how long a member has taken to stand still."""
        self._pauses[ready.sender] = _seconds(ready, "pause")

    def resumed(self, join: SyncEvent) -> None:
        """Take in how long a member has taken to serve again."""
        if join.detail.get("resume") is not None:
            self._resumes[join.sender] = _seconds(join, "resume")

    def milliseconds(self) -> dict[str, float]:
        """Return what is known, by the names in :data:`PHASES`."""
        found: dict[str, float] = {}
        if self.ready is not None:
            found["pause"] = max(self._pauses.values(), default=0.0)
            found["wait"] = self.held + max(0.0, self.ready - self.started - found["pause"])
        if self.ready is not None and self.transferred is not None:
            found["transfer"] = self.transferred - self.ready
        if self.transferred is not None and self.committed is not None:
            found["apply"] = self.committed - self.transferred
        if self._resumes:
            found["resume"] = max(self._resumes.values())
        return {name: round(1000 * found[name], 3) for name in PHASES if name in found}


def _seconds(event: SyncEvent, name: str) -> float:
    """Return a duration that a member reports; what is none counts as nothing."""
    value = event.detail.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
