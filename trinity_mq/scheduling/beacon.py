"""The beats of a Scheduler that no agent beats for, and what it hears of runners."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.messages import Beat
from trinity_mq.runtime.agent import BEAT_INTERVAL, BEAT_LEASE, MIN_BEAT_GAP
from trinity_mq.runtime.mail import envelope, opened, settle
from trinity_mq.runtime.peers import Peers

log = structlog.get_logger(__name__)

ROLE = "scheduler"


class Beacon:
    """Says every two seconds and on change what is open, so that runners drop what is not; hears the runners' beats.

    Args:
        bus: A connected bus.
        topology: The run's names.
        detail: Returns what the beats carry.
        peers: Takes in what is heard.
    """

    def __init__(self, bus: Bus, topology: Topology, detail: Callable[[], dict[str, Any]], peers: Peers) -> None:
        self._bus, self._topology, self._detail, self._peers = bus, topology, detail, peers
        self.id = f"{ROLE}-{uuid.uuid4().hex[:8]}"
        self.seq = 0
        self._incarnation = uuid.uuid4().hex[:12]
        self._ears = topology.listener(self.id, self._incarnation, "telemetry", "beat.runner.#")
        self._due = asyncio.Event()
        bus.on_change(self._bus_changed)

    def soon(self) -> None:
        """Send a beat now rather than at the next interval."""
        self._due.set()

    async def run(self) -> None:
        """Beat and listen until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="hear runners")
            group.create_task(self._beat_forever(), name="beat")

    async def close(self) -> None:
        """Take the ears off after :meth:`run` has ended: nobody empties them."""
        if self._bus.usable:
            await self._bus.delete(self._ears.name)

    async def _listen(self) -> None:
        await self._bus.declare(self._ears)
        async with await self._bus.consume(self._ears) as feed:
            async for delivery in feed:
                beat = await opened(self._bus, self._topology, delivery, self.id, quiet=True)
                if isinstance(beat, Beat):
                    self._peers.hear(beat)
                await settle(delivery)

    async def _beat_forever(self) -> None:
        while True:
            self._due.clear()
            if self._bus.usable:
                await self._beat_once()
            await asyncio.sleep(MIN_BEAT_GAP)
            try:
                async with asyncio.timeout(BEAT_INTERVAL):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _beat_once(self) -> None:
        self.seq += 1
        beat = Beat(
            role=ROLE,
            id=self.id,
            seq=self.seq,
            incarnation=self._incarnation,
            lease=BEAT_LEASE,
            state="working",
            detail=self._detail(),
        )
        try:
            await self._bus.publish(self._topology.exchange("telemetry"), f"beat.{ROLE}.{self.id}", envelope(beat))
        except BusUnavailable as error:
            log.warning("beat_not_sent", agent=self.id, reason=str(error))  # a lost beat costs one beat

    def _bus_changed(self) -> None:
        if self._bus.usable:
            self._peers.refresh()
            self.soon()
        else:
            self._peers.deafen()
