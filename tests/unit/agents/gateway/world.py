"""Gateways of one run on MemoryBus in virtual time, beside an explorer and a trainer that do what theirs would."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from trinity_agents.gateway.acting_gateway import ActingGateway
from trinity_agents.gateway.session_stream import SessionStream
from trinity_mq.bus import Envelope, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config import Config
from trinity_mq.gateway.session import Session
from trinity_mq.messages import (
    Progress,
    SampledChoice,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SubmissionOutcome,
    TaskSubmission,
    decode,
)
from trinity_mq.runtime.deliveries import envelope

HOUR = 3600.0
RUN = "world"
SMALL = 40_000
"""Bytes that a stream keeps."""


def config(**gateway: Any) -> Config:
    return Config.model_validate(
        {
            "name": RUN,
            "mode": "serve",
            "model": {"tiny": {}},
            "algorithm": {"repeat_times": 1, "estimator": {"kind": "group", "baseline": "none", "scale": "none"}},
            "gateway": gateway,
        }
    )


class Killed(Exception):
    """The process that publishes dies here."""


class DyingBus(MemoryBus):
    """A bus whose process dies at its n-th publish, before or after the broker has it."""

    dies_at: int | None = None
    keeps_last = False
    published = 0

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        self.published += 1
        if self.dies_at == self.published:
            if self.keeps_last:
                await super().publish(exchange, routing_key, envelope, timeout=timeout)
            raise Killed(envelope.kind)
        return await super().publish(exchange, routing_key, envelope, timeout=timeout)


class World:
    def __init__(self, settings: Config | None = None, *, sessions_max_bytes: int = 1 << 30) -> None:
        self.config = settings or config()
        self.broker = MemoryBroker()
        self.topology = Topology(RUN, sessions_max_bytes=sessions_max_bytes)
        self.accepted: dict[str, TaskSubmission] = {}
        """Tasks that the explorer took, by id."""
        self.submissions = 0
        """Messages that it got, repeats included."""
        self.headers: list[Mapping[str, object]] = []
        """Of these messages."""
        self.answers = True
        """It closes batches and the trainer trains on them."""
        self.dead: list[str] = []
        self.ahead = 0.0
        """Seconds by which the clock of the gateways has jumped."""
        self._calls = itertools.count()

    def clock(self) -> float:
        return 1e9 + asyncio.get_running_loop().time() + self.ahead

    def bus(self, kind: type[MemoryBus] = MemoryBus) -> Any:
        return kind(self.broker, self.topology, config=self.config.broker)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[MemoryBus]:
        """Run explorer and trainer; yield a bus of somebody outside."""
        async with self.alone() as bus, asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in (self._explore(bus), self._bury(bus))]
            yield bus
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[MemoryBus]:
        """Yield a bus of somebody outside, without an explorer and a trainer."""
        bus = self.bus()
        await bus.connect()
        await bus.declare(*self.topology.durable, self.topology.sessions)
        yield bus
        await bus.close()

    async def _explore(self, bus: MemoryBus) -> None:
        async with await bus.consume(self.topology.submitted) as feed:
            async for delivery in feed:
                message = decode(delivery.body, TaskSubmission)
                self.submissions += 1
                self.headers.append(delivery.headers)
                is_new = message.submission_id not in self.accepted
                self.accepted.setdefault(message.submission_id, message)
                await delivery.ack()
                if self.answers and is_new:
                    await self.close_batch(bus, message)

    async def close_batch(self, bus: MemoryBus, message: TaskSubmission) -> None:
        number = len(self.accepted)
        ticket = f"ticket-{message.submission_id}"
        outcome = SubmissionOutcome(
            submission_id=message.submission_id,
            batch=number,
            ticket=ticket,
            outcome="finished",
            completed_runs=message.task.repeat_times,
        )
        exchange = self.topology.exchange
        await bus.publish(exchange("sessions"), "outcome", envelope(outcome, message_id=f"outcome-{number}"))
        progress = Progress(progress=number, generation=1, step=number, batch=number, ticket=ticket, outcome="trained")
        await bus.publish(exchange("results"), str(number), envelope(progress, message_id=f"progress-{number}"))

    async def _bury(self, bus: MemoryBus) -> None:
        async with await bus.consume(self.topology.dead) as feed:
            async for delivery in feed:
                self.dead.append(str(delivery.headers["dead-reason"]))
                await delivery.ack()

    @contextlib.asynccontextmanager
    async def gateway(
        self, *, acts: bool = True, bus: MemoryBus | None = None, kind: type[SessionStream] = SessionStream
    ) -> AsyncIterator[SessionStream]:
        """Run one gateway without its HTTP server."""
        bus = bus or self.bus()
        await bus.connect()
        try:
            async with asyncio.TaskGroup() as group:
                store = self.stream(bus, group, kind)
                tasks = [group.create_task(store.follow())]
                await store.changed.until(store.is_ready)
                if acts:
                    tasks.append(group.create_task(self.acting(bus, store).run()))
                try:
                    yield store
                finally:
                    for task in tasks:
                        task.cancel()
        finally:
            await bus.close()

    def stream(
        self, bus: MemoryBus, tasks: asyncio.TaskGroup, kind: type[SessionStream] = SessionStream, **limits: Any
    ) -> SessionStream:
        return kind(bus, self.topology, record_timeout=2.0, tasks=tasks, clock=self.clock, **limits)

    def acting(self, bus: MemoryBus, store: SessionStream, **how: Any) -> ActingGateway:
        return ActingGateway(
            self.config, bus, self.topology, store, **{"agent_id": "gateway-0", "clock": self.clock, **how}
        )

    async def session(
        self, store: SessionStream, name: str, *, calls: int = 1, size: int = 2, traceparent: str = "", **fields: Any
    ) -> None:
        given = {"idle_ttl": HOUR, "reward_ttl": 24 * HOUR, "opened": self.clock(), **fields}
        await store.open(SessionOpened(session=name, **given))
        for _ in range(calls):
            assert await store.record(self.call(name, size, traceparent))

    def call(self, session: str, size: int, traceparent: str = "") -> SessionCall:
        choice = SampledChoice(ids=[1] * size, logprobs=[0.0] * size, finish_reason="stop")
        name = f"call-{next(self._calls)}"
        return SessionCall(
            session=session, call=name, at=self.clock(), prompt=[2], choices=[choice], traceparent=traceparent
        )


async def until(store: SessionStream, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        await store.changed.until(holds)


def session_of(store: SessionStream, name: str) -> Session:
    session = store.ledger.get(name)
    assert session is not None
    return session


def state(store: SessionStream, name: str) -> str:
    return str(session_of(store, name).state)


async def reaches(store: SessionStream, name: str, wanted: str, seconds: float = 60.0) -> None:
    """Wait until a session is in a state."""
    await until(store, lambda: state(store, name) == wanted, seconds)


async def end(store: SessionStream, name: str, reward: float | None = 1.0, **fields: Any) -> None:
    await store.report(SessionEnd(session=name, reward=reward, **fields), f"end-{name}")


async def live_on(world: World, store: SessionStream, rounds: int = 60) -> None:
    """Have sessions come and go, so that retention cuts several times what the stream keeps."""
    for number in range(rounds):
        await world.session(store, f"x{number}", size=100, record="eval")
        await end(store, f"x{number}")
        await reaches(store, f"x{number}", "evaluated")
