"""What the gate of the weight sync costs beside the transfer: its phases, from a run of processes and a real broker.

    python benchmarks/bench_gate.py [CONFIG] [STEPS] [--check]

*gate* is what only the protocol costs: waiting for members, pausing, resuming. *apply* is putting the new weights in
place and answering the canary, which is work on tensors. Both are medians over syncs, and stand beside the transfer of
the same syncs and beside a period of the run. ``--check`` exits with 1 if the gate takes 20 ms or more.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from trinity_mq.sync.gate.records import PHASES
from trinity_mq.testing.runs import LocalRun

LIMIT = 20.0
WARM_UP = 5
GATE = ("wait", "pause", "resume")


async def phases_of(config: Path, steps: int) -> tuple[dict[str, list[float]], float]:
    """Return the milliseconds of each phase, sync by sync, and those of the median period."""
    with tempfile.TemporaryDirectory(prefix="tmq-") as folder:
        settings = (f"buffer.total_steps={steps}", "explorer.eval_interval=100000", "trainer.save_interval=100")
        async with LocalRun(config, Path(folder) / "run", settings) as run:
            code, output = await run.ended(1200.0)
        if code != 0:
            raise SystemExit(f"the run ended with {code}:\n{output}")
        found: dict[str, list[float]] = {}
        for name in PHASES:
            by_step = dict(run.values(f"sync/{name}_ms"))  # said again with each step: the last word counts
            found[name] = [value for step, value in sorted(by_step.items()) if step > WARM_UP]
        ends = [line["time"] for line in run.metrics() if "trainer/step" in line and line["step"] >= WARM_UP]
    return found, 1000 * statistics.median(after - before for before, after in itertools.pairwise(ends))


def main() -> int:
    """Run and print."""
    words = [word for word in sys.argv[1:] if word != "--check"]
    config = Path(words[0]) if words else Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
    steps = int(words[1]) if len(words) > 1 else 60
    phases, period = asyncio.run(phases_of(config, steps))
    medians = {name: statistics.median(values) for name, values in phases.items()}
    gate, transfer = sum(medians[name] for name in GATE), medians["transfer"]
    parts = ", ".join(f"{name} {medians[name]:.1f}" for name in PHASES)
    sys.stdout.write(
        f"{config.name}, medians of {len(phases['transfer'])} syncs, ms: {parts}\n"
        f"gate {gate:.1f}, with apply {gate + medians['apply']:.1f}; "
        f"x {gate / transfer:.2f} of the transfer, x {gate / period:.3f} of a period of {period:.0f}\n"
    )
    return int("--check" in sys.argv and gate >= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
