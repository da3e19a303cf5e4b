"""Tasks a second through a Scheduler, a real RabbitMQ and two runner processes, against the same work in a plain loop.

    python benchmarks/bench_scheduler.py [TASKS] [--profile FOLDER]

A task is 8 experiences of 64 tokens from a workflow that asks no model (trinity_mq.testing.noop), delivered to the
caller of ``get_results``. The baseline, in the same run: one process that runs the same workflow, encodes and decodes
its experiences, one task after the other. ``--profile`` writes what cProfile saw in the scheduler and in each runner.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import os
import pstats
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import torch

from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.connect import URL_VARIABLE
from trinity_mq.bus.node import PrivateNode
from trinity_mq.config import Config, load_config
from trinity_mq.experience import decode, encode
from trinity_mq.messages import Beat
from trinity_mq.models import InferenceModel
from trinity_mq.models.engines.snapshot import EngineSnapshot
from trinity_mq.runtime.mail import envelope
from trinity_mq.scheduling import Scheduler, WorkflowRunner
from trinity_mq.testing.noop import NoopWorkflow
from trinity_mq.workflows import Task

HERE = Path(__file__).parent
RUNS = 8
RUNNERS = 2
CONCURRENCY = 64
BARE_SECONDS = 3.0
WARM_UP = 200
IDLE_SECONDS = 10.0


def make_task() -> Task:
    """Return a task of eight runs."""
    return Task(workflow=NoopWorkflow, repeat_times=RUNS, raw_task={"question": "?"})


async def bare_loop(config: Config) -> float:
    """Return tasks a second of the same work without a queue."""
    runner = WorkflowRunner(config, InferenceModel("none", "http://127.0.0.1:9", "none"))
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < BARE_SECONDS:
        status, experiences = await runner.run_task_async(make_task(), RUNS)
        assert status.ok
        assert len(decode(encode(experiences))) == RUNS
        done += 1
    await runner.close()
    return done / (time.perf_counter() - start)


async def engine_beats(bus: Bus, topology: Topology) -> None:
    """Say that there is an engine, until cancelled: runners wait for one, also where the workflow asks none."""
    snapshot = EngineSnapshot(
        "engine", alive=True, state="current", url="http://127.0.0.1:9", name="none", version=(0, 0)
    )
    incarnation, seq = uuid.uuid4().hex, 0
    while True:
        seq += 1
        beat = Beat(
            role="engine", id="engine", seq=seq, incarnation=incarnation, lease=60, state="current",
            detail=snapshot.detail(),
        )  # fmt: skip
        await bus.publish(topology.exchange("telemetry"), "beat.engine.engine", envelope(beat))
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def runners(config_path: Path, url: str, profiles: Path | None) -> AsyncIterator[list[int]]:
    """Start the runner processes; yield their process ids."""
    paths = [str(HERE.parent), str(HERE.parent / "agents"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, URL_VARIABLE: url, "PYTHONPATH": os.pathsep.join(paths)}
    processes = []
    for number in range(RUNNERS):
        profile = ["-m", "cProfile", "-o", str(profiles / f"runner-{number}.prof")] if profiles else []
        command = [sys.executable, *profile, "-m", "trinity_mq.cli.main", "runner", str(config_path)]
        processes.append(await asyncio.create_subprocess_exec(*command, "--id", f"runner-{number}", env=environment))
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


def seconds_of(pids: list[int]) -> list[float]:
    """Return processor seconds of each process."""
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Write a profile of this process to ``path``."""
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    profile.dump_stats(path)


async def through_the_queue(config: Config, config_path: Path, url: str, tasks: int, profiles: Path | None) -> float:
    """Return tasks a second through scheduler, broker and runners, and print who spent what."""
    os.environ[URL_VARIABLE] = url
    topology = Topology(config.name)
    async with contextlib.AsyncExitStack() as stack:
        bus = create_bus(config.broker, topology, "bench")
        await bus.connect()
        stack.push_async_callback(bus.close)
        scheduler = Scheduler(config, bus=bus, topology=topology)
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        pids = await stack.enter_async_context(runners(config_path, url, profiles))
        beats = asyncio.ensure_future(engine_beats(bus, topology))
        stack.callback(beats.cancel)
        scheduler.schedule([make_task() for _ in range(WARM_UP)], 1)
        statuses, _ = await scheduler.get_results(1, timeout=120)
        assert len(statuses) == WARM_UP, f"{len(statuses)} of {WARM_UP} tasks came back"
        await asyncio.sleep(2.0)  # what the warm-up left behind is cleared away
        everyone = {"scheduler": [os.getpid()], "runners": pids, "broker": broker_pids()}
        rest = seconds_of(pids)
        await asyncio.sleep(IDLE_SECONDS)
        idle = [(after - earlier) / IDLE_SECONDS for earlier, after in zip(rest, seconds_of(pids), strict=True)]
        print(f"  idle runners: {', '.join(f'{share:.1%}' for share in idle)} of a core each")
        before = {name: sum(seconds_of(group)) for name, group in everyone.items()}
        start = time.perf_counter()
        with profiled(profiles / "scheduler.prof" if profiles else None):
            scheduler.schedule([make_task() for _ in range(tasks)], 2)
            statuses, experiences = await scheduler.get_results(2, timeout=600)
        seconds = time.perf_counter() - start
        assert len(statuses) == tasks, f"{len(statuses)} of {tasks} tasks came back"
        assert len(experiences) == tasks * RUNS
        assert all(status.ok for status in statuses)
        for name, group in everyone.items():
            spent = sum(seconds_of(group)) - before[name]
            print(f"  {name:10} {spent / tasks * 1e3:6.3f} ms of processor a task, {spent / seconds:5.2f} cores")
        return tasks / seconds


def broker_pids() -> list[int]:
    """Return the Erlang machines below this process."""
    return [child.pid for child in psutil.Process().children(recursive=True) if child.name() == "beam.smp"]


async def main() -> None:
    """Measure both and print the share."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", type=int, nargs="?", default=5000)
    parser.add_argument("--profile", type=Path, help="folder for profiles of scheduler and runners")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.yaml"
        smoke = (HERE.parent / "examples" / "smoke.yaml").read_text(encoding="utf-8")
        path.write_text(smoke.replace("name: smoke", "name: bench") + f"\nrunner:\n  concurrency: {CONCURRENCY}\n")
        config = load_config(path, [f"run_dir={folder}/run"])
        bare = await bare_loop(config)
        node = PrivateNode(Path(folder) / "broker")
        await node.start()
        try:
            await node.wait_ready()
            rate = await through_the_queue(config, path, node.url, options.tasks, options.profile)
        finally:
            await node.stop()
    print(f"plain loop, one process     : {bare:8.0f} tasks/s")
    print(f"scheduler and {RUNNERS} runners     : {rate:8.0f} tasks/s")
    print(f"share of the plain loop     : {rate / bare:8.2f}")
    if options.profile:
        for file in sorted(options.profile.glob("*.prof")):
            print(f"\n{file.name}")
            pstats.Stats(str(file)).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    asyncio.run(main())
