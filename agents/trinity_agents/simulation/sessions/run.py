"""A whole run in mode ``serve`` under a schedule: real gateways and their users next to the agents of every run."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from aiohttp import web_app

from trinity_agents.gateway import agent as gateway_agent
from trinity_agents.simulation.faulty_bus import FaultyBus
from trinity_agents.simulation.schedule import BrokerAlarm, BrokerRestart, ConnectionLoss, Drain, SessionLoad
from trinity_agents.simulation.scheduled_run import ScheduledRun
from trinity_agents.simulation.sessions.gateways import SimulatedClients, SimulatedGateway
from trinity_agents.simulation.sessions.users import Users
from trinity_mq.bus import Binding, Envelope, Queue, Topology
from trinity_mq.bus.memory.queues import Stored, StreamQueue
from trinity_mq.gateway import access
from trinity_mq.messages import Progress, decode
from trinity_mq.runtime.agent import Agent

EPOCH = 1e9
"""Start of every run in seconds since the epoch."""
LOG = "sessions-log"
"""Name of the stream, without the run's prefix, that keeps every session event."""
SETTLED_WITHIN = 500.0
"""Seconds after the end of all users within which their sessions are settled."""
SETTLE_SECONDS = 12.0
"""Seconds within which gateways have acted on all events after a fault is over. A restart of a gateway and a repeated
publish take less."""
FILLERS = 3
UNGROUPED = {"estimator": {"kind": "group", "baseline": "none", "scale": "none"}}


@dataclass
class SessionRun(ScheduledRun):
    """A run in mode ``serve``."""

    taskset: Callable[[], Any] | None = None
    recorded: tuple[str, ...] = ("tasks", "batches", "results", "ready", "sync")
    gateways: list[SimulatedGateway] = field(default_factory=list)
    """Every life of every gateway."""
    users: Users | None = None
    unsettled: list[str] = field(default_factory=list)
    """Ids of sessions that were not settled in time."""
    unlocked: list[str] = field(default_factory=list)
    """Descriptions of messages that only the acting gateway may publish, but that a gateway without the lock
    published."""
    ended_at: float | None = None
    """Virtual time in seconds at which the explorer announced the end of the run, None before."""
    log_at_end: int = 0
    """Length of the log of session events at the time :attr:`ended_at`."""
    log_lengths: list[tuple[float, int]] = field(default_factory=list)
    """(virtual time in seconds, length of the log of session events) at each publish of a gateway."""
    consumed_at: dict[str, float] = field(default_factory=dict)
    """Virtual time in seconds of the first report that a ticket was consumed, by ticket."""
    submitted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of publishes of a task, by (life of the gateway, submission id)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.topology = Topology("sim", sessions_max_bytes=self.sessions.max_bytes)
        self.clients = SimulatedClients(self.engines)

    @property
    def sessions(self) -> SessionLoad:
        """The session part of the schedule."""
        assert self.schedule.sessions is not None
        return self.schedule.sessions

    def settings(self) -> dict[str, Any]:
        """Return the schedule's configuration."""
        config, sessions = super().settings(), self.sessions
        if not sessions.grouped:
            config["algorithm"] |= UNGROUPED
        return {**config, "mode": "serve", "gateway": sessions.gateway(self.schedule.settings.repeat)}

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Seed the ids of sessions and keys, and give gateways the simulated clients of engines."""
        dice = random.Random(f"{self.schedule.seed}/ids")

        def drawn_id() -> str:
            return f"{dice.getrandbits(128):032x}"

        def drawn_key() -> str:
            return access.KEY_BEGINS + drawn_id()

        with (
            mock.patch.object(access, "new_session_id", drawn_id),
            mock.patch.object(access, "new_key", drawn_key),
            mock.patch.object(gateway_agent, "EngineClients", return_value=self.clients),
            # without aiohttp's cache, which keeps the last thousand routes and so their gateways, runs and open files
            mock.patch.object(web_app, "_cached_build_middleware", web_app._build_middlewares),  # noqa: SLF001
        ):
            yield

    def new_gateway(self, name: str) -> Agent:
        """Return a new gateway."""
        life = self.life("gateway", name)
        life.on_publish = self._published
        epoch: Callable[[], float] = lambda: EPOCH + asyncio.get_running_loop().time()  # noqa: E731  # short
        gateway = SimulatedGateway(self.config, bus=life, topology=self.topology, agent_id=name, clock=epoch)
        gateway.life = life
        self.gateways.append(gateway)
        return gateway

    def _published(self, life: FaultyBus, envelope: Envelope) -> None:
        """Record a publish of a gateway: the length of the event log, the submission of a task, and in :attr:`unlocked`
        a publish that needs the lock.
        """
        self.log_lengths.append((asyncio.get_running_loop().time(), len(self.log())))
        if envelope.kind == "task_submission":
            self.submitted[life.who, str(envelope.message_id)] += 1
        gateway = next(candidate for candidate in self.gateways if candidate.life is life)
        acts = envelope.kind in {"task_submission", "sessions_decided", "sessions_trained", "session_refused"}
        if acts and gateway.lock is None:
            self.unlocked.append(f"{life.who} published {envelope.kind} {envelope.message_id}")

    def new_explorer(self, name: str) -> Agent:
        """Return a new explorer. Its announcement of the end is recorded."""
        explorer = super().new_explorer(name)
        self.lives[-1].on_publish = self._announced
        return explorer

    def _announced(self, life: FaultyBus, envelope: Envelope) -> None:
        if envelope.kind == "run_end" and self.ended_at is None:
            self.ended_at = asyncio.get_running_loop().time()
            self.log_at_end = len(self.log())

    def new_trainer(self, name: str) -> Agent:
        """Return a new trainer. The times of its progress reports are recorded."""
        trainer = super().new_trainer(name)
        self.lives[-1].on_publish = self._consumed
        return trainer

    def _consumed(self, life: FaultyBus, envelope: Envelope) -> None:
        if envelope.kind == "progress":
            progress = decode(envelope.body, Progress)
            self.consumed_at.setdefault(progress.ticket, asyncio.get_running_loop().time())

    def living_gateways(self) -> Sequence[SimulatedGateway]:
        """Return the gateways that accept requests, including frozen gateways."""
        return [
            agent
            for _, agent in sorted(self.living.items())
            if isinstance(agent, SimulatedGateway) and agent.http is not None and not agent.life.dead
        ]

    async def record_messages(self) -> None:
        """Keep a copy of every message of the recorded exchanges. Keep all session events in a second stream, which has
        the same offsets as the sessions' stream and is not cut.
        """
        await super().record_messages()
        bus = await self.client()
        bindings = (Binding(self.topology.exchange("sessions"), "#"),)
        await bus.declare(
            self.topology.sessions, Queue(name=self.topology.prefix + LOG, kind="stream", bindings=bindings)
        )

    def log(self) -> list[Stored]:
        """Return all session events of the run in order, also the events that retention has removed from the stream."""
        queue = self.broker.queues[self.topology.prefix + LOG]
        assert isinstance(queue, StreamQueue)
        return queue.messages

    # -- facts for the invariants

    @property
    def gateways_at_end(self) -> list[SimulatedGateway]:
        """The last life of each gateway that ended by itself."""
        last = {gateway.id: gateway for gateway in self.gateways}
        return [gateway for gateway in last.values() if not gateway.life.dead and gateway.state == "finished"]

    def read_offset(self, gateway: SimulatedGateway) -> int:
        """Return the offset of the first event that a gateway has not read."""
        assert gateway.store is not None
        return gateway.store.next_offset

    def ended_before(self, offset: int) -> bool:
        """Return whether the run may have ended before gateways acted on the event at ``offset``."""
        if self.ended_at is None:
            return False
        acted_until = self.acted_until
        if acted_until == self.ended_at:
            return offset >= self.log_at_end
        return offset >= max((length for time, length in self.log_lengths if time <= acted_until), default=0)

    @property
    def acted_until(self) -> float:
        """Virtual time in seconds up to which the gateways acted on all events before the run ended.

        It is the end of the run, or earlier if a fault of a gateway or of the broker was over only shortly before.
        """
        if self.ended_at is None:
            return math.inf
        over = [time for role, time in self.faults.hits if role == "gateway"]
        for fault in self.schedule.faults:
            if isinstance(fault, Drain | ConnectionLoss) and fault.role != "gateway":
                continue
            if isinstance(fault, Drain | ConnectionLoss | BrokerRestart | BrokerAlarm) and fault.at <= self.seconds:
                over.append(fault.at if isinstance(fault, Drain) else fault.at + fault.seconds)
        limit = self.ended_at - SETTLE_SECONDS
        return self.ended_at if max(over, default=0.0) < limit else limit

    @property
    def is_cut(self) -> bool:
        """True if retention has cut the beginning of the session stream."""
        queue = self.broker.queues[self.topology.sessions.name]
        assert isinstance(queue, StreamQueue)
        return queue.end > queue.depth

    @property
    def no_gateway_finished(self) -> bool:
        """True if no gateway ended by itself."""
        return not self.gateways_at_end

    def further(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start the gateways and their users. Return the tasks of the gateways."""
        group.create_task(self._run_users())
        return [group.create_task(self.keep(f"gateway-{n}", self.new_gateway)) for n in range(self.sessions.gateways)]

    async def _run_users(self) -> None:
        """Run the users until the run is over."""
        live, over = asyncio.create_task(self._play_users()), asyncio.create_task(self.over.wait())
        await asyncio.wait([live, over], return_when=asyncio.FIRST_COMPLETED)
        for task in (live, over):
            task.cancel()
        await asyncio.wait([live, over])
        if not live.cancelled():
            live.result()

    async def _play_users(self) -> None:
        self.users = users = Users(
            self.sessions,
            self.schedule.settings.repeat,
            random.Random(f"{self.schedule.seed}/users"),
            self.living_gateways,
            await self.client(),
            self.topology,
            lambda what: self.observer.note("users", "", what),
        )
        async with asyncio.TaskGroup() as beside:
            noise = beside.create_task(users.noise()) if self.sessions.noise else None
            async with asyncio.TaskGroup() as group:
                for number in range(self.sessions.users):
                    group.create_task(users.user(number))
            if noise is not None:
                noise.cancel()
            await self._until_settled(users)
            for _ in range(FILLERS):
                beside.create_task(users.filler())

    async def _until_settled(self, users: Users) -> None:
        """Wait until each session of the users is settled at some gateway, for at most :data:`SETTLED_WITHIN` seconds.
        Set :attr:`unsettled`.
        """
        names = [diary.id for diary in users.diaries if diary.is_kept]
        deadline = asyncio.get_running_loop().time() + SETTLED_WITHIN
        while (unsettled := self._unsettled(names)) and asyncio.get_running_loop().time() < deadline:
            names = unsettled
            await asyncio.sleep(1.0)
        self.unsettled = unsettled

    def _unsettled(self, names: Sequence[str]) -> list[str]:
        stores = [gateway.store for gateway in self.living_gateways() if gateway.store is not None]
        return [name for name in names if not any(_is_settled(store, name) for store in stores)]


def _is_settled(store: Any, name: str) -> bool:
    session = store.ledger.get(name)
    return session is not None and bool(session.is_settled)
