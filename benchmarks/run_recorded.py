"""Runs the benchmarks whose ratios are recorded, and fails where one has fallen by more than a fifth.

    scripts/benchmarks [NAME ...] [--quick] [--record]
    python benchmarks/run_recorded.py [NAME ...] [--quick] [--record] [--log FOLDER]

recorded.json says which benchmarks there are, with which arguments, and what is recorded; comparison.py decides. Each
benchmark runs as a process of its own; what it prints goes to ``FOLDER/NAME.log``. Before each, the
processor time that others use is measured, and before and after it a fixed loop (SHA-256 on all cores) is timed, so
that a machine on which others work is seen beside the figures.

``--quick`` asks whether they all run, in as little time as each can, and compares nothing. ``--record`` writes the
ratios that were seen into recorded.json and into the table of docs/performance.md. Exit code 1: a ratio fell, or a
benchmark failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from comparison import FILE, Benchmark, Machine, Row, compare, dump, in_document, load, state, table, with_new_values
from trinity_mq.local_broker.node import find_rabbitmq

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENT = ROOT / "docs" / "performance.md"
LIMIT, QUICK_LIMIT = 1800.0, 300.0
"""Seconds after which a benchmark is ended."""
LOOP_SECONDS = 1.0
LOOK_SECONDS = 3.0
"""Seconds for which what others use of the processor is measured, before a benchmark."""
TAIL_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """A benchmark that ran."""

    found: dict[str, float]
    """Its ratios; empty where it failed."""
    machine: Machine
    problem: str
    """Why it failed; empty where it did not."""


def processor() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def rabbitmq() -> str:
    """Return the release of the installed RabbitMQ, which the benchmarks start."""
    if script := find_rabbitmq():
        _, dash, release = script.resolve().parent.parent.name.partition("-")
        return release if dash else str(script)
    return "in a container"


def calibrate() -> float:
    """Return MB of SHA-256 a second, on all cores at once; hashlib lets others run meanwhile."""
    cores, chunk = os.cpu_count() or 1, bytes(1_000_000)

    def work(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            hashlib.sha256(chunk)
            done += 1
        return done

    with ThreadPoolExecutor(cores) as pool:
        start = time.perf_counter()
        counts = list(pool.map(work, [start + LOOP_SECONDS] * cores))
        return round(sum(counts) / (time.perf_counter() - start), 1)


def run(name: str, benchmark: Benchmark, folder: Path, *, quick: bool) -> Outcome:
    """Run a benchmark, between two looks at the machine."""
    script, *words = benchmark.command
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / script), *words, "--json", str(file), *(["--quick"] if quick else [])]
    busy, before = psutil.cpu_percent(LOOK_SECONDS), calibrate()
    problem = execute(command, log, QUICK_LIMIT if quick else LIMIT)
    machine = Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        rabbitmq=rabbitmq(),
        python=platform.python_version(),
        busy=busy,
        calibration=(before, calibrate()),
    )
    found: dict[str, float] = {}
    if not problem:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        bad = {key: value for key, value in found.items() if not (math.isfinite(value) and value > 0)}
        if bad or not found:
            problem = f"wrote {bad or 'no ratio'}, wanted ratios above 0"
    return Outcome(found, machine, f"{name} {problem} (log: {log})" if problem else "")


def execute(command: list[str], log: Path, limit: float) -> str:
    """Run a command from the checkout, with all that it starts ended when it is over; return what was wrong with it."""
    paths = [str(ROOT), str(ROOT / "agents"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"was not over after {limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # a run drains; what it started ends with it
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return f"ended with {code}:\n" + "\n".join(lines)
    return ""


def main() -> int:
    """Run them one after the other, and report; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, as with Ctrl-C
    recorded = load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(recorded)}")
    parser.add_argument("--quick", action="store_true", help="does each run? Nothing is compared")
    parser.add_argument("--record", action="store_true", help="write the ratios that were seen")
    parser.add_argument("--log", type=Path, help="folder for what the benchmarks print (default: a temporary one)")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(recorded)):
        parser.error(f"no benchmark {', '.join(unknown)} in recorded.json; there are {', '.join(recorded)}")
    if options.quick and options.record:
        parser.error("--record with --quick: a quick run measures nothing worth recording; leave one of them out")
    folder = options.log or Path(tempfile.mkdtemp(prefix="tmq-benchmarks-"))
    folder.mkdir(parents=True, exist_ok=True)
    absent = {
        ratio.needs
        for one in recorded.values()
        for ratio in one.ratios.values()
        if ratio.needs and not find_spec(ratio.needs)
    }
    rows: list[Row] = []
    machines: dict[str, Machine] = {}
    problems: list[str] = []
    for name in options.names or recorded:
        benchmark = recorded[name]
        if benchmark.needs and not (ROOT / benchmark.needs).exists():
            print(f"{name}: left out, {benchmark.needs} is not there; scripts/benchmarks {name} makes it", flush=True)
            continue
        started = time.monotonic()
        print(f"{name}: {' '.join(benchmark.command)}{' --quick' if options.quick else ''}", flush=True)
        outcome = run(name, benchmark, folder, quick=options.quick)
        print(f"{name}: {time.monotonic() - started:.0f} s; {state(outcome.machine)}", flush=True)
        if outcome.problem:
            problems.append(outcome.problem)
        elif not options.quick:
            machines[name] = outcome.machine
            rows += compare(name, benchmark, outcome.found, absent)
            if options.record:
                date = time.strftime("%Y-%m-%d", time.gmtime())
                recorded[name] = with_new_values(benchmark, outcome.found, date, outcome.machine)
    if rows:
        print(f"\n{table(rows, machines)}\n")
    if options.record:
        FILE.write_text(dump(recorded), encoding="utf-8")
        DOCUMENT.write_text(in_document(DOCUMENT.read_text(encoding="utf-8"), recorded), encoding="utf-8")
        print("written: benchmarks/recorded.json, and the table of docs/performance.md")
    problems += [row.problem() for row in rows if row.failed and (row.seen is None or not options.record)]
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"logs: {folder}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
