"""Plays seeded fault schedules: ``python -m trinity_agents.simulation --seeds 0:1000``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trinity_agents.simulation.explore import ScheduleOutcome, explore_in_processes, minimize_faults, play_schedule
from trinity_agents.simulation.schedule import draw


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the seeds of the command line. Return 0, 1 if an invariant is violated, or 2 for unknown fault numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m trinity_agents.simulation",
        description="Play whole runs under faults drawn from seeds, in virtual time, and check what must hold.",
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--seed", type=int, help="play one seed, and show its schedule and its last events")
    chosen.add_argument("--seeds", type=_range, metavar="FIRST:END", help="play the seeds from FIRST to END - 1")
    parser.add_argument(
        "--faults", type=_fault_numbers, help="with --seed: only these of its faults, such as 0,3, or none"
    )
    parser.add_argument("--sessions", action="store_true", help="runs in mode serve, with gateways and their users")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for fewer faults that fail as well")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--table", type=Path, help="write the states reached into this file, as Markdown")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _play_one(options)
    if options.faults is not None:
        parser.error("--faults needs --seed: each seed draws its own faults")
    return _play_many(options)


def _play_one(options: argparse.Namespace) -> int:
    schedule = draw(options.seed, sessions=options.sessions)
    try:
        outcome = play_schedule(schedule if options.faults is None else schedule.only(options.faults))
    except ValueError as error:
        _print(f"{error}; see them with --seed {options.seed} alone")
        return 2
    if outcome.violations and not options.no_shrink:
        outcome = minimize_faults(outcome)
    _print(outcome.report())
    return int(bool(outcome.violations))


def _play_many(options: argparse.Namespace) -> int:
    began = time.monotonic()

    def done(count: int, failed: list[ScheduleOutcome]) -> None:
        for failure in failed:
            _print((failure if options.no_shrink else minimize_faults(failure)).report())
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{count} of {len(options.seeds)} seeds")
            sys.stderr.flush()

    coverage, failed = explore_in_processes(options.seeds, options.workers, done, sessions=options.sessions)
    table = coverage.table()
    if options.table is not None:
        options.table.write_text(table + "\n", encoding="utf-8")
    seconds = time.monotonic() - began
    _print(
        f"{table}\n\n{len(options.seeds)} seeds in {seconds:.0f} s, {1000 * seconds / len(options.seeds):.0f} ms each"
    )
    _print(f"failed: {', '.join(str(failure.schedule.seed) for failure in failed) if failed else 'none'}")
    return int(bool(failed))


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds; write a range such as 0:1000")
    return range(int(first), int(end))


def _fault_numbers(text: str) -> list[int]:
    if text == "none":
        return []
    if not all(index.isdecimal() for index in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are not places of faults; write places such as 0,3, or none")
    return [int(index) for index in text.split(",")]


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    raise SystemExit(main())
