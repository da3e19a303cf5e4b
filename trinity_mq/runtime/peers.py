"""The other agents of a run: the latest heartbeat of each, valid while its lease lasts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from trinity_mq.messages import ExplorerStatus, Heartbeat, Role, Status, TrainerStatus
from trinity_mq.runtime.notify import Notifier

S = TypeVar("S", bound=Status)


@dataclass(slots=True)
class Peer:
    """The last heartbeat of an agent."""

    beat: Heartbeat
    received: float
    """Loop time in seconds."""


class Peers:
    """Heartbeats by agent id. Leases run on our own monotonic clock and stand still while we are disconnected."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._suspended_since: float | None = None
        self.changed = Notifier()

    def receive(self, beat: Heartbeat) -> None:
        """Store a heartbeat; one older than the stored one of the same incarnation is ignored."""
        known = self._peers.get(beat.id)
        if known and known.beat.incarnation == beat.incarnation and known.beat.seq >= beat.seq:
            return
        self._peers[beat.id] = Peer(beat, asyncio.get_running_loop().time())
        self.changed.notify()

    def suspend(self) -> None:
        """Stop all leases until :meth:`refresh`: no heartbeat arrives while we are disconnected."""
        if self._suspended_since is None:
            self._suspended_since = asyncio.get_running_loop().time()

    def refresh(self) -> None:
        """Start all leases anew, after a time in which no heartbeat could arrive."""
        now = asyncio.get_running_loop().time()
        self._suspended_since = None
        for peer in self._peers.values():
            peer.received = now
        self.changed.notify()

    def alive(self, role: Role) -> list[Heartbeat]:
        """Return the heartbeats of the living agents of a role, oldest id first."""
        now = asyncio.get_running_loop().time() if self._suspended_since is None else self._suspended_since
        return [
            peer.beat
            for _, peer in sorted(self._peers.items())
            if peer.beat.role == role and now - peer.received < peer.beat.lease and peer.beat.state != "gone"
        ]

    def latest(self, agent_id: str) -> Heartbeat | None:
        """Return the last heartbeat of an agent, alive or not."""
        peer = self._peers.get(agent_id)
        return peer.beat if peer else None

    def statuses(self, role: Role, status: type[S], *, without: str = "") -> list[S]:
        """Return what the living agents of a role report, oldest id first, the agent ``without`` left out.

        Args:
            role: The role.
            status: The class of its status.
            without: Id of an agent, usually the caller's.
        """
        details = (beat.detail for beat in self.alive(role) if beat.id != without)
        return [detail for detail in details if isinstance(detail, status)]

    @property
    def explorer(self) -> ExplorerStatus:
        """Status of the living explorer, of defaults when there is none."""
        return next(reversed(self.statuses("explorer", ExplorerStatus)), ExplorerStatus())

    @property
    def trainer(self) -> TrainerStatus:
        """Status of the living trainer, of defaults when there is none."""
        return next(reversed(self.statuses("trainer", TrainerStatus)), TrainerStatus())
