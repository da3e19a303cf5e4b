"""Heartbeats: publishing one's own, and the latest one of each other agent, valid while its lease lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.messages import ExplorerStatus, Heartbeat, Role, Status, TrainerStatus
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.notify import Notifier

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=Status)

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats without a change."""
HEARTBEAT_LEASE = 10.0
"""Seconds after which an agent that sends nothing is taken for dead."""
MIN_HEARTBEAT_GAP = 0.05
"""Least seconds between two heartbeats: a burst of changes makes one."""


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


class HeartbeatPublisher:
    """Publishes heartbeats until cancelled.

    Args:
        who: Id of the sending agent, for logs.
        make: Returns the heartbeats to send now, each with a higher ``seq`` than the last one.
    """

    def __init__(self, bus: Bus, topology: Topology, who: str, make: Callable[[], Iterable[Heartbeat]]) -> None:
        self._bus, self._topology, self._who, self._make = bus, topology, who, make
        self._due = asyncio.Event()

    def soon(self) -> None:
        """Send now rather than at the next interval."""
        self._due.set()

    async def run(self) -> None:
        """Send at each interval and on :meth:`soon`."""
        while True:
            self._due.clear()
            if self._bus.usable:
                await self.once()
            await asyncio.sleep(MIN_HEARTBEAT_GAP)
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def once(self) -> None:
        """Send now. A heartbeat that cannot be sent is dropped: the next one replaces it."""
        try:
            for beat in self._make():
                key = f"beat.{beat.role}.{beat.id}"
                await self._bus.publish(self._topology.exchange("telemetry"), key, envelope(beat))
        except BusUnavailable as error:
            log.warning("beat_not_sent", agent=self._who, reason=str(error))
