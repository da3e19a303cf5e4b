"""Heartbeats: publishing an agent's own, and keeping the latest of every other agent while its lease lasts."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.messages import (
    OWN,
    AgentStatus,
    Compatibility,
    ExplorerStatus,
    Heartbeat,
    Role,
    TrainerStatus,
    incompatibility_reason,
)
from trinity_mq.roles import ROLES
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.errors import FatalError
from trinity_mq.runtime.notify import Notifier
from trinity_mq.telemetry import flush_trace

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=AgentStatus)

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats without a change."""
HEARTBEAT_LEASE = 10.0
"""Seconds without a heartbeat after which an agent counts as dead."""
REMEMBERED_LEASES = 6
"""Number of leases without a heartbeat after which an agent is forgotten. Until then its last heartbeat is kept."""
SILENT_AFTER = 3 * HEARTBEAT_INTERVAL
"""Seconds without a heartbeat after which an agent is reported as silent. It is shorter than the lease."""
UNHEARD = 8
"""Maximum number of agents in :meth:`Peers.silent`, and of forgotten agents that are kept for it."""
CHANGE_GAP = 0.5
"""Minimum seconds between two heartbeats for a change that no agent waits for. In a run with many short steps each
agent changes several times a step, and every heartbeat is delivered to all listeners."""
MEETING_SECONDS = 2 * HEARTBEAT_INTERVAL
"""Seconds after an agent's subscription within which it hears from every live agent, even if heartbeats are late."""
MIN_HEARTBEAT_GAP = 0.05
"""Minimum seconds between two heartbeats for a change that another agent may be waiting for: a burst of changes makes
one heartbeat."""


def heartbeat_patterns(role: Role) -> tuple[str, ...]:
    """Return the routing patterns of the heartbeats that an agent of ``role`` receives.

    >>> heartbeat_patterns("scheduler"), heartbeat_patterns("explorer")
    (('beat.runner.#', 'beat.engine.#'), ('beat.#',))
    """
    heard = ROLES[role].hears
    return ("beat.#",) if heard is None else tuple(f"beat.{sender}.#" for sender in heard)


@dataclass(slots=True)
class Peer:
    """The last heartbeat of an agent."""

    beat: Heartbeat
    received: float
    """Loop time in seconds at which the heartbeat arrived, or at which a later :meth:`Peers.refresh` restarted its
    lease."""


class Peers:
    """Heartbeats by agent id. Leases run on the local monotonic clock and stand still while this agent is disconnected.

    Args:
        own: The message schemas that this agent reads and writes.
    """

    def __init__(self, own: Compatibility = OWN) -> None:
        self.own = own
        self._began: float | None = None
        self._misfits: set[tuple[str, str]] = set()
        """Id and incarnation of the agents of incompatible releases that were already logged."""
        self._known: dict[str, Peer] = {}
        self._living: defaultdict[Role, dict[str, Peer]] = defaultdict(dict)
        self._forgotten: dict[str, Peer] = {}
        """Forgotten agents that did not say goodbye, the latest last."""
        self._suspended_since: float | None = None
        self._next_sweep = 0.0
        self._is_run_over = False
        self.changed = Notifier()

    def receive(self, beat: Heartbeat) -> None:
        """Store a heartbeat. Three kinds of heartbeats are ignored: a heartbeat that is not newer than the stored
        heartbeat of the same incarnation; a heartbeat of an agent with an incompatible release, since that agent
        refuses to work here; and a heartbeat of a standby while the holder of its role's lock lives under the same id.

        Raises:
            FatalError: An agent that was here first has an incompatible release, so this agent must not work here.
        """
        if not self.own.fits(theirs := Compatibility.of(beat)):
            self._refuse(beat, theirs)
            return
        previous = self._known.get(beat.id)
        if previous and previous.beat.incarnation == beat.incarnation and previous.beat.seq >= beat.seq:
            return
        if previous and _is_standby(beat, previous.beat) and previous in self._running(previous.beat.role):
            return
        if previous:
            self._living[previous.beat.role].pop(beat.id, None)
        self._forgotten.pop(beat.id, None)
        peer = self._known[beat.id] = Peer(beat, asyncio.get_running_loop().time())
        if beat.state != "gone":
            self._living[beat.role][beat.id] = peer
        if peer.received >= self._next_sweep:
            self._forget(peer.received)
        self.changed.notify()

    @property
    def uptime(self) -> float:
        """Seconds since the first access to this property."""
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        return now - self._began

    def _refuse(self, beat: Heartbeat, theirs: Compatibility) -> None:
        if beat.has_ended:
            return
        reason = incompatibility_reason(self.own, beat.id, theirs)
        # the other agent is not younger than this agent, as far as known
        if beat.uptime is None or self.uptime < beat.uptime + HEARTBEAT_INTERVAL:
            raise FatalError(reason)
        if (beat.id, beat.incarnation) not in self._misfits:
            self._misfits.add((beat.id, beat.incarnation))
            log.error("agent_refused", agent=beat.id, reason=reason)

    def suspend(self) -> None:
        """Stop all leases until :meth:`refresh`, since no heartbeat arrives while this agent is disconnected."""
        if self._suspended_since is None:
            self._suspended_since = asyncio.get_running_loop().time()

    def refresh(self) -> None:
        """Restart the leases that were running at :meth:`suspend`. Expired leases stay expired until a heartbeat
        arrives.
        """
        if self._suspended_since is not None:
            now = asyncio.get_running_loop().time()
            for role in self._living:
                for peer in self._running(role):
                    peer.received = now
            self._suspended_since = None
        self.changed.notify()

    def alive(self, role: Role) -> list[Heartbeat]:
        """Return the heartbeats of the live agents of a role, sorted by id."""
        return sorted((peer.beat for peer in self._running(role)), key=lambda beat: beat.id)

    def _running(self, role: Role) -> list[Peer]:
        """Return the agents of a role with a running lease, and remove the others from the index of live agents."""
        now = asyncio.get_running_loop().time() if self._suspended_since is None else self._suspended_since
        living = self._living[role]
        running = [peer for peer in living.values() if now - peer.received < peer.beat.lease]
        if len(running) < len(living):
            self._living[role] = {peer.beat.id: peer for peer in running}
        return running

    def _forget(self, now: float) -> None:
        """Forget agents without a heartbeat for :data:`REMEMBERED_LEASES`; one sweep in each lease is enough."""
        self._next_sweep = now + HEARTBEAT_LEASE
        previous = self._known
        self._known = {
            name: peer
            for name, peer in previous.items()
            if now - peer.received < REMEMBERED_LEASES * max(peer.beat.lease, HEARTBEAT_LEASE)
        }
        forgotten = {name: peer for name, peer in previous.items() if name not in self._known}
        self._forgotten = dict([*self._forgotten.items(), *forgotten.items()][-UNHEARD:])

    def silent(self) -> list[tuple[Heartbeat, float]]:
        """Return the last heartbeats of agents that missed several heartbeats and did not say goodbye, each with the
        seconds since it was received. The longest silence comes first, with at most :data:`UNHEARD` agents. The list is
        empty while this agent is disconnected.
        """
        if self._suspended_since is not None:
            return []
        now = asyncio.get_running_loop().time()
        peers = [*self._forgotten.values(), *self._known.values()]
        quiet = [(peer.beat, now - peer.received) for peer in peers if not peer.beat.has_ended]
        return sorted((entry for entry in quiet if entry[1] >= SILENT_AFTER), key=lambda entry: -entry[1])[:UNHEARD]

    def remembered(self, role: Role) -> list[Heartbeat]:
        """Return the last heartbeats of agents of a role that did not say goodbye, including agents with an expired
        lease, until they are forgotten.
        """
        beats = (peer.beat for peer in self._known.values() if peer.beat.role == role)
        return [beat for beat in beats if not beat.has_ended]

    def latest(self, agent_id: str) -> Heartbeat | None:
        """Return the last heartbeat of an agent, alive or not; None once it is forgotten."""
        peer = self._known.get(agent_id)
        return peer.beat if peer else None

    def statuses(self, role: Role, status: type[S], *, without: str = "") -> list[S]:
        """Return the statuses of the live agents of a role, sorted by id, except for the agent ``without``.

        Args:
            role: The role.
            status: The class of its status.
            without: Id of an agent, usually the caller's.
        """
        details = (beat.detail for beat in self.alive(role) if beat.id != without)
        return [detail for detail in details if isinstance(detail, status)]

    def end_run(self) -> None:
        """Treat the run as finished from now on: its explorer is gone, and this agent missed its last heartbeats."""
        self._is_run_over = True
        self.changed.notify()

    @property
    def explorer(self) -> ExplorerStatus:
        """Status of the live explorer; default values without a live explorer. Among several, a status that reports the
        end of the run takes precedence, since the lease of a killed explorer may still run. After :meth:`end_run` the
        status always reports the end.
        """
        statuses = self.statuses("explorer", ExplorerStatus)
        status = next(
            (status for status in statuses if status.finished), statuses[-1] if statuses else ExplorerStatus()
        )
        return status.model_copy(update={"finished": True}) if self._is_run_over else status

    @property
    def trainer(self) -> TrainerStatus:
        """Status of the live trainer; default values without a live trainer."""
        return next(reversed(self.statuses("trainer", TrainerStatus)), TrainerStatus())


def _is_standby(beat: Heartbeat, previous: Heartbeat) -> bool:
    """Return whether ``beat`` comes from a process without its role's lock, and ``previous`` from another process that
    has the lock and the same agent id. Readers of the role's state must not see an empty state.
    """
    return beat.incarnation != previous.incarnation and _has_lock(previous.detail) and not _has_lock(beat.detail)


def _has_lock(status: AgentStatus) -> bool:
    """Return whether a status comes from an explorer that schedules, or from a trainer that trains."""
    match status:
        case ExplorerStatus():
            return bool(status.run_id)
        case TrainerStatus():
            return bool(status.generation)
    return False


class HeartbeatPublisher:
    """Publisher loop of heartbeats.

    Args:
        who: Id of the sending agent, for logs.
        make: Returns the heartbeats to send now, each with a higher ``seq`` than before.
    """

    def __init__(self, bus: Bus, topology: Topology, who: str, make: Callable[[], Iterable[Heartbeat]]) -> None:
        self._bus, self._topology, self._who, self._make = bus, topology, who, make
        self._due = asyncio.Event()
        self._sent = -math.inf
        """Loop time of the last heartbeat."""
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> None:
        """Send a heartbeat at once, since another agent may be waiting for its content."""
        self._due.set()

    def send_soon(self) -> None:
        """Send a heartbeat as soon as :data:`CHANGE_GAP` has passed since the last heartbeat."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._sent + CHANGE_GAP, loop.time()), self._due.set)

    async def run(self) -> None:
        """Send a heartbeat at each interval, on :meth:`now` and on :meth:`send_soon`, until cancelled."""
        while True:
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._sent = asyncio.get_running_loop().time()
            if self._bus.usable:
                await self.once()
            await asyncio.sleep(MIN_HEARTBEAT_GAP)
            try:
                async with asyncio.timeout(HEARTBEAT_INTERVAL):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def once(self) -> None:
        """Write the buffered spans to the trace, then send the heartbeats. A heartbeat that cannot be sent is dropped,
        since the next heartbeat replaces it.
        """
        flush_trace()
        try:
            for beat in self._make():
                key = f"beat.{beat.role}.{beat.id}"
                await self._bus.publish(self._topology.exchange("telemetry"), key, envelope(beat))
        except BusUnavailable as error:
            log.warning("heartbeat_not_sent", agent=self._who, reason=str(error))
