"""Interface to the processes of a run for fault injection, for every kind of deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class VictimGoneError(Exception):
    """The process has ended, was replaced, or does not belong to the run. No fault was injected."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A target of a fault: a process, a container or a pod."""

    role: str
    name: str
    """Name for people; unique within the role."""
    identity: str
    """Identifies this life of the victim: process id and start time, or the id of a container or pod."""
    agent: str | None = None
    """The agent id in its heartbeats; None: unknown."""
    shared: bool = False
    """True if a broker is one of several nodes, so that the other nodes keep working."""


class FaultTargets(Protocol):
    """Interface for finding the processes of a run in any deployment, and for injecting faults into them."""

    where: str
    """Description for people, such as ``compose project trinity-mq``."""
    is_local: bool
    """True if the processes are on this machine and the gateways are reachable from here."""

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """Possible kinds of faults by role."""

    async def find(self, role: str) -> list[Victim]:
        """Return the living victims of a role, sorted by name.

        Raises:
            CommandError: The processes cannot be listed.
        """

    async def strike(self, victim: Victim, kind: str) -> None:
        """Inject a fault of this kind, after a check that the victim belongs to the run and is in the same life.

        Raises:
            VictimGoneError: The check failed; no fault was injected.
            CommandError: The fault could not be injected.
        """

    async def relieve(self, victim: Victim, kind: str) -> None:
        """End a lasting fault: thaw the victim, or reconnect its network. A victim that has ended is ignored.

        Raises:
            CommandError: The fault could not be ended.
        """

    async def left_over(self) -> list[str] | None:
        """Return the processes that still run after the run's end, one line each; None: they cannot be listed here."""
