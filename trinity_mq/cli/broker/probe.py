"""A message that finds out whether a broker takes messages."""

from __future__ import annotations

import uuid

from trinity_mq.bus import Bus, BusRefused, BusUnavailable, Envelope, Topology

PROBE_TIMEOUT = 4.0
"""Seconds for the broker to confirm a message; longer than the bus takes to notice that publishers are blocked."""


async def broker_trouble(bus: Bus, topology: Topology) -> str:
    """Return what is wrong with the broker, empty where nothing is.

    A broker with an alarm says so only to connections that publish, so a message is published that no queue takes.
    """
    probe = Envelope(body=b"{}", kind="probe", content_type="application/json", message_id=f"probe-{uuid.uuid4().hex}")
    try:
        # the keys of commands have a dot: no queue is bound to this one
        await bus.publish(topology.exchange("control"), "probe", probe, timeout=PROBE_TIMEOUT)
    except BusRefused:
        return ""  # a user who may only read: the broker answers
    except BusUnavailable as error:
        return bus.trouble or str(error)
    return bus.trouble or ""
