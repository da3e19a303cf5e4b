"""Learning curves of algorithms through whole runs: a real RabbitMQ, engine, runners, operator and trainer.

    python benchmarks/learning_curves.py presets [--names grpo ipo ...] [--seeds 3] [--steps 300] [--out FOLDER]
    python benchmarks/learning_curves.py staleness [--names ...] [--depths 0 8 16] [--lr 3e-3] ...

``presets`` runs examples/arithmetic.yaml with each algorithm that samples answers, its own pieces unchanged.
``staleness`` runs it with the explorer ahead of the trainer by so many batches (``sync_style: fully_async``; depth 0
is on-policy): ``none`` ignores that old weights sampled the data, the other rules are presets. Each run is a process
group of its own in a folder of its own, one after the other, on one broker; about 80 seconds for 300 steps on 2 cores.

Curves (held-out accuracy by step), the measured staleness, seconds and, where a run ended badly, its exit code go to
``<study>.json`` in the folder, which is read again: a study that was stopped goes on. At the end one table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trinity_mq.bus.addresses import URL_VARIABLE
from trinity_mq.config import AlgorithmConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.local_broker.node import PrivateNode

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
METRIC = "eval/ops3_held_out/accuracy/mean@1"
UNCORRECTED = "none"
RULES: dict[str, dict[str, Any]] = {
    UNCORRECTED: {"algorithm_type": "grpo", "ratio": {"kind": "self"}},
    "grpo": {"algorithm_type": "grpo"},
    "ipo": {"algorithm_type": "ipo"},
    "decoupled": {"algorithm_type": "decoupled"},
    "m2po": {"algorithm_type": "m2po"},
    "cispo": {"algorithm_type": "cispo"},
}
"""What is compared on old data, and the settings of each."""
LIMIT = 900.0
"""Seconds after which a run is ended and counts as failed."""


@dataclass
class Curve:
    """One run."""

    name: str
    seed: int
    depth: int
    exit_code: int
    seconds: float
    accuracy: dict[str, float] = field(default_factory=dict)
    """By step."""
    staleness: float | None = None
    """Mean over the steps, in train steps."""

    @property
    def key(self) -> str:
        return f"{self.name}/{self.depth}/{self.seed}"

    @property
    def final(self) -> float:
        return self.accuracy[max(self.accuracy, key=int)] if self.accuracy else 0.0

    @property
    def area(self) -> float:
        """Mean accuracy over the evaluations after the first."""
        later = [value for step, value in self.accuracy.items() if int(step)]
        return statistics.fmean(later) if later else 0.0


def sampling_presets() -> list[str]:
    """Return the presets that need nothing but sampled answers and their rewards."""
    found = []
    for name in PRESETS:
        config = AlgorithmConfig.model_validate({"algorithm_type": name})
        if config.weights.rl == 1 and config.ce_schedule is None and config.estimator.needs_reward:
            found.append(name)
    return found


def configuration(algorithm: Mapping[str, Any], depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the example with another algorithm, and the explorer ``depth`` batches ahead."""
    data: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    plain = data["algorithm"]
    optimizer = plain["optimizer"] | ({"lr": options.lr} if options.lr else {})
    kept = {name: plain[name] for name in ("repeat_times", "entropy_coef", "entropy_decay")}
    data["algorithm"] = kept | {"optimizer": optimizer} | dict(algorithm)
    data["buffer"]["total_steps"] = options.steps
    data["explorer"]["eval_interval"] = max(1, options.steps // 6)
    if depth:
        data["synchronizer"] = {"sync_style": "fully_async", "sync_interval": 1, "pipeline_depth": depth}
        data["explorer"]["max_open_batches"] = depth + 2
    elif options.study == "staleness":
        data["synchronizer"] = {"sync_interval": 1, "sync_offset": 0}
    return data


def run(name: str, data: dict[str, Any], seed: int, depth: int, folder: Path) -> Curve:
    """Run a configuration to its end and return its curve."""
    where = folder / f"{name}-{depth}-{seed}"
    config = folder / f"{name}-{depth}-{seed}.yaml"
    data |= {"name": f"curve-{name.replace('_', '-')}-{depth}-{seed}", "seed": seed, "run_dir": str(where)}
    config.write_text(yaml.safe_dump(data), encoding="utf-8")
    began = time.monotonic()
    command = [sys.executable, "-m", "trinity_mq.cli.main", "run", str(config)]
    with (folder / f"{name}-{depth}-{seed}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    rows = list(metrics(where / "metrics.jsonl"))
    ages = [row["sample/staleness/mean"] for row in rows if "sample/staleness/mean" in row]
    return Curve(
        name,
        seed,
        depth,
        code,
        time.monotonic() - began,
        {str(row["step"]): row[METRIC] for row in rows if METRIC in row},
        statistics.fmean(ages) if ages else None,
    )


def metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; none if there is no file."""
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def table(curves: list[Curve]) -> str:
    """Return a Markdown table: a row for each algorithm and depth, over its seeds."""
    rows = [
        "| algorithm | depth | staleness | final, mean | worst seed | mean over the run | seeds |",
        "|---|" * 1 + "---|" * 6,
    ]
    grouped: dict[tuple[int, str], list[Curve]] = {}
    for curve in curves:
        grouped.setdefault((curve.depth, curve.name), []).append(curve)
    for (depth, name), found in sorted(grouped.items(), key=lambda item: (item[0][0], -_mean(item[1]))):
        finals = [curve.final for curve in found]
        ages = [curve.staleness for curve in found if curve.staleness is not None]
        failed = sum(curve.exit_code != 0 for curve in found)
        rows.append(
            f"| `{name}` | {depth} | {statistics.fmean(ages) if ages else 0:.1f} | {statistics.fmean(finals):.3f} "
            f"| {min(finals):.3f} | {statistics.fmean(curve.area for curve in found):.3f} "
            f"| {', '.join(f'{final:.3f}' for final in finals)}{f' ({failed} ended badly)' if failed else ''} |"
        )
    return "\n".join(rows)


def _mean(curves: list[Curve]) -> float:
    return statistics.fmean(curve.final for curve in curves)


async def study(options: argparse.Namespace) -> list[Curve]:
    """Run what is not in the file yet; write the file after each run."""
    file = Path(options.out) / f"{options.study}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    curves = [Curve(**each) for each in json.loads(file.read_text())] if file.exists() else []
    done = {curve.key for curve in curves}
    names = options.names or (list(RULES) if options.study == "staleness" else sampling_presets())
    depths = options.depths if options.study == "staleness" else [0]
    with tempfile.TemporaryDirectory(prefix="tmq-curves-") as temporary:
        node = PrivateNode(Path(temporary) / "broker")
        await node.start()
        os.environ[URL_VARIABLE] = node.url
        try:
            for depth in depths:
                for seed in range(options.seeds):
                    for name in names:
                        if f"{name}/{depth}/{seed}" in done:
                            continue
                        algorithm = RULES[name] if options.study == "staleness" else {"algorithm_type": name}
                        data = configuration(algorithm, depth, options)
                        curve = await asyncio.to_thread(run, name, data, seed, depth, Path(temporary))
                        curves.append(curve)
                        file.write_text(json.dumps([asdict(each) for each in curves], indent=1) + "\n")
                        print(
                            f"{curve.key}: final {curve.final:.3f}, {curve.seconds:.0f} s, exit {curve.exit_code}",
                            flush=True,
                        )
        finally:
            await node.stop()
    return curves


def main() -> None:
    """Run a study and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=("presets", "staleness"))
    parser.add_argument("--names", nargs="+", help="algorithms, or rules (default: all of the study)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 8, 16], help="staleness: batches ahead")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: the example's)")
    parser.add_argument("--out", default="benchmarks/curves", help="folder of the curves")
    options = parser.parse_args()
    print(table(asyncio.run(study(options))))


if __name__ == "__main__":
    main()
