"""Number of CPU threads for each trainer process and each engine of a run."""

from __future__ import annotations

import math
import os
from pathlib import Path

from trinity_mq.config.base import Threads
from trinity_mq.config.engines import engine_row
from trinity_mq.config.run import Config


def cpu_threads(config: Config, setting: Threads, cores: int | None = None) -> int:
    """Return the number of CPU threads of a trainer process or an engine with this ``setting``.

    Two programs that share cores lose more by waiting for each other than a second thread gains. With ``auto``, the
    processes that compute on this machine at the same time therefore use as many threads in total as it has cores, and
    at least one each. External engines do not count. On a machine that runs only some of the agents, set a number.
    ``cores`` is the number of cores of this machine, None: ask the system.
    """
    return setting if setting != "auto" else max(1, (cores or available_cores()) // computing_processes(config))


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may use, within the CPU limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _limit(cgroup))))


def _limit(cgroup: Path) -> float:
    """Return the CPU seconds per second that the container may use, infinity without a limit.

    Source: the kernel's documentation, cgroup-v2 (``cpu.max``) and sched-bwc (``cpu.cfs_quota_us``).
    """
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return math.inf
    try:
        return float(quota) / float(period) if float(quota) > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # cpu.max holds "max"
        return math.inf


def computing_processes(config: Config) -> int:
    """Return the number of trainer processes plus the number of devices of all engines, except external engines."""
    explorer = config.explorer
    rollout, auxiliary = explorer.rollout_model, explorer.auxiliary_models
    here = [model for model in auxiliary if engine_row(model.engine).computes_here]
    devices = sum(model.engine_num * model.tensor_parallel_size for model in here)
    return config.trainer.nproc + rollout.engine_num * rollout.tensor_parallel_size + devices
