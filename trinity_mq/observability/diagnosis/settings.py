"""Facts for a diagnosis that come from the run's configuration and machine."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_mq.config import Config
from trinity_mq.config.threads import computing_processes
from trinity_mq.observability.diagnosis.records import Room


def expected_agents(config: Config | None) -> Mapping[str, int]:
    """Return the number of agents of each role that ``trinity-mq run`` starts; empty without a configuration."""
    return {} if config is None else config.agent_counts


def limits(config: Config | None) -> Mapping[str, float]:
    """Return the settings in seconds that bound waits, by key."""
    return {} if config is None else {"explorer.max_timeout": config.explorer.max_timeout}


def free_resources(config: Config | None, cores: int, gpus: int) -> frozenset[Room] | None:
    """Return the free resources of a machine that hosts all agents of a run; None without a configuration. A thread
    count of ``auto`` takes all cores.

    Args:
        config: The run's configuration.
        cores: Cores of the machine that the run may use.
        gpus: GPUs of the machine.
    """
    if config is None:
        return None
    computing, trainer = computing_processes(config), config.trainer
    is_on_cpu = config.model.device == "cpu" or not gpus
    threads = [trainer.num_threads] * trainer.nproc
    threads += [config.explorer.rollout_model.num_threads] * (computing - trainer.nproc)
    numbers = [number for number in threads if number != "auto"]
    is_full = len(numbers) < len(threads) or sum(numbers) >= cores if is_on_cpu else computing >= gpus
    small = sum(expected_agents(config).values()) - 1
    resources: set[Room] = set() if is_full else {"devices"}
    if small + (computing if is_on_cpu else 0) < cores:
        resources.add("cores")
    return frozenset(resources)
