"""Cost of the gate of the weight sync beside the transfer: its phases, from a run of processes and a real broker.

    python benchmarks/bench_gate.py [CONFIG] [STEPS] [--engines 1 2 4 8] [--quick] [--check] [--json FILE]

*gate* is what only the protocol costs: waiting for members, pausing, resuming. *apply* is putting the new weights in
place and answering the canary, which is work on tensors. Both are medians over syncs, and stand beside the transfer of
the same syncs and beside a period of the run. ``--engines`` says how they grow with the number of engines, a run for
each number. ``--check`` exits with 1 if the gate takes 20 ms or more with the fewest engines.
"""

from __future__ import annotations

import argparse
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


async def phases_of(config: Path, steps: int, engines: int) -> tuple[dict[str, list[float]], float]:
    """Return the milliseconds of each phase, sync by sync, and those of the median period."""
    with tempfile.TemporaryDirectory(prefix="tmq-") as folder:
        settings = (
            f"buffer.total_steps={steps}",
            "explorer.eval_interval=100000",
            "trainer.save_interval=100",
            f"explorer.rollout_model.engine_num={engines}",
        )
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
    import figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    example = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"
    parser.add_argument("config", type=Path, nargs="?", default=example)
    parser.add_argument("steps", type=int, nargs="?", default=60)
    parser.add_argument("--engines", type=int, nargs="+", default=[1], help="numbers of engines")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if the gate takes {LIMIT:g} ms or more")
    parser.add_argument("--quick", action="store_true", help="few steps with one and two engines: does it run?")
    figures.add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.engines = 2 * WARM_UP, [1, 2]
    gates: dict[int, float] = {}
    ratios: dict[str, float] = {}
    for engines in options.engines:
        gates[engines], share = measure(options.config, options.steps, engines)
        ratios[f"{engines} engines: gate, of a period"] = share
    least = min(gates)
    ratios |= {f"gate with {n} engines, of {least}": gate / gates[least] for n, gate in gates.items() if n != least}
    figures.write(options, ratios)
    return int(options.check and gates[least] >= LIMIT)


def measure(config: Path, steps: int, engines: int) -> tuple[float, float]:
    """Print the phases with a number of engines; return the milliseconds of the gate, and its share of a period."""
    phases, period = asyncio.run(phases_of(config, steps, engines))
    medians = {name: statistics.median(values) for name, values in phases.items()}
    gate, transfer = sum(medians[name] for name in GATE), medians["transfer"]
    parts = ", ".join(f"{name} {medians[name]:.1f}" for name in PHASES)
    sys.stdout.write(
        f"{config.name}, {engines} engine(s), medians of {len(phases['transfer'])} syncs, ms: {parts}\n"
        f"gate {gate:.1f}, with apply {gate + medians['apply']:.1f}; "
        f"x {gate / transfer:.2f} of the transfer, x {gate / period:.3f} of a period of {period:.0f}\n"
    )
    sys.stdout.flush()
    return gate, gate / period


if __name__ == "__main__":
    sys.exit(main())
