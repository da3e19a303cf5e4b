"""Cost of the queue: seconds a step of the whole loop (broker, processes, HTTP) against the work in one process.

    python benchmarks/loop_overhead.py [CONFIG] [STEPS]

Baseline, in the same run: one process that samples with the same generator, rewards, computes advantages, takes the
same optimizer step and copies the weights, one after the other, on one thread. A ratio below 1 means that working at
the same time gains more than the messages cost.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from one_process import OneProcess
from trinity_mq.config import Config, load_config
from trinity_mq.testing.runs import LocalRun

WARM_UP = 5


async def one_process(config: Config, folder: Path, steps: int) -> list[float]:
    """Return the seconds of each step of the baseline."""
    loop = OneProcess(config, folder, steps)
    await loop.open()
    seconds = []
    for step in range(1, steps + 1):
        started = time.perf_counter()
        await loop.step(step)
        seconds.append(time.perf_counter() - started)
    await loop.close()
    return seconds


async def whole_loop(path: Path, folder: Path, steps: int) -> list[float]:
    """Return the seconds between train steps of ``trinity-mq run``."""
    overrides = (f"buffer.total_steps={steps}", "explorer.eval_interval=100000", "explorer.eval_on_startup=false")
    async with LocalRun(path, folder / "run", overrides) as run:
        code, output = await run.ended(600.0)
    if code != 0:
        raise SystemExit(output)
    times = [line["time"] for line in run.metrics() if "trainer/step" in line]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    """Measure both and print the ratio."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "examples" / "arithmetic.yaml")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(path, [f"run_dir={folder}/baseline"])
        loop = statistics.median(asyncio.run(whole_loop(path, Path(folder), steps))[WARM_UP:])
        baseline = statistics.median(asyncio.run(one_process(config, Path(folder), steps))[WARM_UP:])
    size = config.buffer.batch_size * config.algorithm.repeat_times
    print(f"{path.name}, {size} experiences a step, medians of {steps} steps")
    print(f"one process, one thread : {baseline * 1e3:7.1f} ms a step")
    print(f"trinity-mq run          : {loop * 1e3:7.1f} ms a step")
    print(f"ratio                   : {loop / baseline:7.2f}")


if __name__ == "__main__":
    main()
