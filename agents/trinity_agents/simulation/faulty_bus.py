"""A bus connection that injects a schedule's faults into one life of an agent. At the fault points that the agent
passes, it may be killed, frozen or delayed, or publish twice.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any, Never

from trinity_agents.simulation.schedule import (
    Delay,
    FaultSchedule,
    Freeze,
    Jitter,
    Kill,
    LostConfirm,
    RepeatedPublishes,
    Role,
)
from trinity_mq.bus import Consumer, Delivery, Envelope, Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config.bus import BrokerConfig
from trinity_mq.testing.virtual_time import OWNER, VirtualTimeLoop

QUIET = {"beat", "metrics"}
"""Message kinds without fault points. Nearly all traffic is heartbeats, so nearly all faults would hit heartbeats."""
UNTOLD = {"weights.join"}
"""Routing keys omitted from the trail, because their messages repeat endlessly."""
NOTICED = 20.0
"""Seconds after which the broker drops the connection of a frozen client: twice ``broker.heartbeat``."""
RECONNECT = 0.05
"""Seconds that a client needs to reconnect."""
REPEAT_SECONDS = (0.0, 0.1, 0.3)
"""Possible seconds after which a publisher repeats an unconfirmed message."""
MOST_LATE = 1.0
"""Maximum seconds by which jitter delays a delivery."""
TRAIL = 60
"""Number of last events in the report of a violation."""

PointFault = Kill | Freeze | LostConfirm | Delay


class Faults:
    """The connection faults of a schedule, the number of fault points that each role has passed, and the last events of
    the run.
    """

    def __init__(self, schedule: FaultSchedule) -> None:
        self.dice = random.Random(f"{schedule.seed}/run")
        """Random generator for decisions that depend on the agents' behaviour."""
        self.trail: deque[tuple[float, str, str]] = deque(maxlen=TRAIL)
        """The last events as (time, agent, text)."""
        self.hits: list[tuple[str, float]] = []
        """(role, virtual time in seconds at which the fault is over) of each fault that happened at a point."""
        self.passed: Counter[str] = Counter()
        """Number of passed fault points by role."""
        self._due: defaultdict[str, dict[int, list[PointFault]]] = defaultdict(dict)
        jitter = [fault for fault in schedule.faults if isinstance(fault, Jitter)]
        self._late_share, self._mean_delay = max(((fault.share, fault.mean) for fault in jitter), default=(0.0, 1.0))
        self._repeat_share = max(
            (fault.share for fault in schedule.faults if isinstance(fault, RepeatedPublishes)), default=0.0
        )
        for fault in schedule.faults:
            if isinstance(fault, PointFault):
                self._due[fault.role].setdefault(fault.point, []).append(fault)

    def note(self, who: str, text: str) -> None:
        """Add an event to the trail."""
        self.trail.append((asyncio.get_running_loop().time(), who, text))

    def next_point(self, role: str) -> list[PointFault]:
        """Count a fault point of a role and return the faults that happen there."""
        point = self.passed[role]
        self.passed[role] = point + 1
        return self._due[role].pop(point, [])

    def next_delay(self) -> float:
        """Draw the delay of the next operation or delivery in seconds; 0 unless jitter hits it."""
        return (
            self.dice.expovariate(1 / self._mean_delay)
            if self._late_share and self.dice.random() < self._late_share
            else 0.0
        )

    def is_repeated(self) -> bool:
        """Draw whether the next publish loses its confirm."""
        return bool(self._repeat_share) and self.dice.random() < self._repeat_share


class FaultyBus(MemoryBus):
    """The faulty connection of one life of an agent.

    Args:
        broker: The broker to connect to.
        topology: Names of the run's queues and exchanges.
        config: Settings of the connection.
        faults: The faults to inject.
        role: Role of the agent.
        who: The agent's id, followed by one ``'`` for each earlier life.
        on_end: Called with ``killed``, ``frozen`` or ``thawed`` when the agent is killed, frozen or thawed.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        topology: Topology,
        config: BrokerConfig,
        faults: Faults,
        role: Role,
        who: str,
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(broker, topology, config=config)
        self.faults, self.role, self.who = faults, role, who
        self.life: asyncio.Task[None] | None = None
        """The agent's task. None: not started."""
        self.dead = False
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.died_at: str | None = None
        self._on_end = on_end
        self.on_publish: Callable[[FaultyBus, Envelope], None] | None = None
        """Called with each publish before the broker receives it."""
        self._unconfirmed: list[float] = []
        """Confirms that the next publishes lose, each as the seconds after which the publish is repeated."""

    @property
    def lives(self) -> bool:
        """True while the agent runs, also while it is frozen."""
        return self.life is not None and not self.life.done() and not self.dead

    def begin(self, agent: Callable[[], Any]) -> asyncio.Task[None]:
        """Run an agent in its own context, so that it can be frozen."""
        context = contextvars.copy_context()
        context.run(OWNER.set, self.who)
        self.life = asyncio.get_running_loop().create_task(agent(), name=self.who, context=context)
        return self.life

    def kill(self) -> None:
        """Kill the agent as SIGKILL does: none of its code runs any more, not even ``finally`` blocks."""
        if self.lives:
            self._on_end("killed")
            self.dead = True
            self.disconnect("killed")
            _loop().freeze(self.who)
            self.killed.set_result(None)

    def freeze(self, seconds: float) -> None:
        """Stop the agent for ``seconds``. The broker notices after :data:`NOTICED` seconds."""
        loop = _loop()
        if not self.lives or loop.is_frozen(self.who):
            return
        self._on_end("frozen")
        loop.freeze(self.who)
        outside = contextvars.Context()
        if seconds > NOTICED:
            loop.call_later(NOTICED, self._drop_connection, context=outside)
        loop.call_later(seconds, self._thaw, loop, context=outside)

    def _drop_connection(self) -> None:
        if self.lives:
            self._broker.drop(self, delay=None)

    def _thaw(self, loop: VirtualTimeLoop) -> None:
        if not self.dead:
            loop.thaw(self.who)
        if self.lives:
            self._on_end("thawed")
            self.reconnect_in(RECONNECT)  # the agent must first notice the lost connection

    async def point(self, name: str) -> None:
        """Pass a fault point called ``name``: inject the faults that are due there. Code of a killed agent waits here
        forever.
        """
        if self.dead:
            await forever()
        for fault in self.faults.next_point(self.role):
            if self.lives:
                self.faults.note(self.who, f"{fault} happens: {name}")
                await self._inject(fault, name)
        if self.dead:
            await forever()

    async def _inject(self, fault: PointFault, name: str) -> None:
        seconds = 0.0 if isinstance(fault, Kill) else fault.seconds
        self.faults.hits.append((self.role, asyncio.get_running_loop().time() + seconds))
        if isinstance(fault, Kill):
            self.died_at = name
            self.kill()
        elif isinstance(fault, Freeze):
            self.freeze(fault.seconds)
            await asyncio.sleep(0)
        elif isinstance(fault, LostConfirm):
            self._unconfirmed.append(fault.seconds)
        else:
            await asyncio.sleep(fault.seconds)

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        """Publish a message, possibly late and possibly twice. Messages of kinds in :data:`QUIET` have no faults."""
        if envelope.kind in QUIET:
            return await super().publish(exchange, routing_key, envelope, timeout=timeout)
        await self.point(f"before publishing {envelope.kind}")
        await self._delay()
        if self.on_publish is not None:
            self.on_publish(self, envelope)
        routed = await super().publish(exchange, routing_key, envelope, timeout=timeout)
        if routing_key not in UNTOLD:
            self.faults.note(self.who, f"published {envelope.kind} {routing_key} {envelope.message_id or ''}")
        await self.point(f"published {envelope.kind}")
        repeat_after = self._unconfirmed.pop() if self._unconfirmed else None
        if repeat_after is None and self.faults.is_repeated():
            repeat_after = self.faults.dice.choice(REPEAT_SECONDS)
        if repeat_after is not None:
            await asyncio.sleep(repeat_after)
            routed = await super().publish(exchange, routing_key, envelope, timeout=timeout)
        await self._delay()
        await self.point(f"{envelope.kind} confirmed")
        return routed

    async def declare(self, *queues: Queue) -> None:
        """Declare queues, possibly late."""
        await self._step("declare", queues[0] if len(queues) == 1 else None)
        await super().declare(*queues)

    async def unbind(self, queue: Queue) -> None:
        """Unbind a queue, possibly late."""
        await self._step("unbind", queue)
        await super().unbind(queue)
        await self.point("unbound")

    async def delete(self, name: str) -> None:
        """Delete a queue."""
        await self.point("delete")
        await super().delete(name)
        await self.point("deleted")

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        """Consume a queue. Deliveries may be late, unless the queue is exclusive."""
        await self._step("consume", queue)
        consumer = await super().consume(queue, prefetch=prefetch, offset=offset)
        return LateConsumer(self, consumer) if queue.kind != "exclusive" else consumer

    async def _step(self, name: str, queue: Queue | None) -> None:
        await self.point(name if queue is None else f"{name} {queue.name}")
        await self._delay()

    async def _delay(self) -> None:
        if seconds := self.faults.next_delay():
            await asyncio.sleep(seconds)


class LateConsumer(Consumer):
    """A consumer with late deliveries. The agent passes a fault point when a delivery that it awaits arrives, and two
    fault points when it acknowledges a delivery of a queue that is not a stream.
    """

    def __init__(self, bus: FaultyBus, consumer: Consumer) -> None:
        self._bus, self._consumer = bus, consumer
        self._pending: Delivery | None = None
        """A delivery that was received but not handed over, because the waiting caller was cancelled."""

    async def __anext__(self) -> Delivery:
        if self._pending is None:
            if seconds := self._bus.faults.next_delay():
                await asyncio.sleep(min(MOST_LATE, seconds))
            self._pending = await self._consumer.__anext__()
        await self._bus.point(f"received {self._pending.kind}")
        return self._hand_over(self._pending)

    def get_nowait(self) -> Delivery | None:
        """Return the next delivery that has arrived, or None."""
        delivery = self._pending or self._consumer.get_nowait()
        return None if delivery is None else self._hand_over(delivery)

    async def stop(self) -> None:
        """Stop deliveries."""
        await self._consumer.stop()

    async def close(self) -> None:
        """Close the consumer; its unacknowledged deliveries return to the queue."""
        await self._consumer.close()

    def _hand_over(self, delivery: Delivery) -> Delivery:
        self._pending = None
        if delivery.offset is None:
            # an acknowledgement is a fault point, too
            delivery.ack = _acknowledging(self._bus, delivery)  # type: ignore[method-assign]
        return delivery


def _acknowledging(bus: FaultyBus, delivery: Delivery) -> Callable[[], Coroutine[Any, Any, None]]:
    ack = delivery.ack

    async def acked() -> None:
        await bus.point(f"before acknowledging {delivery.kind}")
        await ack()
        await bus.point(f"{delivery.kind} acknowledged")

    return acked


def _loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


async def forever() -> Never:
    """Wait forever, as the code of a killed agent does."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")
