"""Who else lives: the latest beat of every agent, kept while its lease lasts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from trinity_mq.messages import ExplorerStatus, Heartbeat, Role, Status, TrainerStatus
from trinity_mq.runtime.notify import Notifier

S = TypeVar("S", bound=Status)


@dataclass(slots=True)
class Peer:
    """An agent as last heard of."""

    beat: Heartbeat
    heard: float
    """Loop time."""


class Peers:
    """Beats by agent id. Leases are durations on our own monotonic clock and stand still while we are disconnected."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._deaf_since: float | None = None
        self.changed = Notifier()

    def receive(self, beat: Heartbeat) -> None:
        """Take in a beat; one older than what we know of the same incarnation is ignored."""
        known = self._peers.get(beat.id)
        if known and known.beat.incarnation == beat.incarnation and known.beat.seq >= beat.seq:
            return
        self._peers[beat.id] = Peer(beat, asyncio.get_running_loop().time())
        self.changed.notify()

    def suspend(self) -> None:
        """We hear nobody from now on: leases stand still until :meth:`refresh`."""
        if self._deaf_since is None:
            self._deaf_since = asyncio.get_running_loop().time()

    def refresh(self) -> None:
        """Start all leases anew: we were deaf and cannot know."""
        now = asyncio.get_running_loop().time()
        self._deaf_since = None
        for peer in self._peers.values():
            peer.heard = now
        self.changed.notify()

    def alive(self, role: Role) -> list[Heartbeat]:
        """Return the beats of the living agents of a role, oldest id first."""
        now = asyncio.get_running_loop().time() if self._deaf_since is None else self._deaf_since
        return [
            peer.beat
            for _, peer in sorted(self._peers.items())
            if peer.beat.role == role and now - peer.heard < peer.beat.lease and peer.beat.state != "gone"
        ]

    def latest(self, agent_id: str) -> Heartbeat | None:
        """Return the last beat of an agent, alive or not."""
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
