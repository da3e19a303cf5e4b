"""What the coordinator's machine asks of its driver."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_mq.messages import SyncEvent, Version


@dataclass(frozen=True, slots=True)
class Send:
    """Publish this event to the members."""

    event: SyncEvent


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Meet the members at the barrier and broadcast; report with :meth:`Coordinator.collective_done` or
    ``collective_failed``.
    """

    version: Version
    epoch: int
    attempt: int
    members: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class AbandonCollective:
    """Stop waiting for the collective; its group must not be used again."""

    epoch: int


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
    """This try is over; ``lost`` are left out until they join again."""

    version: Version
    reason: str
    lost: tuple[str, ...]


Command = Send | StartCollective | AbandonCollective | Committed | Failed
