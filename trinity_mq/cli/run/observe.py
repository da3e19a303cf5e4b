"""What a run's configuration and broker add to the heartbeats, for a diagnosis."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from trinity_mq.bus import Bus, BusRefused, BusUnavailable, Envelope, Topology
from trinity_mq.config import Config
from trinity_mq.config.modes.mode import AGENTS

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


def expected_agents(config: Config | None) -> Mapping[str, int]:
    """Return the number of agents of each role that ``trinity-mq run`` starts; empty without a configuration."""
    if config is None:
        return {}
    counts = {
        "operator": config.operator.num_operators,
        "runner": config.runner.num_runners,
        "gateway": config.gateway.num_gateways,
    }
    return {role: counts.get(role, 1) for role in AGENTS[config.mode].roles}


def limits(config: Config | None) -> Mapping[str, float]:
    """Return the settings in seconds that end waits, by key."""
    return {} if config is None else {"explorer.max_timeout": config.explorer.max_timeout}
