"""Hours of work on one machine: does memory grow, does latency, does disk?

    scripts/soak [--hours 4] [--scenes run tasks heartbeats runs] [--out soak] [--quick]

- *run*: examples/arithmetic.yaml without an end, for the hours that the other scenes leave, with low bounds on disk.
- *tasks*: a million tasks that ask no model, through one Scheduler and two runners.
- *heartbeats*: those of 2000 runners, 16 engines and the other roles, heard by an explorer and by a runner.
- *runs*: 50 runs on one broker at a time, each with a user of its own that may touch nothing else. Their explorers,
  operators and trainers are the real ones, their engines and learners do nothing; all are in one process.

Every few seconds are taken: memory of each process and of the broker, the size of each folder, the time of a step.
Memory is that of anonymous pages. Pages that forked agents share count whole for each of them: if they were divided, a
page that one agent copies by writing to it would look like growth of the others. A series is *flat* where it grew by no
more than its noise or a hundredth of its level, without its first fifth (``trend.py``). ``--out`` gets the samples, a
table and a plot of each scene; the end is 1 where memory or latency grew, or something was lost. Each scene is bounded
in time and stops what it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import bench_heartbeats
import bench_scheduling
from trend import Trend, trend
from trinity_agents.simulation import Simulation
from trinity_mq.bus import Bus, Topology, create_bus
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.bus.base import BusRefused
from trinity_mq.bus.permissions import permissions, rabbitmqctl_lines
from trinity_mq.config import load_config
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.observability.follow import MetricsTail
from trinity_mq.scheduling import Scheduler
from trinity_mq.telemetry import setup_logging
from trinity_mq.testing.fakes import FakeRunner
from trinity_mq.testing.noop import NoopWorkflow
from trinity_mq.testing.runs import LocalRun
from trinity_mq.workflows import Task

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
SCENES = ("heartbeats", "runs", "tasks", "run")
"""In the order in which they are done: the last has the time that is left."""
BOUNDS = (
    "broker.ready_max_bytes=134217728",
    "broker.results_max_bytes=67108864",
    "monitor.samples_max_bytes=8388608",
    "monitor.log_max_bytes=1048576",
)
"""Bounds on disk of the long run: so low that all are reached within minutes."""
EVERY = 5.0
"""Seconds between two samples."""
WARM_UP = 0.2
"""Share of a scene before the part whose course counts."""
MEBI = 1024.0**2
BATCH, AHEAD = 2000, 3
"""No-op tasks that are scheduled at a time, and as how many such batches."""
TASK_TOKENS = 24
RUNS_STEPS = 60
"""Batches of each of the many runs for each hour of the soak: a run's memory rises for its first thousand."""


@dataclass
class Watch:
    """Samples of a scene."""

    name: str
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By series, as ``memory/trainer-0``: seconds since the start, and the value in MiB or milliseconds."""
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def note(self, series: str, value: float) -> None:
        """Take in a value of now."""
        self.samples.setdefault(series, []).append((time.monotonic() - self.began, value))

    def note_memory(self, processes: dict[str, int | None]) -> None:
        """Take in the memory of processes by their names; those that are gone are left out."""
        for name, pid in processes.items():
            if pid is not None:
                with suppress(OSError):
                    if rollup := Path(f"/proc/{pid}/smaps_rollup").read_text():  # one that has ended has no pages
                        self.note(f"memory/{name}", anonymous_memory(rollup))

    def trends(self) -> dict[str, Trend]:
        """Return the course of each series behind the warm-up, where there are samples enough."""
        end = max((at for points in self.samples.values() for at, _ in points), default=0.0)
        found = {
            name: trend([one for one in points if one[0] >= WARM_UP * end]) for name, points in self.samples.items()
        }
        return {name: one for name, one in sorted(found.items()) if one is not None}

    def verdicts(self) -> list[str]:
        """Return what is wrong, in sentences."""
        return [
            *self.failures,
            *(
                f"{name} grew by {one.growth:.1f} within {one.seconds / 60:.0f} minutes, its noise is {one.noise:.1f}"
                for name, one in self.trends().items()
                if not name.startswith("disk/") and not one.is_flat
            ),
        ]


def anonymous_memory(rollup: str) -> float:
    """Return the MiB of ``Anonymous`` in the text of a process's ``smaps_rollup``.

    Raises:
        ValueError: It has none.
    """
    for line in rollup.splitlines():
        name, _, value = line.partition(":")
        if name == "Anonymous":
            return int(value.split()[0]) / 1024
    raise ValueError(f"no Anonymous in {rollup[:80]!r}, wanted the smaps_rollup of Linux 4.14 or newer")


@asynccontextmanager
async def sampling(look: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call ``look`` every :data:`EVERY` seconds meanwhile."""

    async def repeat() -> None:
        while True:
            await look()
            await asyncio.sleep(EVERY)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()


@asynccontextmanager
async def private_node(folder: Path) -> AsyncIterator[PrivateNode]:
    """Have a broker of our own meanwhile; its URL is in the environment."""
    node = PrivateNode(folder / "broker")
    await node.start()
    try:
        await node.wait_ready()
        os.environ[URL_VARIABLE] = node.url
        yield node
    finally:
        os.environ.pop(URL_VARIABLE, None)
        await node.stop()


def size_of(folder: Path) -> int:
    """Return the bytes of a folder, or of a file."""
    if folder.is_file():
        return folder.stat().st_size
    total = 0
    for within, _, files in os.walk(folder):  # unlike rglob it passes over folders that are taken away meanwhile
        for file in files:
            with suppress(OSError):
                total += os.stat(os.path.join(within, file)).st_size
    return total


# -- scenes


async def whole_run(folder: Path, watch: Watch, seconds: float) -> None:
    """Train for so long."""
    run_folder = folder / "run"
    settings = ["buffer.total_steps=100000000", "explorer.eval_interval=1000", "name=soak", *BOUNDS]
    async with LocalRun(EXAMPLE, run_folder, settings) as run:
        await run.until_progress(1, 180.0)
        assert run.process is not None
        tail, last = MetricsTail(run_folder), 0.0

        async def look() -> None:
            nonlocal last
            assert run.process is not None
            watch.note_memory(await asyncio.to_thread(processes_of, run, run_folder))
            for part in await asyncio.to_thread(lambda: sorted(run_folder.iterdir())):
                watch.note(f"disk/{part.name}", await asyncio.to_thread(size_of, part) / MEBI)
            times = [line["time"] for line in tail.read_lines() if "trainer/step" in line]
            if times and last and times[-1] > last:
                watch.note("latency/step", 1e3 * (times[-1] - last) / len(times))
            if times:
                last = times[-1]
                watch.facts["steps"] = watch.facts.get("steps", 0) + len(times)

        async with sampling(look):
            try:
                code, output = await run.ended(seconds)
                watch.failures.append(f"the run ended with {code} before it was told to:\n{output[-2000:]}")
            except TimeoutError:
                run.process.terminate()
        code, output = await run.ended(120.0)
        if code not in (0, 130, 143):
            watch.failures.append(f"the run ended with {code}:\n{output[-2000:]}")
        if "lost        nothing" not in output:
            watch.failures.append(f"something was lost:\n{output[-2000:]}")
        watch.failures += unwatched(watch, ["broker", "engine", *agents_of(run_folder)])


def agents_of(folder: Path) -> list[str]:
    """Return the names of a run's agents, by their logs; one that was begun anew leaves ``NAME.1.jsonl`` beside it."""
    names = [log.stem for log in (folder / "logs").glob("*.jsonl")]
    return [name for name in names if "." not in name and not name.endswith(("-engine", "supervisor"))]


def unwatched(watch: Watch, processes: Sequence[str]) -> list[str]:
    """Return in sentences which processes have less than nine tenths of the samples of the supervisor."""
    count = {name: len(watch.samples.get(f"memory/{name}", ())) for name in ("supervisor", *processes)}
    return [
        f"the memory of {name} was sampled {seen} times, that of the supervisor {count['supervisor']} times"
        for name, seen in count.items()
        if seen < 0.9 * count["supervisor"]
    ]


def processes_of(run: LocalRun, folder: Path) -> dict[str, int | None]:
    """Return the processes of a run by their names."""
    assert run.process is not None
    found: dict[str, int | None] = {"supervisor": run.process.pid, "engine": run.pid("engine")}
    path = str(folder / "config.yaml")  # of the agents: an engine has a configuration of its own
    brokers: list[tuple[float, int]] = []
    with suppress(psutil.Error):
        for one in psutil.Process(run.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = " ".join(one.cmdline()).split()  # a forked agent's is one text
                if one.name() == "beam.smp":
                    brokers.append((one.create_time(), one.pid))
                elif path in words and "--id" in words:
                    found[words[words.index("--id") + 1]] = one.pid
    if brokers:
        found["broker"] = min(brokers)[1]  # the oldest: rabbitmqctl is Erlang's too, and ends soon
    return found


async def many_tasks(folder: Path, watch: Watch, count: int) -> None:
    """Have so many no-op tasks done through one Scheduler."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(private_node(folder))
        config, path = bench_scheduling.configuration(folder / "tasks")
        topology = Topology(config.name)
        bus = create_bus(config.broker, topology, "soak")
        await bus.connect()
        stack.push_async_callback(bus.close)
        scheduler = Scheduler(config, bus=bus, topology=topology)
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        pids = await stack.enter_async_context(bench_scheduling.runners(path, node.url, 2, None))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        beats = group.create_task(bench_scheduling.engine_beats(bus, topology), name="send an engine's heartbeats")
        stack.callback(beats.cancel)
        done, noted, at = 0, 0, time.monotonic()

        async def look() -> None:
            nonlocal noted, at
            watch.note_memory({"scheduler": os.getpid(), "runner-0": pids[0], "runner-1": pids[1], "broker": node.pid})
            watch.note("disk/broker", await asyncio.to_thread(size_of, folder / "broker") / MEBI)
            now = time.monotonic()
            if done > noted:
                watch.note("latency/task", 1e3 * (now - at) / (done - noted))
                noted, at = done, now

        def schedule(number: int) -> None:
            size = min(BATCH, count - number * BATCH)
            arguments = {"tokens": TASK_TOKENS}
            tasks = [Task(workflow=NoopWorkflow, raw_task={"n": n}, workflow_args=arguments) for n in range(size)]
            scheduler.schedule(tasks, number)

        batches = -(-count // BATCH)
        async with sampling(look):
            for number in range(min(AHEAD, batches)):
                schedule(number)
            for number in range(batches):
                statuses, experiences = await scheduler.get_results(number, timeout=600)
                if number + AHEAD < batches:
                    schedule(number + AHEAD)
                wanted = min(BATCH, count - number * BATCH)
                fine = sum(one.ok for one in statuses)
                if (fine, len({one.eid.task for one in experiences}), len(experiences)) != (wanted, wanted, wanted):
                    watch.failures.append(f"batch {number}: {fine} fine of {len(experiences)} answers, wanted {wanted}")
                done += len(experiences)
        watch.facts["tasks"] = done


async def heartbeats(folder: Path, watch: Watch, seconds: float) -> None:
    """Have an explorer and a runner hear the heartbeats of a large fleet for so long."""
    many = [("runner", 2000), ("engine", 16), ("operator", 4), ("explorer", 1), ("trainer", 1)]
    agents = [(role, number) for role, count in many for number in range(count)]
    watch.facts["agents"] = len(agents)
    async with private_node(folder) as node:
        config = load_config(bench_heartbeats.CONFIG)
        topology = Topology(config.name)
        bus = create_bus(config.broker, topology, "soak")
        await bus.connect()  # which declares the exchange to which heartbeats are sent
        await bus.close()
        listeners = {
            what: await asyncio.create_subprocess_exec(
                *(sys.executable, bench_heartbeats.__file__, "--measured", word, "--seconds", str(seconds)),
                stdout=asyncio.subprocess.PIPE,
            )
            for what, word in (("explorer", "explorer"), ("runner", "role"))
        }

        async def look() -> None:
            pids: dict[str, int | None] = {what: one.pid for what, one in listeners.items()}
            watch.note_memory({**pids, "broker": node.pid})

        try:
            async with sampling(look), asyncio.timeout(seconds + 300.0), asyncio.TaskGroup() as group:
                # should it fail, the group ends the scene
                sending = group.create_task(
                    bench_heartbeats.send(node.url, topology.exchange("telemetry"), agents), name="send heartbeats"
                )
                for what, one in listeners.items():
                    out, _ = await one.communicate()
                    if one.returncode:
                        watch.failures.append(f"{what} ended with {one.returncode}")
                    else:
                        watch.facts[f"share of a core, {what}"] = round(float(out.split()[-1]), 4)
                sending.cancel()
        finally:
            for one in listeners.values():
                if one.returncode is None:
                    one.kill()
                    await one.wait()


class RunOnBroker(Simulation):
    """A run whose agents are in this process, on a real broker as a user of its own."""

    url = ""

    def bus(self) -> Bus:  # type: ignore[override]  # a real one
        """Return a connection of its own, not connected."""
        self.topology = Topology(self.config.name)
        broker = self.config.broker.model_copy(update={"url": self.url})
        return create_bus(broker, self.topology, "soak")

    async def record_messages(self) -> None:
        """Keep no copies."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Keep the numbers of steps: everything that was kept would look like memory that grows."""
        if "trainer/step" in values:
            super().write(step, {"trainer/step": values["trainer/step"]})

    async def runner(self, bus: Any, topology: Topology) -> None:
        """Run slices until cancelled."""
        work = FakeRunner(
            bus, topology, lambda: self.engine.snapshot.version, self.runner_seconds, done=deque(maxlen=0)
        )
        await work.run()


async def many_runs(folder: Path, watch: Watch, count: int, batches: int) -> None:
    """Have so many runs, of so many batches each, work at a time on one broker."""
    async with private_node(folder) as node:
        runs = [await run_with_a_user(node, folder, number, batches) for number in range(count)]

        async def look() -> None:
            watch.note_memory({"agents": os.getpid(), "broker": node.pid})
            watch.note("disk/broker", await asyncio.to_thread(size_of, folder / "broker") / MEBI)

        async with sampling(look), asyncio.timeout(60.0 + 0.5 * count * batches):
            async with asyncio.TaskGroup() as group:
                for one in runs:
                    group.create_task(one.run())
        for one, other in zip(runs, [*runs[1:], runs[0]], strict=True):
            steps = [int(value) for _, value in one.values("trainer/step")]
            if steps != list(range(1, batches + 1)):
                watch.failures.append(f"{one.config.name} did the steps {steps}, wanted 1 to {batches}")
            if not await refused(one, other):
                watch.failures.append(f"the user of {one.config.name} may read what is {other.config.name}'s")
        watch.facts["runs"], watch.facts["steps"] = count, sum(len(one.values("trainer/step")) for one in runs)


async def run_with_a_user(node: PrivateNode, folder: Path, number: int, batches: int) -> RunOnBroker:
    """Make a user as the documentation says, and a run that has its name and so many batches."""
    name = f"soak-{number}"
    await node.ctl("add_user", name, f"{name}-password")
    for line in rabbitmqctl_lines(name, "/", permissions(name, "agent")):
        await node.ctl(*shlex.split(line)[1:])
    run_folder = folder / name
    run_folder.mkdir()
    made = RunOnBroker(run_folder, overrides=(f"name={name}",), batches=batches, step_seconds=0.2)
    made.url = f"amqp://{name}:{name}-password@{node.url.rpartition('@')[2]}"
    return made


async def refused(one: RunOnBroker, other: RunOnBroker) -> bool:
    """Say whether the broker refuses a run's user what is another run's."""
    bus = create_bus(one.config.broker.model_copy(update={"url": one.url}), other.topology, "soak-intruder")
    await bus.connect()
    try:
        async with asyncio.timeout(20), await bus.consume(other.topology.ready, offset=0) as feed:
            await anext(feed)
    except BusRefused:
        return True
    finally:
        await bus.close()
    return False


# -- the report


def table(watch: Watch) -> Iterator[str]:
    """Yield the lines of a scene's table."""
    yield f"## {watch.name}"
    yield ""
    facts = ", ".join(
        f"{value} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in watch.facts.items()
    )
    yield f"{max((points[-1][0] for points in watch.samples.values()), default=0.0) / 60:.0f} minutes; {facts}"
    yield ""
    yield "| series | level | growth an hour | growth | noise | |"
    yield "|---|---|---|---|---|---|"
    for name, one in watch.trends().items():
        said = "flat" if one.is_flat else "grows"
        yield f"| {name} | {one.level:.2f} | {one.an_hour:+.2f} | {one.growth:+.2f} | {one.noise:.2f} | {said} |"
    yield ""
    yield from (f"- {one}" for one in watch.verdicts())


def draw(watch: Watch, path: Path) -> None:
    """Write a plot of each kind of series."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    kinds = {"memory": "MiB (anonymous)", "latency": "ms", "disk": "MiB on disk"}
    shown = [kind for kind in kinds if any(name.startswith(f"{kind}/") for name in watch.samples)]
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(9, 3 * len(shown)), sharex=True, squeeze=False)
    for kind, axis in zip(shown, axes[:, 0], strict=True):
        for name, points in sorted(watch.samples.items()):
            if name.startswith(f"{kind}/"):
                axis.plot([at / 60 for at, _ in points], [value for _, value in points], label=name.partition("/")[2])
        axis.set_ylabel(kinds[kind])
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="x-small", ncols=4, loc="upper left")
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("minutes")
    figure.suptitle(f"soak: {watch.name}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


async def play(scene: str, folder: Path, watch: Watch, options: argparse.Namespace, deadline: float) -> None:
    """Play a scene; the last one until the deadline, on the monotonic clock."""
    match scene:
        case "heartbeats":
            await heartbeats(folder, watch, options.heartbeat_seconds)
        case "runs":
            await many_runs(folder, watch, options.runs, round(RUNS_STEPS * max(1.0, options.hours)))
        case "tasks":
            await many_tasks(folder, watch, options.tasks)
        case _:
            await whole_run(folder, watch, max(60.0, deadline - time.monotonic()))


async def soak(options: argparse.Namespace) -> bool:
    """Do all scenes; return whether nothing is wrong."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 3600.0 * options.hours
    fine = True
    for scene in [one for one in SCENES if one in options.scenes]:
        watch = Watch(scene)
        print(f"{time.strftime('%H:%M:%S')} {scene}", flush=True)
        with tempfile.TemporaryDirectory(prefix="tmq-soak-") as name:
            try:
                await play(scene, Path(name), watch, options, deadline)
            except Exception as error:  # the other scenes need not wait for its mend
                traceback.print_exc()
                watch.failures.append(f"it ended early: {type(error).__name__}: {error}")
        (out / f"{scene}.json").write_text(json.dumps({"facts": watch.facts, "samples": watch.samples}))
        lines = list(table(watch))
        (out / f"{scene}.md").write_text("\n".join(lines) + "\n")
        await asyncio.to_thread(draw, watch, out / f"{scene}.png")
        print("\n".join(lines), flush=True)
        fine &= not watch.verdicts()
    return fine


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0, help="for all scenes together")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="no-op tasks")
    parser.add_argument("--runs", type=int, default=50, help="runs on one broker")
    parser.add_argument("--heartbeat-seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path("soak"), help="folder for samples, tables and plots")
    parser.add_argument("--quick", action="store_true", help="few of everything, to see that it works")
    options = parser.parse_args()
    setup_logging("soak", "soak", None, "warning")
    if options.quick:
        options.hours, options.tasks, options.runs, options.heartbeat_seconds = 0.03, 4000, 3, 20.0
    try:
        return 0 if asyncio.run(until_told(options)) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


async def until_told(options: argparse.Namespace) -> bool:
    """Do the soak; SIGTERM ends it and what it started, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await soak(options)


if __name__ == "__main__":
    sys.exit(main())
