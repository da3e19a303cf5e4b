"""Records of the gate: the key of a try; the coordinator's members, phases, durations and commands to its driver."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trinity_mq.messages import SyncEvent, Version
from trinity_mq.telemetry.trace import record

Key = tuple[Version | None, int, int]
"""Version, epoch and attempt of a try: a restarted trainer counts epochs and attempts anew."""

PHASES = ("wait", "pause", "transfer", "apply", "resume")
"""``wait``: for an open evaluation, then from prepare until all are ready, their pausing left out.
``pause``: the slowest engine's way to a standstill. ``transfer``: from go until our side of the broadcast is through.
``apply``: from there until the last member has the weights in place and has answered the canary. ``resume``: the
slowest engine's way from commit to serving."""


def key_of(event: SyncEvent) -> Key:
    """Return the key of the try that an event belongs to."""
    return (event.version, event.epoch, event.attempt)


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
        self._pauses[ready.sender] = _seconds(ready, "pause")

    def resumed(self, join: SyncEvent) -> None:
        if join.detail.get("resume") is not None:
            self._resumes[join.sender] = _seconds(join, "resume")

    def trace(self, version: Version) -> None:
        """Record the parts between the messages of the gate as spans of the trainer."""
        if self.ready is not None and self.transferred is not None and self.committed is not None:
            record("wait until engines are ready", self.started, self.ready, version=version, wait=True)
            record("transfer weights", self.ready, self.transferred, version=version, wait=True)
            record("wait until weights are applied", self.transferred, self.committed, version=version, wait=True)

    def milliseconds(self) -> dict[str, float]:
        """Return the known durations in milliseconds, by the names in :data:`PHASES`."""
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
    """Return a duration in seconds that a member reports, 0 where it is missing or invalid."""
    value = event.detail.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0


class Phase(enum.Enum):
    """Phase of a try."""

    IDLE = "idle"
    PREPARING = "preparing"
    ENTERING = "entering"
    """go is out, the collective runs."""
    APPLYING = "applying"
    """Our part of the collective is done, some member has not said applied."""


@dataclass(slots=True)
class Member:
    """A member of the gate as the coordinator knows it."""

    lease_ends: float
    version: Version | None
    """Version that it reports; None when it holds nothing that can be trusted."""
    life: str = ""
    """Id of its engine's process."""
    quarantined: bool = False
    """Its canary has shown other weights than it was given; it takes part again once the canary agrees."""
    given: tuple[int, int] = (0, 0)
    """Epoch and attempt of the try in which the latest version was committed at it: a member that has missed the commit
    finds it here, in the trainer's beat."""

    def hold(self, version: Version, given: tuple[int, int]) -> None:
        """Its version is committed: the canary has agreed."""
        self.version, self.given, self.quarantined = version, given, False


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Meet the members at the barrier and broadcast; report with :meth:`Coordinator.collective_done` or
    ``collective_failed``.
    """

    version: Version
    epoch: int
    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbandonCollective:
    """Stop waiting for the collective; its group must not be used again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The version exists."""

    version: Version
    progress: int
    members: tuple[str, ...]
    pulled: bool = False
    """One member alone has caught up with what the others held."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The try has ended; members in ``lost`` are left out until they join again."""

    version: Version
    reason: str
    lost: tuple[str, ...]


Command = SyncEvent | StartCollective | AbandonCollective | Committed | Failed
"""An event is to be published to the members."""
