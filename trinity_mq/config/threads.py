"""How many CPU threads each trainer process and each engine of a run takes."""

from __future__ import annotations

import os

from trinity_mq.config.base import Threads
from trinity_mq.config.run import Config


def cpu_threads(config: Config, wanted: Threads) -> int:
    """Return the CPU threads of a trainer process or an engine that ``wanted`` so many.

    Two programs that share cores lose more by waiting for each other than a second thread brings: with ``auto`` those
    that compute on this machine at the same time take as many threads together as it has cores, and each at least one.
    External engines are none of them; on a machine that runs only a part of the agents, a number says it better.
    """
    return wanted if wanted != "auto" else max(1, available_cores() // _computing(config))


def available_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _computing(config: Config) -> int:
    """Return the trainer processes and engines of the run."""
    explorer = config.explorer
    auxiliary = sum(one.engine_num for one in explorer.auxiliary_models if one.engine != "external")
    return config.trainer.nproc + explorer.rollout_model.engine_num + auxiliary
