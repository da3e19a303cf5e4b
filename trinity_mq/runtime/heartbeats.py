"""Beats of whoever is heard of: one at each interval, one soon after a change, none while the bus is unusable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.messages import Heartbeat
from trinity_mq.runtime.deliveries import envelope

log = structlog.get_logger(__name__)

HEARTBEAT_INTERVAL = 2.0
HEARTBEAT_LEASE = 10.0
MIN_HEARTBEAT_GAP = 0.05
"""A burst of changes makes one beat."""


class HeartbeatPublisher:
    """Publishes beats until cancelled.

    Args:
        bus: A connected bus.
        topology: The run's names.
        who: Whose beats they are, for logs.
        make: Returns the beats to send now, each with a higher number than the last one.
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
        """Send now; what cannot be sent is not sent again: a lost beat costs one beat."""
        try:
            for beat in self._make():
                key = f"beat.{beat.role}.{beat.id}"
                await self._bus.publish(self._topology.exchange("telemetry"), key, envelope(beat))
        except BusUnavailable as error:
            log.warning("beat_not_sent", agent=self._who, reason=str(error))
