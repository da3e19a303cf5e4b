"""Processes that faults can be done to, wherever a run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class NotOursError(Exception):
    """The process has ended, or is another one by now, or is not the run's: nothing was done to it."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Something that a fault can be done to: a process, a container or a pod."""

    role: str
    name: str
    """For people; unique within the role."""
    identity: str
    """Names this life of it: process id and start, the id of a container or of a pod."""
    agent: str | None = None
    """The id in its heartbeats; None: not known."""
    shared: bool = False
    """Whether a broker is one node of several, of which the others go on."""


class Targets(Protocol):
    """The processes of a run, wherever they are, and the means to do faults to them."""

    where: str
    """For people, such as ``compose project trinity-mq``."""
    is_local: bool
    """Its processes are on this machine, and its gateways can be reached from here."""

    @property
    def possible(self) -> Mapping[str, Sequence[str]]:
        """By role, the kinds of faults that can be done to it."""

    async def find(self, role: str) -> list[Victim]:
        """Return the living ones of a role, in the order of their names.

        Raises:
            CommandError: They cannot be listed.
        """

    async def strike(self, victim: Victim, kind: str) -> None:
        """Do a fault of this kind, after making sure that the victim is the run's and in the same life.

        Raises:
            NotOursError: It is not; nothing was done.
            CommandError: It could not be done.
        """

    async def relieve(self, victim: Victim, kind: str) -> None:
        """End a fault that lasts: thaw it, or give it its network back. One that has ended meanwhile is fine.

        Raises:
            CommandError: It could not be done.
        """

    async def left_over(self) -> list[str] | None:
        """Return what still runs after the run's end, a line each; None: it cannot be known here."""
