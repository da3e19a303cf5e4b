"""An observer of a running run. It listens to heartbeats, sync events, manifests and the streams."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.bus.retry import retrying
from trinity_mq.bus.topology import Queue
from trinity_mq.messages import (
    DecodeError,
    EngineStatus,
    Heartbeat,
    Progress,
    SyncEvent,
    TrainerStatus,
    Version,
    decode_any,
)
from trinity_mq.observability.run_state import RunState
from trinity_mq.proof.chaos.points import PointWatch
from trinity_mq.proof.record import VersionSeen
from trinity_mq.runtime.deliveries import EXPERIENCES, REFERENCE, acknowledge
from trinity_mq.runtime.notify import Notifier

LISTENS = (
    ("telemetry", "beat.#"),
    *((name, "#") for name in ("sync", "batches", "results", "ready", "sessions")),
)
"""Exchanges and routing patterns to listen to."""


@dataclass
class RunObserver:
    """Collects observations of a run from its messages. Times are in seconds of the event loop's clock."""

    points: PointWatch = field(default_factory=PointWatch)
    state: RunState = field(default_factory=lambda: RunState("chaos"))
    """The run's state, from its heartbeats."""
    lives: set[tuple[str, str]] = field(default_factory=set)
    """Agents and their lives, as ``(agent, life)``, that have sent heartbeats."""
    progress: int = 0
    """Maximum number of batches that the trainer has reported as consumed."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the trainer consumed a batch, each with the highest progress so far. A batch repeated after a
    restart counts again."""
    commits: list[VersionSeen] = field(default_factory=list)
    """Commits of weight versions that sync events announced."""
    committed: list[VersionSeen] = field(default_factory=list)
    """Changes of the committed version in trainers' heartbeats."""
    served: list[VersionSeen] = field(default_factory=list)
    """Changes of the version that each engine life serves."""
    reachable: bool = True
    broker_back: float = 0.0
    """Time at which the connection to the broker was last restored. 0: it was never lost."""
    changed: Notifier = field(default_factory=Notifier)
    on_beat: Callable[[Heartbeat, float], None] = lambda _beat, _at: None
    on_step: Callable[[float], None] = lambda _at: None
    _last: dict[str, Version] = field(default_factory=dict)
    _position: tuple[int, int] = (0, 0)
    """The trainer's generation and progress."""

    def receive(self, message: object, at: float) -> None:
        """Process a decoded message."""
        match message:
            case Heartbeat() if self.state.receive(message, at):
                self._beat(message, at)
            case Progress():
                self._step(message.generation, message.progress, at, is_step=True)
            case SyncEvent(verb="commit", version=version) if version is not None:
                self.commits.append(VersionSeen(at, message.sender, version))
        self.points.receive(message)
        self.changed.notify()

    def receive_chunk(self, ticket: object, processing: object) -> None:
        """Process the headers of a chunk of a processed batch."""
        self.points.receive_chunk(ticket, processing)
        self.changed.notify()

    def bus_changed(self, usable: bool, at: float) -> None:
        """Record that the broker became unavailable or available."""
        if usable and not self.reachable:
            self.broker_back = at
        self.reachable = usable
        self.changed.notify()

    def _beat(self, beat: Heartbeat, at: float) -> None:
        status, life = beat.detail, life_of(beat)
        if isinstance(status, EngineStatus):
            self._version(self.served, f"{beat.id} {life}", status.version, at)
        elif isinstance(status, TrainerStatus):
            self._version(self.committed, "committed", status.committed, at)
            if status.progress is not None:
                self._step(status.generation, status.progress, at, is_step=status.generation == self._position[0])
        self.lives.add((beat.id, life))
        self.on_beat(beat, at)

    def _step(self, generation: int, progress: int, at: float, *, is_step: bool) -> None:
        if (generation, progress) <= self._position:
            return
        self._position = generation, progress
        self.progress = max(self.progress, progress)
        if is_step:
            self.steps.append((at, self.progress))
            self.on_step(at)

    def _version(self, sightings: list[VersionSeen], who: str, version: Version | None, at: float) -> None:
        if version is not None and self._last.get(who) != version:
            self._last[who] = version
            sightings.append(VersionSeen(at, who, version))


def life_of(beat: Heartbeat) -> str:
    """Return the identity of the process behind a heartbeat: its incarnation; for an engine also its number of
    restarts.
    """
    detail = beat.detail
    return f"{beat.incarnation}/{detail.restarts}" if isinstance(detail, EngineStatus) else beat.incarnation


async def watch(bus: Bus, topology: Topology, witness: RunObserver) -> None:
    """Pass published messages to the witness until cancelled. Messages during a broker outage are not seen."""
    loop = asyncio.get_running_loop()
    bus.on_change(lambda: witness.bus_changed(bus.usable, loop.time()))
    life = uuid.uuid4().hex[:12]
    async with asyncio.TaskGroup() as group:
        for exchange, pattern in LISTENS:
            queue = topology.listener("chaos", life, exchange, pattern)
            group.create_task(_listen(bus, queue, witness), name=f"watch {exchange}")


async def _listen(bus: Bus, queue: Queue, witness: RunObserver) -> None:
    clock = asyncio.get_running_loop().time
    async for attempt in retrying(BusUnavailable):
        with attempt:
            await bus.declare(queue)
            async with await bus.consume(queue) as subscription:
                async for delivery in subscription:
                    if delivery.content_type in {EXPERIENCES, REFERENCE}:
                        witness.receive_chunk(delivery.headers.get("ticket"), delivery.headers.get("op"))
                    else:
                        # the invariants report undecodable messages when they read the streams
                        with contextlib.suppress(DecodeError):
                            witness.receive(decode_any(delivery.body, delivery.content_type), clock())
                    await acknowledge(delivery)
