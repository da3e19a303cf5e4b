"""The no-op tasks of bench_scheduling.py through the scheduler of Trinity-RFT on Ray; run by bench_ray.py.

    RAY_PYTHON benchmarks/scheduler_on_ray.py TASKS TOKENS RUNNERS ALONE SECONDS

It runs in the environment that bench_ray.py describes, where trinity-rft is installed without what it depends on: vLLM,
which its modules name and this never calls, is replaced by an empty package, and the model of a runner by one that
does nothing. Prints one line of JSON: tasks a second, and the median seconds of a batch of one task.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = 8
WARM_UP = 100
EMPTY_PACKAGE = """
import importlib.abc
import importlib.machinery
import sys
import types


class Empty(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("vllm.") else None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
__version__ = "0.20.0"
__getattr__ = Empty("vllm").__getattr__
"""
"""Every module below it exists, and every name in them is an empty class."""


def main() -> None:
    """Start Ray, and measure."""
    tasks, tokens, runners, alone = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    with tempfile.TemporaryDirectory(prefix="tmq-ray-") as folder:
        package = Path(folder) / "vllm"
        package.mkdir()
        (package / "__init__.py").write_text(EMPTY_PACKAGE, encoding="utf-8")
        os.environ |= {
            "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).parent}",  # of Ray's workers
            "TRINITY_LOG_LEVEL": "WARNING",
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        sys.path.insert(0, folder)
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="bench")
        try:
            found = asyncio.run(measure(tasks, tokens, runners, alone, seconds))
        finally:
            ray.shutdown()
    print(json.dumps(found))


async def measure(tasks: int, tokens: int, runners: int, alone: int, length: float) -> dict[str, float]:
    """Return what is printed."""
    from trinity.common.config import Config
    from trinity.common.experience import Experience
    from trinity.common.workflows import Task
    from trinity.explorer import scheduler as reference

    from reference_runner import IdleRunner, NoopWorkflow

    config = Config()
    config.ray_namespace = "bench"
    config.explorer.name = "bench"
    config.explorer.rollout_model.engine_num = 1
    config.explorer.runner_per_model = runners
    config.explorer.max_repeat_times_per_runner = None
    reference.WorkflowRunner = IdleRunner
    scheduler = reference.Scheduler(config)
    await scheduler.start()

    arguments = {"tokens": tokens, "seconds": length}

    async def finished(batch: int, count: int) -> float:
        made: list[Any] = [
            Task(workflow=NoopWorkflow, repeat_times=RUNS, raw_task={"question": "?"}, workflow_args=arguments)
            for _ in range(count)
        ]
        start = time.perf_counter()
        scheduler.schedule(made, batch)
        statuses, payloads = await scheduler.get_payload_results(batch, timeout=600)
        experiences = [one for payload in payloads for one in Experience.deserialize_many(payload)]
        seconds = time.perf_counter() - start
        assert len(statuses) == count, f"{len(statuses)} of {count} tasks came back"
        assert all(status.ok for status in statuses), statuses[0].message
        assert len(experiences) == count * RUNS
        return seconds

    await finished(1, min(tasks, WARM_UP))
    latency = statistics.median([await finished(2 + number, 1) for number in range(alone)])
    seconds = await finished(1000, tasks)
    await scheduler.stop()
    return {"rate": tasks / seconds, "latency": latency}


if __name__ == "__main__":
    main()
