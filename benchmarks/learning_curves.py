"""Learning curves of algorithms on the example's task: held-out accuracy by train step.

    python benchmarks/learning_curves.py presets [--names grpo ipo ...] [--seeds 3] [--steps 300] [--jobs 2]

``presets`` trains examples/arithmetic.yaml with each algorithm that samples answers, its own pieces unchanged, in one
process each without a queue (``one_process.py``): about 30 seconds for 300 steps on one core, ``--jobs`` at a time.

What rules do about old data is measured by ``old_data.py``.

Curves, seconds and, where a run ended badly, what it said go to ``<study>.json`` in the folder,
which is read again: a study that was stopped goes on. At the end one table.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from one_process import OneProcess
from trinity_mq.config import AlgorithmConfig, load_config
from trinity_mq.config.algorithm.presets import PRESETS

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
METRIC = "eval/ops3_held_out/accuracy/mean@1"
EVALUATIONS = 6
"""Number of evaluations of a run, evenly spread; the last after its last step."""
LIMIT = 900.0
"""Seconds after which a whole run is ended and counts as failed."""


@dataclass
class Curve:
    """One run."""

    name: str
    seed: int
    depth: int
    seconds: float
    accuracy: dict[str, float] = field(default_factory=dict)
    """By step."""
    staleness: float | None = None
    """Mean over the steps, in train steps."""
    failure: str = ""
    """Exit code and last output of a run that ended badly."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.depth}/{self.seed}"

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy, key=int)] if self.accuracy else 0.0


def sampling_presets() -> list[str]:
    """Return the presets that need nothing but sampled answers and their rewards."""
    found = []
    for name in PRESETS:
        config = AlgorithmConfig.model_validate({"algorithm_type": name})
        if config.weights.rl == 1 and config.ce_schedule is None and config.estimator.needs_reward:
            found.append(name)
    return found


def configuration(algorithm: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the example with another algorithm, on-policy."""
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    plain = data["algorithm"]
    optimizer = plain["optimizer"] | ({"lr": options.lr} if options.lr else {})
    kept = {name: plain[name] for name in ("repeat_times", "entropy_coef", "entropy_decay")}
    # The example's model is tiny: its critic learns at the rate of the policy.
    kept["critic"] = {"lr": optimizer["lr"]}
    data["algorithm"] = kept | {"optimizer": optimizer} | dict(algorithm)
    if algorithm["algorithm_type"] == "remax":
        data["buffer"]["taskset"]["workflow_args"] = {"greedy_baseline": True}
    data["buffer"]["total_steps"] = options.steps
    data["explorer"]["eval_interval"] = max(1, options.steps // EVALUATIONS)
    data["synchronizer"] = {"sync_interval": 1, "sync_offset": 0}
    return data


def in_one_process(name: str, data: dict[str, Any], seed: int) -> Curve:
    """Train a configuration without a queue and return its curve."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tmq-curve-") as temporary:
        return asyncio.run(_train(name, data | {"seed": seed}, Path(temporary), began))


async def _train(name: str, data: dict[str, Any], folder: Path, began: float) -> Curve:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    config = load_config(file, [f"run_dir={folder}/run"])
    steps = config.buffer.total_steps
    assert steps is not None
    every = config.explorer.eval_interval
    loop = OneProcess(config, folder, steps)
    await loop.open()
    accuracy = {}
    try:
        for step in range(1, steps + 1):
            await loop.step(step)
            if step % every == 0 or step == steps:
                accuracy[str(step)] = loop.accuracy()
    finally:
        await loop.close()
    return Curve(name, config.seed, 0, time.monotonic() - began, accuracy)


def whole_run(name: str, data: dict[str, Any], seed: int, depth: int, folder: Path) -> Curve:
    """Run a configuration to its end, as ``trinity-mq run`` does, and return its curve."""
    where = folder / f"{name}-{depth}-{seed}"
    config = folder / f"{name}-{depth}-{seed}.yaml"
    data |= {"name": f"curve-{name.replace('_', '-')}-{depth}-{seed}", "seed": seed, "run_dir": str(where)}
    config.write_text(yaml.safe_dump(data), encoding="utf-8")
    began = time.monotonic()
    command = [sys.executable, "-m", "trinity_mq.cli.main", "run", str(config)]
    log = folder / f"{name}-{depth}-{seed}.log"
    with log.open("w") as output:
        try:
            code: int | None = subprocess.run(
                command, stdout=output, stderr=output, timeout=LIMIT, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    failure = "" if code == 0 else f"exit code {code}: {log.read_text()[-500:]}"
    rows = list(metrics(where / "metrics.jsonl"))
    ages = [row["sample/staleness/mean"] for row in rows if "sample/staleness/mean" in row]
    return Curve(
        name,
        seed,
        depth,
        time.monotonic() - began,
        {str(row["step"]): row[METRIC] for row in rows if METRIC in row and row["step"]},
        statistics.fmean(ages) if ages else None,
        failure,
    )


def metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; none if there is no file."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def table(curves: Iterable[Curve]) -> str:
    """Return a Markdown table: a row for each algorithm and depth, over its seeds."""
    grouped: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        grouped.setdefault((curve.depth, curve.name), []).append(curve)
    steps = sorted({int(step) for found in grouped.values() for curve in found for step in curve.accuracy})
    # the last step is evaluated too, right behind a regular one
    steps = [step for step, after in itertools.pairwise([*steps, steps[-1] * 2]) if after - step > 5] if steps else []
    heads = [
        "algorithm",
        *(f"step {step}" for step in steps),
        "seeds at the end",
    ]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (_, name), found in sorted(grouped.items(), key=lambda item: (item[0][0], -_final(item[1]))):
        cells = [f"`{name}`"]
        for step in steps:
            values = [curve.accuracy[str(step)] for curve in found if str(step) in curve.accuracy]
            cells.append(f"{statistics.fmean(values):.2f}" if values else "")
        failed = sum(bool(curve.failure) for curve in found)
        finals = ", ".join(f"{curve.final:.3f}" for curve in sorted(found, key=lambda curve: curve.seed))
        cells.append(finals + (f" ({failed} ended badly)" if failed else ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _final(curves: list[Curve]) -> float:
    return statistics.fmean(curve.final for curve in curves)


class Study:
    """The curves of a study, in its file after each run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.curves = [Curve(**each) for each in json.loads(file.read_text())] if file.exists() else []

    def has(self, name: str, depth: int, seed: int) -> bool:
        """Return whether that run is there."""
        return f"{name}/{depth}/{seed}" in {curve.key for curve in self.curves}

    def add(self, curve: Curve) -> None:
        """Keep and print the outcome of a run."""
        self.curves.append(curve)
        self.curves.sort(key=lambda one: (one.depth, one.name, one.seed))
        self._file.write_text(json.dumps([asdict(each) for each in self.curves], indent=1) + "\n")
        print(f"{curve.key}: {curve.final:.3f} after {curve.seconds:.0f} s {curve.failure}", flush=True)


def compare_presets(study: Study, options: argparse.Namespace) -> None:
    """Train with what is not in the study yet, several at a time."""
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = [
            pool.submit(in_one_process, name, configuration({"algorithm_type": name}, options), seed)
            for seed in range(options.seeds)
            for name in options.names or sampling_presets()
            if not study.has(name, 0, seed)
        ]
        for outcome in as_completed(running):
            study.add(outcome.result())


def main() -> None:
    """Run a study and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=("presets",))
    parser.add_argument("--names", nargs="+", help="algorithms, or rules (default: all of the study)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2, help="presets: runs at a time")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: the example's)")
    parser.add_argument("--out", default="benchmarks/curves", help="folder of the curves")
    parser.add_argument("--table", action="store_true", help="only print the table of what is there")
    options = parser.parse_args()
    study = Study(Path(options.out) / f"{options.study}.json")
    if not options.table:
        compare_presets(study, options)
    print(table(study.curves))


if __name__ == "__main__":
    main()
