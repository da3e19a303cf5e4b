"""The demo's task by trinity-mq, by TRL's GRPOTrainer and by a bare loop: speed, processor time, start and memory.

    pip install -e '.[trl]' -c constraints-cpu.txt
    python benchmarks/bench_demo.py [--seeds 3] [--steps 150] [--systems trinity-mq trl bare] [--quick] [--check]
                                     [--out FILE] [--json FILE]

examples/arithmetic.yaml with the same first model, questions, rewards, loss and schedule. *trinity-mq* is a whole run:
RabbitMQ, an engine, two runners, an operator, a trainer, processes all of them. *trl* samples and trains in one process
(bench_trl.py), *bare* is our own sampling, reward and train step in one process without a queue (one_process.py). The
systems take turns, seed by seed, so that what else the machine does meets all of them.

- *steps/s*: after the first WARM_UP steps, to the end of the last one. Nobody evaluates before that.
- *cpu s*: processor seconds a step of all processes of a system in that time; below the table, of trinity-mq by role.
- *rollout*: of trinity-mq, from the admission of a batch until all its outcomes are there, median; *train*: a train
  step with what the trainer does around it, median.
- *first step*: seconds from the start of the command to the end of the first train step.
- *memory*: the most proportional memory (PSS) of all processes together, looked at every 5 seconds.
- *accuracy*: on the held-out questions, after the last step.

``--check`` exits with 1 where one of TARGETS is missed, and says which.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from trinity_mq.config import load_config
from trinity_mq.observability.timeline import spans
from trinity_mq.testing.runs import LocalRun

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
SYSTEMS = ("trinity-mq", "trl", "bare")
WARM_UP = 30
"""Steps that do not count: caches, allocators and the optimizer's state are there after them."""
LOOK = 0.5
"""Seconds between two looks at the processor time used."""
MEMORY_EVERY = 10
"""Looks from one that also counts memory to the next: the kernel takes a tenth of a second for it."""
LIMIT = 900.0
"""Seconds after which a run is ended and the benchmark fails."""
ACCURACY = "eval/ops3_held_out/accuracy/mean@1"
ROLES = ("explorer", "runner", "operator", "trainer")
RATE_OF_TRL, RATE_OF_BARE = "steps/s of TRL's", "steps/s of the bare loop's"
CPU_OF_TRL, CPU_OF_BARE = "cpu s of TRL's", "cpu s of the bare loop's"
TARGETS = (
    (RATE_OF_TRL, 1.2, True),
    (RATE_OF_BARE, 0.6, True),
    ("cpu s a step", 0.2, False),
    ("rollout, ms", 40.0, False),
    ("first step, s", 6.0, False),
    ("memory, MiB", 1024.0, False),
)
"""Targets: the name, the bound, and whether more is better."""


@dataclass(frozen=True)
class Measured:
    """One run of one system."""

    system: str
    seed: int
    rate: float
    """Steps a second."""
    cpu: float
    """Processor seconds a step."""
    first: float
    """Seconds from the start to the end of the first step."""
    memory: float
    """MiB."""
    accuracy: float
    rollout: float | None = None
    """Milliseconds."""
    train: float | None = None
    """Milliseconds."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    """Processor milliseconds a step."""


@dataclass(frozen=True)
class Look:
    """Processor time and memory that the processes of a system had used at one moment."""

    time: float
    cpu: Mapping[str, float]
    """Processor seconds by role, of processes that had ended too."""
    memory: float
    """MiB; 0 where it was not counted."""


def configuration(seed: int, steps: int) -> dict[str, Any]:
    """Return the example with one evaluation, after the last step, and one checkpoint."""
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    data |= {"name": "demo", "seed": seed}
    data["buffer"]["total_steps"] = steps
    data["explorer"] = {"eval_interval": steps, "eval_on_startup": False}
    data["trainer"] = {"save_interval": steps + 1}
    return data


# -- processes, seen from outside


class Watcher:
    """Looks at a process and all below it."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu: dict[int, tuple[str, float]] = {}
        self.looks: list[Look] = []

    def look(self) -> None:
        """Note what they have used so far."""
        memory = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [self._root, *self._root.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    self._cpu[one.pid] = (role_of(one.name(), one.cmdline()), times.user + times.system)
                    if len(self.looks) % MEMORY_EVERY == 0:
                        memory += one.memory_full_info().pss / 2**20
        by_role: dict[str, float] = defaultdict(float)
        for role, seconds in self._cpu.values():
            by_role[role] += seconds
        self.looks.append(Look(time.time(), by_role, memory))

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK)


def role_of(name: str, command: Sequence[str]) -> str:
    """Return the role of a process of a run.

    >>> role_of("python", ["python", "-m", "trinity_mq.cli.main", "runner", "config.yaml", "--id", "runner-0"])
    'runner'
    """
    if "beam" in name:
        return "RabbitMQ"
    line = " ".join(command)
    if found := re.search(rf"trinity_mq\.cli\.main ({'|'.join(ROLES)}) ", line):
        return found[1]
    return "engine" if "trinity_agents.engine" in line else "supervisor"


def processor_seconds(looks: Sequence[Look], at: float) -> Mapping[str, float]:
    """Return the processor seconds used by a time, by role, between the looks before and after it."""
    later = next((number for number, look in enumerate(looks) if look.time >= at), len(looks) - 1)
    before, after = looks[max(0, later - 1)], looks[later]
    share = (at - before.time) / (after.time - before.time) if after.time > before.time else 0.0
    share = min(max(share, 0.0), 1.0)
    return {role: before.cpu.get(role, 0.0) * (1 - share) + seconds * share for role, seconds in after.cpu.items()}


# -- the systems


async def ours(seed: int, steps: int, folder: Path) -> Measured:
    """Do a whole run of trinity-mq."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(seed, steps)), encoding="utf-8")
    began = time.time()
    async with LocalRun(file, folder / "run") as run:
        assert run.process is not None
        watcher = Watcher(run.process.pid)
        watching = asyncio.create_task(watcher.watch())
        try:
            code, output = await run.ended(LIMIT)
        finally:
            watching.cancel()
    if code != 0:
        raise SystemExit(f"the run ended with {code}:\n{output}")
    lines = run.metrics()
    ends = [line["time"] for line in lines if "trainer/step" in line]
    begin, end = processor_seconds(watcher.looks, ends[WARM_UP - 1]), processor_seconds(watcher.looks, ends[-1])
    counted = len(ends) - WARM_UP
    by_role = {role: 1000 * (seconds - begin.get(role, 0.0)) / counted for role, seconds in end.items()}
    every = [one for one in spans(lines) if one.step > WARM_UP]
    rollout, train = (
        1000 * statistics.median(one.end - one.start for one in every if one.what == what)
        for what in ("explore", "train")
    )
    return Measured(
        "trinity-mq",
        seed,
        rate=counted / (ends[-1] - ends[WARM_UP - 1]),
        cpu=sum(by_role.values()) / 1000,
        first=ends[0] - began,
        memory=max(look.memory for look in watcher.looks),
        accuracy=run.values(ACCURACY)[-1][1],
        rollout=rollout,
        train=train,
        by_role=by_role,
    )


async def alone(system: str, seed: int, steps: int, folder: Path) -> Measured:
    """Do a run of a system that is one process, which reports the ends of its steps and its processor time at each."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(configuration(seed, steps)), encoding="utf-8")
    script = {"trl": ["bench_trl.py", "--trl"], "bare": ["bench_demo.py", "--bare"]}[system]
    command = [sys.executable, str(Path(__file__).with_name(script[0])), script[1], str(file)]
    began = time.time()
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    watcher = Watcher(process.pid)
    watching = asyncio.create_task(watcher.watch())
    try:
        async with asyncio.timeout(LIMIT):
            output, errors = await process.communicate()
    finally:
        watching.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{errors.decode()[-2000:]}")
    said = json.loads(output.decode().splitlines()[-1])
    ends, cpu = said["ends"], said["cpu"]
    counted = len(ends) - WARM_UP
    return Measured(
        system,
        seed,
        rate=counted / (ends[-1] - ends[WARM_UP - 1]),
        cpu=(cpu[-1] - cpu[WARM_UP - 1]) / counted,
        first=ends[0] - began,
        memory=max(look.memory for look in watcher.looks),
        accuracy=said["accuracy"][str(steps)],
    )


async def bare(file: Path) -> dict[str, Any]:
    """Train a configuration in this process; return the end of each step, the processor time by then, the accuracy."""
    from one_process import OneProcess

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(file, [f"run_dir={folder}/run"])
        steps = config.buffer.total_steps
        assert steps is not None
        loop = OneProcess(config, Path(folder), steps)
        await loop.open()
        ends, cpu = [], []
        for step in range(1, steps + 1):
            await loop.step(step)
            ends.append(time.time())
            cpu.append(time.process_time())
        accuracy = loop.accuracy()
        await loop.close()
    return {"ends": ends, "cpu": cpu, "accuracy": {str(steps): accuracy}}


# -- results


def table(found: Sequence[Measured]) -> str:
    """Return a Markdown table of the medians over the seeds, with each seed's steps a second."""
    heads = ("system", "steps/s, by seed", "steps/s", "cpu s a step", "rollout, ms", "train, ms", "first step, s",
             "memory, MiB", "accuracy")  # fmt: skip
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for system, runs in _by_system(found).items():
        cells = [
            system,
            " ".join(f"{one.rate:.2f}" for one in runs),
            f"{_median(runs, 'rate'):.2f}",
            f"{_median(runs, 'cpu'):.3f}",
            *(
                f"{_median(runs, name):.0f}" if getattr(runs[0], name) is not None else ""
                for name in ("rollout", "train")
            ),
            f"{_median(runs, 'first'):.1f}",
            f"{_median(runs, 'memory'):.0f}",
            f"{min(one.accuracy for one in runs):.3f} to {max(one.accuracy for one in runs):.3f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def roles(found: Sequence[Measured]) -> str:
    """Return what each role of trinity-mq spends, as one line."""
    runs = [one.by_role for one in found if one.by_role]
    names = sorted({role for one in runs for role in one}, key=lambda role: -max(one.get(role, 0.0) for one in runs))
    medians = {role: statistics.median(one.get(role, 0.0) for one in runs) for role in names}
    return "processor ms a step: " + ", ".join(f"{role} {value:.0f}" for role, value in medians.items())


def seen(found: Sequence[Measured]) -> dict[str, float]:
    """Return what the targets are about, by their names; ratios only where the other system was measured."""
    groups = _by_system(found)
    own = groups["trinity-mq"]
    values = {
        "cpu s a step": _median(own, "cpu"),
        "rollout, ms": _median(own, "rollout"),
        "first step, s": _median(own, "first"),
        "memory, MiB": max(one.memory for one in own),
    }
    for name, system in ((RATE_OF_TRL, "trl"), (RATE_OF_BARE, "bare")):
        if system in groups:
            values[name] = _median(own, "rate") / _median(groups[system], "rate")
    for name, system in ((CPU_OF_TRL, "trl"), (CPU_OF_BARE, "bare")):
        if system in groups:
            values[name] = _median(own, "cpu") / _median(groups[system], "cpu")
    return values


def verdicts(values: Mapping[str, float]) -> list[tuple[str, bool]]:
    """Return a line on each target, and whether it is met."""
    found = []
    for name, bound, more in TARGETS:
        if name in values:
            met = values[name] >= bound if more else values[name] <= bound
            wanted = f"at {'least' if more else 'most'} {bound:g}"
            found.append((f"{name}: {values[name]:.2f}, wanted {wanted}: {'met' if met else 'MISSED'}", met))
    return found


def _by_system(found: Sequence[Measured]) -> dict[str, list[Measured]]:
    return {system: runs for system in SYSTEMS if (runs := [one for one in found if one.system == system])}


def _median(runs: Sequence[Measured], name: str) -> float:
    values: list[float] = [getattr(one, name) for one in runs]
    return statistics.median(values)


async def compare(options: argparse.Namespace) -> list[Measured]:
    """Let the systems take turns."""
    found = []
    for seed in range(options.seeds):
        for system in options.systems:
            with tempfile.TemporaryDirectory(prefix="tmq-demo-") as folder:
                run = ours(seed, options.steps, Path(folder)) if system == "trinity-mq" else None
                one = await (run or alone(system, seed, options.steps, Path(folder)))
            print(f"{system}, seed {seed}: {one.rate:.2f} steps/s, {one.cpu:.3f} cpu s, {one.first:.1f} s", flush=True)
            found.append(one)
    return found


def main() -> int:
    """Run it."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help=f"more than the {WARM_UP} that do not count")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: those that are installed")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps that count: does it run?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--out", type=Path, help="also write every run there, as JSON")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    figures.add_option(parser)
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(asyncio.run(bare(options.bare))))
        return 0
    if options.quick:
        options.seeds, options.steps = 1, WARM_UP + 6
    if options.systems is None:
        options.systems = [system for system in SYSTEMS if system != "trl" or find_spec("trl")]
        if "trl" not in options.systems:
            print("TRL is left out: it is not installed (extra trl)")
    if options.steps <= WARM_UP:
        parser.error(f"--steps is {options.steps}, wanted more than the {WARM_UP} that do not count")
    found = asyncio.run(compare(options))
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end\n\n{table(found)}")
    missed = False
    if "trinity-mq" in options.systems:
        print(f"\n{roles(found)}\n")
        values = seen(found)
        names = (RATE_OF_TRL, RATE_OF_BARE, CPU_OF_TRL, CPU_OF_BARE)
        figures.write(options, {name: values[name] for name in names if name in values})
        for line, met in verdicts(values):
            print(line)
            missed = missed or not met
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
