"""Gain from the overlap of rollouts and training: wall time of whole runs, one step off and fully asynchronous.

    python benchmarks/bench_overlap.py [--batches 20] [--repetitions 2] [--check] [--quick] [--json FILE]

The task is balanced: the rollout of a batch takes as long as its train step, so that on-policy training (``fixed``,
``sync_offset: 0``), where one waits for the other, takes twice as long as either, and no overlap can gain more than
that. Most of a rollout is an environment that answers late, as tools do (:class:`ToolUse` sleeps), and trainer and
engine have one thread each, so that on two cores the overlap is not a question of processors. How late follows from a
short run before: its fastest train step less its fastest rollout.

Each run has a RabbitMQ, an engine, runners, an operator and a trainer of its own, all of them processes, and makes real
train steps; the learning rate is so small that answers, and so both halves, stay as long as they were. *seconds* are
from the end of the first train step to the end of the last one. The settings take turns, and the fastest run of each
counts, the one that others on the machine disturbed least. *limit* is (rollout + train step) / the longer one of the
two, by the medians of the on-policy run. The trainer is idle while it waits for data (``time/wait_data``), runners
while no batch is open.

``--check`` exits with 1 if one of the two gains less than 1.6.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from trinity_mq.experience import Experience
from trinity_mq.observability.timeline import Span, spans
from trinity_mq.testing.runs import LocalRun
from trinity_mq.workflows import AsyncSimpleWorkflow, arguments_of
from trinity_mq.workflows.builtin.simple import SimpleArguments

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
ON_POLICY = "fixed, offset 0"
SETTINGS: dict[str, dict[str, Any]] = {
    ON_POLICY: {"sync_style": "fixed", "sync_interval": 1, "sync_offset": 0},
    "fixed, offset 1": {"sync_style": "fixed", "sync_interval": 1, "sync_offset": 1},
    "fully_async": {"sync_style": "fully_async", "sync_interval": 1, "pipeline_depth": 1},
}
BOUND = 1.6
WARM_UP = 3
"""Batches of the run before the others that do not count."""
LIMIT = 900.0
"""Seconds after which a run is given up."""


class ToolArguments(SimpleArguments):
    """``workflow_args`` of :class:`ToolUse`."""

    latency: float = Field(ge=0)
    """Seconds."""


class ToolUse(AsyncSimpleWorkflow):
    """One answer to each task, given to an environment that takes its time before it is judged."""

    async def _asked_responses(self, **sampling: Any) -> list[Experience]:
        found = await super()._asked_responses(**sampling)
        await asyncio.sleep(arguments_of(self.task, ToolArguments).latency)
        return found


@dataclass(frozen=True)
class Measured:
    """A run, in seconds."""

    seconds: float
    """From the end of the first train step to the end of the last one."""
    trainer_idle: float
    """Share of these."""
    runners_idle: float
    train: float
    """Seconds of the train step of a batch; those below are also of one; medians unless another way was asked for."""
    rollout: float
    sync: float


def configuration(synchronizer: dict[str, Any], batches: int, latency: float) -> dict[str, Any]:
    """Return the example with a larger model, so that a train step takes more than a second, and late answers."""
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    data["name"] = "overlap"
    data["plugin_dirs"] = [str(Path(__file__).parent)]
    data["model"]["tiny"] |= {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6}
    data["model"]["tiny"] |= {"num_attention_heads": 6, "head_dim": 32}
    data["algorithm"]["optimizer"] = {"lr": 1e-6}
    data["buffer"] |= {"total_steps": batches, "eval_tasksets": []}
    data["buffer"]["taskset"] |= {"workflow": "bench_overlap.ToolUse", "workflow_args": {"latency": latency}}
    data["trainer"] = {"save_interval": batches + 1, "num_threads": 1}
    data["explorer"] = data.get("explorer", {}) | {"rollout_model": {"num_threads": 1}}
    data["synchronizer"] = synchronizer
    return data


async def run(synchronizer: dict[str, Any], batches: int, latency: float) -> list[dict[str, Any]]:
    """Do a whole run and return its metrics.

    Raises:
        SystemExit: It ended badly; with its output.
    """
    with tempfile.TemporaryDirectory(prefix="tmq-overlap-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(configuration(synchronizer, batches, latency)), encoding="utf-8")
        async with LocalRun(config, Path(folder) / "run") as whole:
            code, output = await whole.ended(LIMIT)
        if code != 0:
            raise SystemExit(f"the run ended with {code}:\n{output}")
        return whole.metrics()


def measured(
    lines: Sequence[dict[str, Any]],
    skipped: int = 1,
    typical: Callable[[Sequence[float]], float] = statistics.median,
) -> Measured:
    """Return what the metrics of a run say.

    Args:
        lines: The metrics.
        skipped: Nothing counts that is before the end of this train step.
        typical: What is taken of the seconds of the batches.
    """
    steps = [line for line in lines if "trainer/step" in line]
    begin, end = steps[skipped - 1]["time"], steps[-1]["time"]
    every = [one for one in spans(lines) if begin < one.end <= end]
    lengths = {
        what: [one.end - one.start for one in every if one.what == what] for what in ("train", "explore", "sync")
    }
    return Measured(
        seconds=end - begin,
        trainer_idle=sum(line["time/wait_data"] for line in steps[skipped:]) / (end - begin),
        runners_idle=1 - covered((one for one in spans(lines) if one.what == "explore"), begin, end) / (end - begin),
        train=typical(lengths["train"]),
        rollout=typical(lengths["explore"]),
        sync=typical(lengths["sync"]),
    )


def covered(every: Iterable[Span], begin: float, end: float) -> float:
    """Return for how many of the seconds from ``begin`` to ``end`` at least one of the spans lasts."""
    total, reached = 0.0, begin
    for one in sorted(every, key=lambda one: one.start):
        total += max(0.0, min(one.end, end) - max(one.start, reached))
        reached = max(reached, one.end)
    return total


async def compare(batches: int, repetitions: int) -> dict[str, list[Measured]]:
    """Balance the task, and let the settings take turns."""
    before = measured(await run(SETTINGS[ON_POLICY], 4 * WARM_UP, 0.0), WARM_UP, min)
    latency = before.train - before.rollout
    if latency <= 0:
        raise SystemExit(
            f"a rollout took {before.rollout:.2f} s without latency, a train step {before.train:.2f} s; wanted is a "
            "longer train step: something else keeps the processors busy, so measure again when it is over"
        )
    print(f"train step {before.train:.2f} s, rollout {before.rollout:.2f} s and {latency:.2f} s of latency", flush=True)
    found: dict[str, list[Measured]] = {name: [] for name in SETTINGS}
    for _ in range(repetitions):
        for name, synchronizer in SETTINGS.items():
            one = measured(await run(synchronizer, batches, latency))
            found[name].append(one)
            print(f"{name}: {one.seconds:.1f} s", flush=True)
    return found


def report(found: dict[str, list[Measured]], batches: int) -> dict[str, float]:
    """Print a table of the fastest runs and return what each setting gains against the on-policy one."""
    best = {name: min(each, key=lambda one: one.seconds) for name, each in found.items()}
    base = best[ON_POLICY]
    limit = (base.train + base.rollout) / max(base.train, base.rollout)
    print(f"\n{batches} batches, fastest of {len(found[ON_POLICY])} runs; limit {limit:.2f}, bound {BOUND}")
    heads = ("seconds", "ratio", "trainer idle", "runners idle", "train step", "rollout", "sync")
    print(f"{'':16}" + "".join(f"{head:>13}" for head in heads))
    for name, one in best.items():
        shares = "".join(f"{share:13.0%}" for share in (one.trainer_idle, one.runners_idle))
        parts = "".join(f"{seconds:11.3f} s" for seconds in (one.train, one.rollout, one.sync))
        print(f"{name:16}{one.seconds:13.1f}{base.seconds / one.seconds:13.2f}{shares}{parts}")
    return {f"{name}: gain": base.seconds / one.seconds for name, one in best.items() if name != ON_POLICY}


def main() -> int:
    """Run it."""
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one repetition of six batches")
    figures.add_option(parser)
    options = parser.parse_args()
    batches, repetitions = (6, 1) if options.quick else (options.batches, options.repetitions)
    gains = report(asyncio.run(compare(batches, repetitions)), batches)
    figures.write(options, gains)
    return int(options.check and min(gains.values()) < BOUND)


if __name__ == "__main__":
    sys.exit(main())
