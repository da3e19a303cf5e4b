"""The beats of a Scheduler that no agent beats for, and what it hears of runners."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable

from trinity_mq.bus import Bus, Topology
from trinity_mq.messages import Heartbeat, SchedulerStatus
from trinity_mq.runtime.deliveries import acknowledge, decode_or_dead_letter
from trinity_mq.runtime.heartbeats import HEARTBEAT_LEASE, HeartbeatPublisher
from trinity_mq.runtime.peers import Peers

ROLE = "scheduler"


class SchedulerHeartbeats:
    """Says every two seconds and on change what is open, so that runners drop what is not; hears the runners' beats.

    Args:
        bus: A connected bus.
        topology: The run's names.
        open_tickets: Returns the tickets that are open.
        peers: Takes in what is heard.
    """

    def __init__(self, bus: Bus, topology: Topology, open_tickets: Callable[[], list[str]], peers: Peers) -> None:
        self._bus, self._topology, self._open_tickets, self._peers = bus, topology, open_tickets, peers
        self.id = f"{ROLE}-{uuid.uuid4().hex[:8]}"
        self.seq = 0
        self._incarnation = uuid.uuid4().hex[:12]
        self._ears = topology.listener(self.id, self._incarnation, "telemetry", "beat.runner.#")
        self._beats = HeartbeatPublisher(bus, topology, self.id, self._beats_now)
        bus.on_change(self._bus_changed)

    def soon(self) -> None:
        """Send a beat now rather than at the next interval."""
        self._beats.soon()

    async def run(self) -> None:
        """Beat and listen until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="hear runners")
            group.create_task(self._beats.run(), name="beat")

    async def close(self) -> None:
        """Take the ears off after :meth:`run` has ended: nobody empties them."""
        if self._bus.usable:
            await self._bus.delete(self._ears.name)

    async def _listen(self) -> None:
        await self._bus.declare(self._ears)
        async with await self._bus.consume(self._ears) as feed:
            async for delivery in feed:
                beat = await decode_or_dead_letter(self._bus, self._topology, delivery, self.id, quiet=True)
                if isinstance(beat, Heartbeat):
                    self._peers.receive(beat)
                await acknowledge(delivery)

    def _beats_now(self) -> Iterable[Heartbeat]:
        self.seq += 1
        beat = Heartbeat(
            role=ROLE,
            id=self.id,
            seq=self.seq,
            incarnation=self._incarnation,
            lease=HEARTBEAT_LEASE,
            state="working",
            detail=SchedulerStatus(open=self._open_tickets()),
        )
        return (beat,)

    def _bus_changed(self) -> None:
        if self._bus.usable:
            self._peers.refresh()
            self.soon()
        else:
            self._peers.suspend()
