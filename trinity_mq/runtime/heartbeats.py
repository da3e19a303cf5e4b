"""Publishes heartbeats: one at each interval, one soon after a change, none while the bus is unusable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.messages import Heartbeat
from trinity_mq.runtime.deliveries import envelope

log = structlog.get_logger(__name__)

HEARTBEAT_INTERVAL = 2.0
"""Seconds between two heartbeats without a change."""
HEARTBEAT_LEASE = 10.0
"""Seconds after which an agent that sends nothing is taken for dead."""
MIN_HEARTBEAT_GAP = 0.05
"""Least seconds between two heartbeats: a burst of changes makes one."""


class HeartbeatPublisher:
    """Publishes heartbeats until cancelled.

    Args:
        bus: A connected bus.
        topology: The run's names.
        who: Id of the sending agent, for logs.
        make: Returns the heartbeats to send now, each with a higher ``seq`` than the last one.
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
        """Send now. A heartbeat that cannot be sent is dropped: the next one replaces it."""
        try:
            for beat in self._make():
                key = f"beat.{beat.role}.{beat.id}"
                await self._bus.publish(self._topology.exchange("telemetry"), key, envelope(beat))
        except BusUnavailable as error:
            log.warning("beat_not_sent", agent=self._who, reason=str(error))
