"""The heartbeats of a Scheduler, and its subscription to the heartbeats of runners."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Iterable

from trinity_mq.bus import Bus, Delivery, Topology
from trinity_mq.messages import Heartbeat, Role, SchedulerStatus
from trinity_mq.runtime.deliveries import acknowledge, decode_or_dead_letter, handle_or_set_aside
from trinity_mq.runtime.peers import HEARTBEAT_LEASE, HeartbeatPublisher, Peers, heartbeat_patterns

ROLE: Role = "scheduler"


class SchedulerHeartbeats:
    """Publishes the open tickets every two seconds and on change, so that runners drop other slices. Receives the
    runners' heartbeats.

    Args:
        open_tickets: Returns the ids of the open tickets.
        peers: Receives the runners' heartbeats.
    """

    def __init__(self, bus: Bus, topology: Topology, open_tickets: Callable[[], list[str]], peers: Peers) -> None:
        self._bus, self._topology, self._open_tickets, self._peers = bus, topology, open_tickets, peers
        self.id = f"{ROLE}-{uuid.uuid4().hex[:8]}"
        self.seq = 0
        self._incarnation = uuid.uuid4().hex[:12]
        self._subscription = topology.listener(self.id, self._incarnation, "telemetry", *heartbeat_patterns(ROLE))
        self._publisher = HeartbeatPublisher(bus, topology, self.id, self._make)
        bus.on_change(self._bus_changed)

    def now(self) -> None:
        """Send a heartbeat now instead of at the next interval."""
        self._publisher.now()

    async def run(self) -> None:
        """Send and receive heartbeats until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive(), name="receive heartbeats")
            group.create_task(self._publisher.run(), name="send heartbeats")

    async def close(self) -> None:
        """Delete the subscription's queue, because it has no consumer after :meth:`run`."""
        if self._bus.usable:
            await self._bus.delete(self._subscription.name)

    async def _receive(self) -> None:
        await self._bus.declare(self._subscription)
        async with await self._bus.consume(self._subscription) as consumer:
            async for delivery in consumer:
                work = functools.partial(self._handle, delivery)
                await handle_or_set_aside(self._bus, self._topology, delivery, self.id, work, quiet=True)

    async def _handle(self, delivery: Delivery) -> None:
        message = await decode_or_dead_letter(self._bus, self._topology, delivery, self.id, quiet=True)
        if isinstance(message, Heartbeat):
            self._peers.receive(message)
        await acknowledge(delivery)

    def _make(self) -> Iterable[Heartbeat]:
        self.seq += 1
        heartbeat = Heartbeat(
            role=ROLE,
            id=self.id,
            seq=self.seq,
            incarnation=self._incarnation,
            lease=HEARTBEAT_LEASE,
            state="working",
            detail=SchedulerStatus(open=self._open_tickets()),
            **self._peers.own.fields(self._peers.uptime),
        )
        return (heartbeat,)

    def _bus_changed(self) -> None:
        if self._bus.usable:
            self._peers.refresh()
            self.now()
        else:
            self._peers.suspend()
