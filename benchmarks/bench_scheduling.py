"""Tasks a second through a Scheduler, a real RabbitMQ and runner processes, against a bare aio-pika loop.

    python benchmarks/bench_scheduling.py [--tasks N] [--tokens 64 1024] [--runners 1 2] [--seconds 0 0.01 1] [--quick]
                                          [--json FILE] [--profile DIR] [--trace DIR]

A task is 8 experiences from a workflow that asks no model (trinity_mq.testing.noop), delivered to the caller of
``get_results``. With ``--seconds`` a task also holds its slot for so long (no-op tasks: 0). In the same run, on the
same broker:

- *bare aio-pika loop* (bare_amqp.py): one process and as many workers move messages of the same number and size, and do
  nothing with them;
- *plain loop*: one process without a broker runs the same workflow, encodes and decodes what it returns.

The latency is that of a batch of one task. ``--profile`` writes what cProfile saw in scheduler and runners. ``--trace``
keeps a trace of the last setting, which tracing makes a little slower: ``trinity-mq timeline DIR --batch 2000-2019``
shows batches of TRACED tasks in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import math
import os
import pstats
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import bare_amqp
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import Config, load_config
from trinity_mq.experience import decode, encode
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.messages import Heartbeat, TaskBody, TaskResult, TaskSlice
from trinity_mq.messages import encode as encode_message
from trinity_mq.models import InferenceModel
from trinity_mq.models.inference import EngineSnapshot
from trinity_mq.runtime.deliveries import envelope
from trinity_mq.runtime.serve import tune_garbage_collection
from trinity_mq.scheduling import Scheduler, WorkflowRunner
from trinity_mq.telemetry import start_trace
from trinity_mq.testing.noop import NoopWorkflow
from trinity_mq.workflows import Task

HERE = Path(__file__).parent
RUNS = 8
CONCURRENCY = 64
PLAIN_SECONDS = 3.0
WARM_UP = 200
ALONE, SECONDS_ALONE = 50, 5.0
"""Tasks whose latency is taken, one after the other, and the most seconds for which they hold their slots."""
IDLE_SECONDS = 5.0
TRACED, TRACED_BATCHES = 32, range(2000, 2020)
"""Tasks of a traced batch, and the numbers of these batches."""


@dataclass(frozen=True)
class Throughput:
    """Measured throughput and latency of one setting."""

    rate: float
    """Tasks a second."""
    latency: float
    """Median seconds of a batch of one task."""


@dataclass(frozen=True)
class Setting:
    """Parameters that are varied."""

    tokens: int
    runners: int
    tasks: int
    seconds: float = 0.0
    """Seconds for which a task holds its slot."""

    @property
    def name(self) -> str:
        """Tokens, runners, and the seconds of a task that is no no-op."""
        length = f", tasks of {self.seconds:g} s" if self.seconds else ""
        return f"{self.tokens} tokens, {self.runners} runners{length}"

    @property
    def alone(self) -> int:
        """Number of tasks whose latency is taken."""
        return min(ALONE, math.ceil(SECONDS_ALONE / self.seconds)) if self.seconds else ALONE

    def task(self) -> Task:
        """Return a task of eight runs."""
        arguments = {"tokens": self.tokens, "seconds": self.seconds}
        return Task(workflow=NoopWorkflow, repeat_times=RUNS, raw_task={"question": "?"}, workflow_args=arguments)


async def plain_loop(config: Config, setting: Setting) -> tuple[float, int]:
    """Return tasks a second of the same work without a queue, and the bytes of a body."""
    runner = WorkflowRunner(config, InferenceModel("none", "http://127.0.0.1:9", "none"))
    done, size, start = 0, 0, time.perf_counter()
    while time.perf_counter() - start < PLAIN_SECONDS:
        status, experiences = await runner.run_task_async(setting.task(), RUNS)
        assert status.ok
        body = encode(experiences)
        assert len(decode(body)) == RUNS
        done, size = done + 1, len(body)
    await runner.close()
    return done / (time.perf_counter() - start), size


async def bare_loop(url: str, setting: Setting, part: int) -> float:
    """Return tasks a second of the bare aio-pika loop, with messages as large as ours."""
    identity = "0" * 32
    slice_ = TaskSlice(batch=1, ticket=identity, task_id=1, task=TaskBody(raw_task={"question": "?"}))
    metrics = [{"response_tokens:sum": 1.0, "reward": 1.0, "time/run_execution": 1.0}] * RUNS
    result = TaskResult(batch=1, ticket=identity, task_id=1, attempt=identity, outcome="finished", metrics=metrics)
    return await bare_amqp.rate(
        url,
        setting.tasks,
        runners=setting.runners,
        prefetch=CONCURRENCY,
        slice_=len(encode_message(slice_)),
        part=part,
        result=len(encode_message(result)),
        seconds=setting.seconds,
    )


async def engine_beats(bus: Bus, topology: Topology) -> None:
    """Say that there is an engine, until cancelled: runners wait for one, also where the workflow asks none."""
    snapshot = EngineSnapshot(
        "engine", alive=True, state="current", url="http://127.0.0.1:9", name="none", version=(0, 0)
    )
    incarnation, seq = uuid.uuid4().hex, 0
    while True:
        seq += 1
        beat = Heartbeat(
            role="engine", id="engine", seq=seq, incarnation=incarnation, lease=60, state="current",
            detail=snapshot.detail(),
        )  # fmt: skip
        await bus.publish(topology.exchange("telemetry"), "beat.engine.engine", envelope(beat))
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def runners(config_path: Path, url: str, count: int, profiles: Path | None) -> AsyncIterator[list[int]]:
    """Start the runner processes; yield their process ids."""
    paths = [str(HERE.parent), str(HERE.parent / "agents"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, URL_VARIABLE: url, "PYTHONPATH": os.pathsep.join(paths)}
    processes = []
    for number in range(count):
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


def broker_pids() -> list[int]:
    """Return the Erlang machines below this process."""
    return [child.pid for child in psutil.Process().children(recursive=True) if child.name() == "beam.smp"]


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


async def finished(scheduler: Scheduler, setting: Setting, batch: int, tasks: int) -> float:
    """Schedule tasks, take all they return, and return the seconds that took."""
    start = time.perf_counter()
    scheduler.schedule([setting.task() for _ in range(tasks)], batch)
    statuses, experiences = await scheduler.get_results(batch, timeout=600)
    seconds = time.perf_counter() - start
    assert len(statuses) == tasks, f"{len(statuses)} of {tasks} tasks came back"
    assert all(status.ok for status in statuses)
    assert len(experiences) == tasks * RUNS
    return seconds


async def through_the_queue(
    config: Config, config_path: Path, url: str, setting: Setting, profiles: Path | None = None
) -> Throughput:
    """Send tasks through scheduler, broker and runners, and print who spent what."""
    topology = Topology(config.name)
    async with contextlib.AsyncExitStack() as stack:
        bus = create_bus(config.broker, topology, "bench")
        await bus.connect()
        stack.push_async_callback(bus.close)
        scheduler = Scheduler(config, bus=bus, topology=topology)
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        pids = await stack.enter_async_context(runners(config_path, url, setting.runners, profiles))
        beats = asyncio.ensure_future(engine_beats(bus, topology))
        stack.callback(beats.cancel)
        await finished(scheduler, setting, 1, WARM_UP)
        alone = sorted([await finished(scheduler, setting, 2 + number, 1) for number in range(setting.alone)])
        await asyncio.sleep(2.0)  # what that left behind is cleared away
        for number in TRACED_BATCHES if config.monitor.trace else ():
            await finished(scheduler, setting, number, TRACED)
        rest = seconds_of(pids)
        await asyncio.sleep(IDLE_SECONDS)
        idle = [(after - before) / IDLE_SECONDS for before, after in zip(rest, seconds_of(pids), strict=True)]
        everyone = {"scheduler": [os.getpid()], "runners": pids, "broker": broker_pids()}
        before = {name: sum(seconds_of(group)) for name, group in everyone.items()}
        with profiled(profiles / "scheduler.prof" if profiles else None):
            seconds = await finished(scheduler, setting, 1000, setting.tasks)
        middle, slowest = statistics.median(alone) * 1e3, alone[-1] * 1e3
        print(f"  a batch of one task, its queue declared and all: median {middle:.1f} ms, slowest {slowest:.1f} ms")
        print(f"  idle runners: {', '.join(f'{share:.1%}' for share in idle)} of a core each")
        for name, group in everyone.items():
            spent = sum(seconds_of(group)) - before[name]
            print(
                f"  {name:10} {spent / setting.tasks * 1e3:6.3f} ms of processor a task, {spent / seconds:5.2f} cores"
            )
        return Throughput(setting.tasks / seconds, statistics.median(alone))


def configuration(folder: Path, trace: Path | None = None) -> tuple[Config, Path]:
    """Write a configuration into a new folder, and return it and its file; ``trace``: run folder of a traced run."""
    folder.mkdir()
    run_folder = trace or folder / "run"
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / "config.yaml"
    smoke = (HERE.parent / "examples" / "smoke.yaml").read_text(encoding="utf-8")
    more = f"run_dir: {run_folder}\n" + ("monitor:\n  trace: true\n" if trace else "")
    path.write_text(smoke.replace("name: smoke", "name: bench") + f"\nrunner:\n  concurrency: {CONCURRENCY}\n{more}")
    config = load_config(path)
    if trace is not None:
        start_trace("scheduler", "scheduler", trace, on=True)
    return config, path


async def measure(folder: Path, setting: Setting, profiles: Path | None, trace: Path | None = None) -> dict[str, float]:
    """Measure one setting and print the shares; return the ratios to the other loops, by name."""
    config, path = configuration(folder, trace)
    print(f"\n{setting.tasks} tasks of {RUNS} runs, {setting.name}")
    plain, part = await plain_loop(config, setting)
    node = PrivateNode(folder / "broker")
    await node.start()
    try:
        await node.wait_ready()
        os.environ[URL_VARIABLE] = node.url
        bare = await bare_loop(node.url, setting, part)
        rate = (await through_the_queue(config, path, node.url, setting, profiles)).rate
    finally:
        await node.stop()
    print(f"plain loop, no broker  : {plain:8.0f} tasks/s")
    print(f"bare aio-pika loop     : {bare:8.0f} tasks/s")
    print(
        f"scheduler and runners  : {rate:8.0f} tasks/s, {rate / bare:.2f} of bare aio-pika, {rate / plain:.2f} of plain"
    )
    what = f"{setting.name}: tasks a second"
    ratios = {f"{what}, of bare aio-pika": rate / bare, f"{what}, of the plain loop": rate / plain}
    return ratios if not setting.seconds else {f"{what}, of bare aio-pika": rate / bare}


async def main() -> None:
    """Measure what is asked for."""
    import figures

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=4000, help="of 64 tokens; fewer where they are longer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0], help="for which a task holds its slot")
    parser.add_argument(
        "--profile", type=Path, help="folder for profiles of scheduler and runners, of the last setting"
    )
    parser.add_argument("--trace", type=Path, help="run folder for a trace of the last setting")
    parser.add_argument("--quick", action="store_true", help="few tasks, one runner: does it run?")
    figures.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_garbage_collection()  # as agents do
    fewest = 2000  # a batch has a latency of its own, whatever the number of its tasks
    if options.quick:
        fewest, options.tasks, options.tokens, options.runners = 200, 200, [64], [1]
    ratios: dict[str, float] = {}
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    settings = [
        Setting(tokens, count, max(min(options.tasks, fewest), options.tasks * 64 // max(64, tokens)), seconds)
        for tokens in options.tokens
        for count in options.runners
        for seconds in options.seconds
    ]
    with tempfile.TemporaryDirectory() as folder:
        for number, setting in enumerate(settings):
            is_last = setting is settings[-1]
            trace = options.trace if is_last else None
            ratios |= await measure(Path(folder) / str(number), setting, options.profile, trace)
    figures.write(options, ratios)
    if options.profile:
        for file in sorted(options.profile.glob("*.prof")):
            print(f"\n{file.name}")
            pstats.Stats(str(file)).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    asyncio.run(main())
