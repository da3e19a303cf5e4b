"""CPU threads that each trainer process and each engine of a run takes."""

from __future__ import annotations

import math
import os
from pathlib import Path

from trinity_mq.config.base import Threads
from trinity_mq.config.run import Config


def cpu_threads(config: Config, wanted: Threads) -> int:
    """Return the CPU threads of a trainer process or an engine that ``wanted`` so many.

    Two programs that share cores lose more by waiting for each other than a second thread brings: with ``auto`` those
    that compute on this machine at the same time take as many threads together as it has cores, and each at least one.
    External engines are none of them; on a machine that runs only a part of the agents, a number says it better.
    """
    return wanted if wanted != "auto" else max(1, available_cores() // computing_processes(config))


def available_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may use, in a container those that its limit on processor time is worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _limit(cgroup))))


def _limit(cgroup: Path) -> float:
    """Return the processor seconds a second that a container may take, infinity without a limit.

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
    except (ValueError, ZeroDivisionError):  # "max"
        return math.inf


def computing_processes(config: Config) -> int:
    """Return the trainer processes and engines of the run."""
    explorer = config.explorer
    auxiliary = sum(one.engine_num for one in explorer.auxiliary_models if one.engine != "external")
    return config.trainer.nproc + explorer.rollout_model.engine_num + auxiliary
