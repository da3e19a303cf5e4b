"""Collection of a run's telemetry and queue depths."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_mq.bus import Bus, BusUnavailable, Topology
from trinity_mq.bus.topology import Queue
from trinity_mq.messages import DecodeError, Metrics, decode_any
from trinity_mq.runtime.deliveries import acknowledge
from trinity_mq.telemetry import LINE_FIELDS, METRICS_FILE
from trinity_mq.telemetry.jsonline import parse_line
from trinity_mq.telemetry.tail import Tail

QUEUES = ("submitted", "tasks.train", "tasks.eval", "closed", "dead")
"""Short names of the queues whose depths describe a run."""


async def consume_messages(bus: Bus, queue: Queue, receive: Callable[[object], object]) -> None:
    """Declare an exclusive queue, and pass its decoded messages to ``receive`` until cancelled. Messages that do not
    decode are skipped.
    """
    await bus.declare(queue)
    async with await bus.consume(queue) as subscription:
        async for delivery in subscription:
            with contextlib.suppress(DecodeError):  # the explorer reports undecodable messages
                receive(decode_any(delivery.body, delivery.content_type))
            await acknowledge(delivery)


async def follow_telemetry(
    bus: Bus, topology: Topology, who: str, receive: Callable[[object], object], *, pattern: str = "#"
) -> None:
    """Pass the telemetry messages whose routing keys match ``pattern`` to ``receive`` until cancelled. ``who`` is a
    part of the name of the queue.
    """
    await consume_messages(bus, topology.listener(who, uuid.uuid4().hex[:12], "telemetry", pattern), receive)


class MetricsTail:
    """Reads the lines that agents append to a run's metrics file as metrics messages."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = Tail(run_dir / METRICS_FILE)

    def read(self) -> list[Metrics]:
        """Return the new lines since the last call as messages. Lines without metrics are skipped, and a line that is
        still being written is returned by a later call.
        """
        return [message for line in self.read_lines() if (message := parse_metrics(line)) is not None]

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the new lines since the last call. Another or shorter file belongs to a restarted run and is read from
        its beginning.
        """
        return [fields for line in self._tail.read() if (fields := parse_line(line)) is not None]


def parse_metrics(line: Mapping[str, Any]) -> Metrics | None:
    """Return a line of a metrics file as a message, or None if it is not a metrics line."""
    values = {name: value for name, value in line.items() if name not in LINE_FIELDS and isinstance(value, int | float)}
    try:
        return Metrics(role=line["role"], id=line["agent"], step=line["step"], values=values)
    except (ValueError, KeyError):
        return None


async def depths(bus: Bus, topology: Topology, names: Sequence[str]) -> dict[str, int | None]:
    """Return the depths of the run's queues by their short names. None: the queue does not exist, or the broker is not
    available.
    """
    depth_by_name: dict[str, int | None] = {}
    for name in names:
        try:
            depth_by_name[name] = await bus.depth(topology.prefix + name)
        except BusUnavailable:
            depth_by_name[name] = None
    return depth_by_name
