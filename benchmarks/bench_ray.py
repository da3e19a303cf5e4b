"""No-op tasks a second by our Scheduler on RabbitMQ and by Trinity-RFT's on Ray: the same tasks, two runners each.

    python -m venv .venv-ray
    .venv-ray/bin/pip install -r benchmarks/requirements-ray.txt
    .venv-ray/bin/pip install --no-deps trinity-rft==0.6.0
    python benchmarks/bench_ray.py --ray .venv-ray/bin/python [--alternations 3] [--tasks 4000] [--seconds 0 0.01 1]
                                                                     [--quick] [--check] [--json FILE]

The reference is in an environment of its own, without what it depends on: its scheduler and its runners need neither
vLLM nor verl (scheduler_on_ray.py). A task is 8 experiences from a workflow that asks no model; both callers get
experiences, not bytes. The two take turns, so that what else the machine does meets both. Ours gets as many tasks as
``--tasks`` says, a quarter as many where they are long; the reference TASKS_ON_RAY at most. With ``--seconds`` a task
holds its slot for so long (no-op tasks: 0). A runner of the reference has one slot, a runner of ours has 64.

``--check`` exits with 1 where ours does not do 20 times as many no-op tasks of 64 tokens, or 10 times as many of
1024, or where a batch of one takes 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import bench_scheduling
from bench_scheduling import Setting, Throughput
from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.local_broker.node import PrivateNode
from trinity_mq.runtime.serve import tune_garbage_collection

RUNNERS = 2
RATIOS = {64: 20.0, 1024: 10.0}
"""By tokens of an experience: how many times the reference's tasks a second are wanted."""
LATENCY = 0.01
"""Seconds of a batch of one task that are wanted at most."""
TASKS_ON_RAY = 1500
"""Upper bound of the reference's tasks: about ten seconds of work for it."""
SECONDS_ON_RAY = 20.0
"""Upper bound of the seconds that the tasks hold the slots of the reference."""
LIMIT = 600.0
"""Seconds after which the reference is ended."""


async def ours(setting: Setting) -> Throughput:
    """Do it on RabbitMQ."""
    with tempfile.TemporaryDirectory(prefix="tmq-ray-") as temporary:
        folder = Path(temporary)
        config, path = bench_scheduling.configuration(folder / "run")
        node = PrivateNode(folder / "broker")
        await node.launch()
        try:
            os.environ[URL_VARIABLE] = node.url
            return await bench_scheduling.through_the_queue(config, path, node.url, setting)
        finally:
            await node.stop()


def on_ray(python: Path, setting: Setting) -> Throughput:
    """Do it on Ray."""
    script = Path(__file__).with_name("scheduler_on_ray.py")
    tasks = min(setting.tasks, TASKS_ON_RAY)
    if setting.seconds:
        tasks = min(tasks, int(SECONDS_ON_RAY * setting.runners / setting.seconds))
    words = [str(word) for word in (tasks, setting.tokens, setting.runners, setting.alone, setting.seconds)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(script), *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(f"{script.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return Throughput(**json.loads(done.stdout.splitlines()[-1]))


def report(setting: Setting, mine: Sequence[Throughput], theirs: Sequence[Throughput]) -> tuple[bool, dict[str, float]]:
    """Print the medians of one setting; return whether what is wanted is there, and how many times faster ours is."""
    rate, reference = (statistics.median(one.rate for one in runs) for runs in (mine, theirs))
    latency, slower = (statistics.median(one.latency for one in runs) for runs in (mine, theirs))
    print(f"\n{setting.name}, medians of {len(mine)}")
    for name, runs, middle, seconds in (("trinity-mq", mine, rate, latency), ("on Ray", theirs, reference, slower)):
        each = " ".join(f"{one.rate:.0f}" for one in runs)
        print(f"  {name:12}{middle:8.0f} tasks/s ({each}), a batch of one {1000 * seconds:.1f} ms")
    if setting.seconds:
        print(f"  ratio       {rate / reference:8.1f}")
        return True, {f"{setting.tokens} tokens, tasks of {setting.seconds:g} s: tasks a second": rate / reference}
    wanted = RATIOS[setting.tokens]
    print(f"  ratio       {rate / reference:8.1f}, wanted {wanted:g}; latency wanted {1000 * LATENCY:g} ms")
    faster = {
        f"{setting.tokens} tokens: tasks a second": rate / reference,
        f"{setting.tokens} tokens: a batch of one": slower / latency,
    }
    return rate / reference >= wanted and latency <= LATENCY, faster


async def main() -> int:
    """Let the two take turns."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", type=Path, required=True, help="python of the environment with ray and trinity-rft")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=4000, help="of 64 tokens; a quarter as many of 1024")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0], help="for which a task holds its slot")
    parser.add_argument("--quick", action="store_true", help="once, few tasks: does it run?")
    parser.add_argument("--check", action="store_true")
    figures.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.alternations, options.tasks = 1, 400
    torch.set_num_threads(1)
    tune_garbage_collection()  # as agents do
    good = True
    ratios: dict[str, float] = {}
    for tokens, length in itertools.product(RATIOS, options.seconds):
        setting = Setting(tokens, RUNNERS, options.tasks if tokens == 64 else options.tasks // 4, length)
        mine, theirs = [], []
        for _ in range(options.alternations):
            mine.append(await ours(setting))
            theirs.append(await asyncio.to_thread(on_ray, options.ray, setting))
        met, faster = report(setting, mine, theirs)
        good = met and good
        ratios |= faster
    figures.write(options, ratios)
    return int(options.check and not good)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
