"""Faults by lot: a bus that is slow, repeats itself and kills its agent, and the lots that one seed draws for a run."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Never

from trinity_mq.bus import Consumer, Delivery, Envelope, Queue, Topology
from trinity_mq.bus.memory.bus import MemoryBroker, MemoryBus
from trinity_mq.config.bus import BrokerConfig

QUIET = {"beat", "metrics"}
"""Kinds that count for no point: nearly all traffic is beats, and nearly all deaths would be at one."""
POINTS = {"explorer": 160, "runner": 120, "operator": 110, "trainer": 60}
"""About as many points of violence a role passes in a run; a death drawn beyond is not died."""


@dataclass
class Lots:
    """What one seed draws: how often what goes wrong, who dies at which of its steps, when the network fails."""

    seed: int
    dice: random.Random = field(init=False)
    slow: float = field(init=False)
    """Share of operations that are delayed."""
    longest: float = field(init=False)
    """Mean of a delay, seconds."""
    doubled: float = field(init=False)
    """Share of publishes whose confirm is lost, so that they are done twice."""
    failing: float = field(init=False)
    """Share of runs whose workflow fails, on every attempt."""
    deaths: dict[str, list[int]] = field(init=False)
    """By role: after how many points one of that role dies, counted from the death before."""
    cuts: list[tuple[float, float]] = field(init=False)
    """When a connection is lost, and for how long."""
    alarms: list[tuple[float, float]] = field(init=False)
    """When the broker blocks publishers, and for how long."""
    restarts: list[float] = field(init=False)
    """When the broker restarts: every connection is lost at once."""
    drains: list[float] = field(init=False)
    """When an agent is asked to end, and another started in its place."""

    def __post_init__(self) -> None:
        dice = self.dice = random.Random(self.seed)
        self.slow, self.longest = dice.choice([0.0, 0.1, 0.5]), dice.choice([0.01, 0.1, 0.6])
        self.doubled = dice.choice([0.0, 0.05, 0.3])
        self.failing = dice.choice([0.0, 0.0, 0.1, 0.4])
        roles = dice.choices(list(POINTS), weights=[3, 4, 3, 1], k=dice.randrange(6))
        self.deaths = {role: [dice.randrange(POINTS[role]) for _ in range(roles.count(role))] for role in POINTS}
        self.cuts = [(dice.uniform(0, 12), dice.choice([0.3, 3.0, 15.0, 70.0])) for _ in range(dice.randrange(3))]
        self.alarms = [(dice.uniform(0, 12), dice.choice([0.5, 5.0, 40.0])) for _ in range(dice.randrange(2))]
        self.restarts = [dice.uniform(0, 12) for _ in range(dice.choice([0, 0, 1]))]
        self.drains = [dice.uniform(0, 12) for _ in range(dice.choice([0, 0, 1, 3]))]

    def fails(self, batch: object, task: int, run: int) -> bool:
        """Say whether this run's workflow fails; the same answer on each attempt."""
        return random.Random(f"{self.seed}/{batch}/{task}/{run}").random() < self.failing

    def delay(self) -> float:
        """Return seconds, mostly none."""
        return self.dice.expovariate(1 / self.longest) if self.dice.random() < self.slow else 0.0

    def dies(self, role: str) -> bool:
        """Count a point of a role; say whether one of it dies there."""
        left = self.deaths[role]
        if not left:
            return False
        left[0] -= 1
        if left[0] >= 0:
            return False
        left.pop(0)
        return True


class FaultyBus(MemoryBus):
    """The connection of one agent's life. At a point drawn by lot it ends with its agent, as by SIGKILL: nothing
    that the agent does afterwards reaches anybody.
    """

    def __init__(self, broker: MemoryBroker, topology: Topology, config: BrokerConfig, lots: Lots, role: str) -> None:
        super().__init__(broker, topology, config=config)
        self.lots, self.role = lots, role
        self.life: asyncio.Task[None] | None = None
        """The agent's task, known once it runs."""
        self.dead = False
        self.died_at: str | None = None

    def kill(self) -> None:
        """End the agent without a chance to clean up."""
        if self.life is not None and not self.life.done() and not self.dead:
            self.dead = True
            self.disconnect("killed")
            self.life.cancel()

    async def point(self, name: str) -> None:
        """Pass a point at which the agent may die, and after its death none."""
        if not self.dead and self.lots.dies(self.role):
            self.died_at = name
            self.kill()
        if self.dead:
            await forever()

    async def publish(
        self, exchange: str, routing_key: str, envelope: Envelope, *, timeout: float | None = None
    ) -> bool:
        if envelope.kind in QUIET:
            return await super().publish(exchange, routing_key, envelope, timeout=timeout)
        await self.point(f"before {envelope.kind}")
        await self._dawdle()
        routed = await super().publish(exchange, routing_key, envelope, timeout=timeout)
        await self.point(f"published {envelope.kind}")
        if self.lots.dice.random() < self.lots.doubled:
            await asyncio.sleep(self.lots.dice.choice([0.0, 0.1, 0.3]))
            routed = await super().publish(exchange, routing_key, envelope, timeout=timeout)
        await self._dawdle()
        await self.point(f"confirmed {envelope.kind}")
        return routed

    async def declare(self, *queues: Queue) -> None:
        await self._step("declare", queues[0] if len(queues) == 1 else None)
        await super().declare(*queues)

    async def unbind(self, queue: Queue) -> None:
        await self._step("unbind", queue)
        await super().unbind(queue)
        await self.point("unbound")

    async def delete(self, name: str) -> None:
        await self.point("delete")
        await super().delete(name)
        await self.point("deleted")

    async def consume(self, queue: Queue, *, prefetch: int = 0, offset: int | None = None) -> Consumer:
        await self._step("consume", queue)
        feed = await super().consume(queue, prefetch=prefetch, offset=offset)
        return SlowFeed(self, feed) if queue.kind != "exclusive" else feed

    async def _step(self, name: str, queue: Queue | None) -> None:
        await self.point(name if queue is None else f"{name} {queue.name.rpartition('.')[0]}")
        await self._dawdle()

    async def _dawdle(self) -> None:
        seconds = self.lots.delay()
        if seconds:
            await asyncio.sleep(seconds)


class SlowFeed(Consumer):
    """Deliveries that take their time, each a point on arrival and two at its acknowledgement."""

    def __init__(self, bus: FaultyBus, feed: Consumer) -> None:
        self._bus, self._feed = bus, feed

    async def __anext__(self) -> Delivery:
        # before it is taken: who gives up waiting must not have taken it
        await asyncio.sleep(min(1.0, self._bus.lots.delay()))
        return await self._pointed(await self._feed.__anext__())

    def get_nowait(self) -> Delivery | None:
        found = self._feed.get_nowait()
        return None if found is None else self._watched(found)

    async def stop(self) -> None:
        await self._feed.stop()

    async def close(self) -> None:
        await self._feed.close()

    async def _pointed(self, delivery: Delivery) -> Delivery:
        await self._bus.point(f"received {delivery.kind}")
        return self._watched(delivery)

    def _watched(self, delivery: Delivery) -> Delivery:
        ack, bus = delivery.ack, self._bus

        async def acked() -> None:
            await bus.point(f"ack {delivery.kind}")
            await ack()
            await bus.point(f"acked {delivery.kind}")

        if delivery.offset is None:
            delivery.ack = acked  # type: ignore[method-assign]  # whoever answers it passes the points
        return delivery


async def forever() -> Never:
    """Wait until cancelled."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def told(lots: Lots) -> dict[str, Any]:
    """Return what was drawn, for a person who looks into a failure."""
    return {name: value for name, value in vars(lots).items() if name != "dice"}
