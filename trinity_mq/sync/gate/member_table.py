"""What the coordinator knows: where its try is, and each member."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trinity_mq.messages import Version


class Phase(enum.Enum):
    """Where a try is."""

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
    """What it says it holds; None when it holds nothing that can be trusted."""
    fingerprint: str | None = None
    life: str = ""
    """Of its engine's process."""
    quarantined: bool = False
    """Its canary has shown other weights than it was given; it takes part again once the canary agrees."""
    given: tuple[int, int] = (0, 0)
    """Epoch and attempt of the try in which the latest version was committed at it: a member that has missed the commit
    finds it here, in the trainer's beat."""

    def hold(self, version: Version, given: tuple[int, int]) -> None:
        """Its version is committed: the canary has agreed."""
        self.version, self.given, self.quarantined = version, given, False
