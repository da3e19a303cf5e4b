"""Records of the gate: the key of an attempt, and the coordinator's members, phases, durations and commands to its
driver.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trinity_mq.messages import SyncEvent, Version
from trinity_mq.telemetry.trace import record

Key = tuple[Version | None, int, int]
"""Version, epoch and attempt number of a sync attempt. The version is part of the key because a restarted trainer
counts epochs and attempts from 0.
"""

PHASES = ("wait", "pause", "transfer", "apply", "resume")
"""Phases of an attempt. ``wait``: for an open evaluation, then from prepare until all members are ready, without the
pause. ``pause``: the slowest engine's time to a standstill. ``transfer``: from go until our side of the broadcast has
ended. ``apply``: from there until the last member holds the weights and has answered the canary. ``resume``: the
slowest engine's time from commit to serving.
"""


def key_of(event: SyncEvent) -> Key:
    """Return the key of the attempt that an event belongs to."""
    return (event.version, event.epoch, event.attempt)


def first_rank(prepare: SyncEvent, member: str) -> int:
    """Return the first rank of a member in the broadcast of an attempt. Its other ranks follow; the trainer has rank 0.

    Raises:
        ValueError: The member does not take part.
    """
    before = prepare.members[: prepare.members.index(member)]
    return 1 + sum(prepare.ranks.get(name, 1) for name in before)


def world_size(prepare: SyncEvent) -> int:
    """Return the number of ranks in the broadcast of an attempt, including the trainer's."""
    return 1 + sum(prepare.ranks.get(name, 1) for name in prepare.members)


@dataclass(slots=True)
class AttemptTimes:
    """Times of one attempt, in seconds of the coordinator's clock. Members measure their durations with their own
    clocks.
    """

    started: float = 0.0
    held: float = 0.0
    """Seconds for which the attempt was postponed."""
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
        """Record the intervals between the gate's messages as spans of the trainer."""
        if self.ready is not None and self.transferred is not None and self.committed is not None:
            record("wait until engines are ready", self.started, self.ready, version=version, wait=True)
            record("transfer weights", self.ready, self.transferred, version=version, wait=True)
            record("wait until weights are applied", self.transferred, self.committed, version=version, wait=True)

    def milliseconds(self) -> dict[str, float]:
        """Return the known durations in milliseconds, by the names in :data:`PHASES`."""
        seconds: dict[str, float] = {}
        if self.ready is not None:
            seconds["pause"] = max(self._pauses.values(), default=0.0)
            seconds["wait"] = self.held + max(0.0, self.ready - self.started - seconds["pause"])
        if self.ready is not None and self.transferred is not None:
            seconds["transfer"] = self.transferred - self.ready
        if self.transferred is not None and self.committed is not None:
            seconds["apply"] = self.committed - self.transferred
        if self._resumes:
            seconds["resume"] = max(self._resumes.values())
        return {name: round(1000 * seconds[name], 3) for name in PHASES if name in seconds}


def _seconds(event: SyncEvent, name: str) -> float:
    """Return a duration in seconds from a member's event, 0 if it is missing or invalid."""
    value = event.detail.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0


class Phase(enum.Enum):
    """Phase of an attempt."""

    IDLE = "idle"
    PREPARING = "preparing"
    ENTERING = "entering"
    """go is sent, and the collective runs."""
    APPLYING = "applying"
    """Our part of the collective is done, but some members have not answered applied."""


@dataclass(slots=True)
class MemberRecord:
    """A gate member as the coordinator knows it."""

    lease_ends: float
    version: Version | None
    """Version that the member reports. None if it holds no trustworthy weights."""
    life: str = ""
    """Id of the member's engine process."""
    ranks: int = 1
    """Number of the member's ranks in a broadcast."""
    quarantined: bool = False
    """Whether the canary showed other weights than the engine was sent. The member takes part again once the canary
    passes.
    """
    given: tuple[int, int] = (0, 0)
    """Epoch and attempt that committed the latest version at this member. A member that missed the commit
    message finds them in the trainer's heartbeat.
    """

    def hold(self, version: Version, attempt: tuple[int, int]) -> None:
        """Record the committed version after the canary check has passed."""
        self.version, self.given, self.quarantined = version, attempt, False


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Meet the members at the barrier and broadcast. Report with :meth:`Coordinator.collective_done` or
    ``collective_failed``.
    """

    version: Version
    epoch: int
    attempt: int
    members: tuple[str, ...]
    world: int
    """Number of ranks, including the trainer's."""


@dataclass(frozen=True, slots=True)
class AbandonCollective:
    """Stop waiting for the collective. Its group must not be used again."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The version is committed."""

    version: Version
    progress: int
    members: tuple[str, ...]
    pulled: bool = False
    """Whether a single member has caught up with the committed version."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt has failed. Members in ``lost`` are excluded until they join again."""

    version: Version
    reason: str
    lost: tuple[str, ...]


Command = SyncEvent | StartCollective | AbandonCollective | Committed | Failed
"""A command to the driver. A :class:`SyncEvent` is published to the members."""
