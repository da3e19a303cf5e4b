"""Facts for a diagnosis that only the run's configuration knows."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_mq.config import Config
from trinity_mq.config.modes.mode import AGENTS


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
