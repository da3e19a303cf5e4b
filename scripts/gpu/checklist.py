"""Runs the steps of ``scripts/gpu/check``: each in its own process under a time limit, then a table of all figures.

This module imports neither torch nor the product, so that it survives whatever a step does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TextIO

TOTAL_SECONDS = 600
"""Maximum seconds of all steps together."""
REHEARSAL_FACTOR = 5
"""Longer time limits on a CPU, which may be shared with other work."""
TAIL_LINES = 12
"""Last lines of a failed step's log that are printed."""

Verdict = Literal["ok", "failed", "not judged"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One observed value of a step."""

    name: str
    observed: str
    expected: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Step:
    """One step."""

    name: str
    seconds: float
    """Time limit."""
    about: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step."""

    step: str
    problem: str
    """Why the step has no complete result; empty: it ran to its end."""
    seconds: float
    figures: Sequence[Figure] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        """Whether the step ran to its end and no figure failed."""
        return not self.problem and all(figure.verdict != "failed" for figure in self.figures)


STEPS = (
    Step("fork", 40, "forked agents use the device, also with flash-attn installed"),
    Step("tests", 150, "tests/gpu"),
    Step("memory", 90, "peak memory of a train step, 8192 tokens in a micro-batch"),
    Step("speed", 90, "train step of 65536 tokens, 1.5B parameters"),
    Step("ranks", 30, "FSDP2 over one rank computes what the whole model computes"),
    Step("sync", 50, "copies of the weights into host memory, NCCL broadcast"),
    Step("engine", 50, "the transformers engine, 0.5B parameters"),
    Step("loop", 50, "a small run in one process learns"),
    Step("checkpoint", 50, "copy of weights and optimizer state, 1.5B parameters"),
)
"""The steps, in order: first the faults that stop users."""


def number(value: float, unit: str = "") -> str:
    """Return a value with three significant digits and its unit.

    >>> number(23.456, "GB")
    '23.5 GB'
    """
    return f"{value:.3g} {unit}".rstrip() if abs(value) < 1000 else f"{value:.0f} {unit}".rstrip()


def within(name: str, value: float, low: float, high: float, unit: str = "", *, judged: bool = True) -> Figure:
    """Return a figure that passes from ``low`` to ``high``. Not judged: the device is not a GPU."""
    verdict: Verdict = "ok" if low <= value <= high else "failed"
    return Figure(
        name, number(value, unit), f"{number(low)} to {number(high, unit)}", verdict if judged else "not judged"
    )


def holds(name: str, observed: object, expected: object, *, judged: bool = True) -> Figure:
    """Return a figure that passes if both values are equal."""
    verdict: Verdict = "ok" if observed == expected else "failed"
    return Figure(name, str(observed), str(expected), verdict if judged else "not judged")


def run_step(step: Step, command: Sequence[str], folder: Path) -> Outcome:
    """Run the command of a step, which writes its figures as JSON lines to ``folder/<step>.jsonl``.

    The command and all processes of its session are killed at the time limit.
    """
    began = time.monotonic()
    log, figures = folder / f"{step.name}.log", folder / f"{step.name}.jsonl"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"TRINITY_MQ_FIGURES": str(figures)},
        )
        problem = ""
        try:
            code = process.wait(step.seconds)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not finished after {step.seconds:g} s"
        finally:
            _kill_session(process)
    lines = figures.read_text().splitlines() if figures.exists() else []
    read = [Figure(**json.loads(line)) for line in lines]
    if not problem and not read:
        problem = "no figures"
    return Outcome(step.name, problem, round(time.monotonic() - began, 1), read)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a step, so that no process of it holds the GPU during the next step."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures of all steps as an aligned table."""
    rows = [("step", "figure", "expected", "observed", "verdict")]
    for outcome in outcomes:
        rows += [(outcome.step, row.name, row.expected, row.observed, row.verdict) for row in outcome.figures]
        if outcome.problem:
            rows.append((outcome.step, "the step", f"ends in time ({outcome.seconds:g} s)", outcome.problem, "failed"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def run_all(
    steps: Sequence[Step], command: Sequence[str], folder: Path, to: TextIO = sys.stdout
) -> tuple[int, Sequence[Outcome]]:
    """Run the steps in order, print their figures, and write ``check.json`` to ``folder`` after each step.

    Args:
        steps: The steps.
        command: Command of a step, to which the name of the step is appended.
        folder: For logs and results.
        to: For the text.

    Returns:
        The exit code, and the outcomes.
    """
    outcomes: list[Outcome] = []
    for step in steps:
        print(f"== {step.name}: {step.about} (at most {step.seconds:g} s)", file=to, flush=True)
        outcome = run_step(step, [*command, step.name], folder)
        outcomes.append(outcome)
        print(table([outcome]), file=to)
        if not outcome.passed:
            tail = (folder / f"{step.name}.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
            print("\n".join(f"   | {line}" for line in tail), file=to, flush=True)
        results = [asdict(each) | {"passed": each.passed} for each in outcomes]
        (folder / "check.json").write_text(json.dumps(results, indent=1) + "\n")
    failed = [outcome.step for outcome in outcomes if not outcome.passed]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(
        f"\n{table(outcomes)}\n\n{len(outcomes) - len(failed)} of {len(outcomes)} steps passed in {seconds:.0f} s",
        file=to,
    )
    if failed:
        print(f"failed: {', '.join(failed)}", file=to)
    return int(bool(failed)), outcomes


def main() -> None:
    """Run the steps that are named, else all."""
    parser = argparse.ArgumentParser(prog="scripts/gpu/check", description="Checks the product on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--steps", default="", metavar="NAME,NAME", help="steps to run (default: all)")
    options = parser.parse_args()
    names = [name for name in options.steps.split(",") if name] or [step.name for step in STEPS]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"no step {', '.join(sorted(unknown))}; the steps are {', '.join(step.name for step in STEPS)}")
    command = [sys.executable, "-m", "scripts.gpu.steps", "--device", options.device]
    with tempfile.TemporaryDirectory(prefix="tmq-gpu-") as temporary:
        folder = Path(os.environ.get("OUT") or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        factor = REHEARSAL_FACTOR if options.device == "cpu" else 1
        steps = [replace(step, seconds=factor * step.seconds) for step in STEPS if step.name in names]
        code, _ = run_all(steps, command, folder)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
