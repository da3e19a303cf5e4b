"""A test message that checks whether a broker accepts messages."""

from __future__ import annotations

import uuid

from trinity_mq.bus import Bus, BusRefused, BusUnavailable, Envelope, Topology

PROBE_TIMEOUT = 4.0
"""Seconds for the broker to confirm a message; longer than the bus needs to detect blocked publishers."""


async def broker_problem(bus: Bus, topology: Topology) -> str:
    """Return the problem of the broker; empty if it works.

    A broker reports an alarm only to connections that publish, so this publishes a message without a matching queue.
    """
    probe = Envelope(body=b"{}", kind="probe", content_type="application/json", message_id=f"probe-{uuid.uuid4().hex}")
    try:
        # routing keys of commands contain a dot, so no queue is bound to this key
        await bus.publish(topology.exchange("control"), "probe", probe, timeout=PROBE_TIMEOUT)
    except BusRefused:
        return ""  # a user with read permission only: the broker answers
    except BusUnavailable as error:
        return bus.trouble or str(error)
    return bus.trouble or ""
