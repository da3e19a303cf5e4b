"""Table of test suites by broker, with counts and minutes, over the pytest sessions and other parts of one test run.

``TRINITY_MQ_TEST_MATRIX`` names a file. Each session appends its line to it and prints the table of all lines;
``python -m tests.matrix FILE`` prints that table, ``python -m tests.matrix FILE PART RESULT SECONDS`` appends a part
that is no pytest session, such as the lint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

FILE_VARIABLE = "TRINITY_MQ_TEST_MATRIX"
OUTCOMES = ("passed", "failed", "skipped")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def suite_of(nodeid: str) -> str:
    """The folder below ``tests`` that a test is in."""
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else parts[0]


def told(suite: dict[str, Any] | None) -> str:
    """Return the counts of a suite's tests, and the minutes that they took, summed over the workers."""
    if suite is None:
        return "-"
    counts = [f"{suite[name]} {name}" for name in OUTCOMES if suite[name] or name == "passed"]
    return ", ".join([*counts, minutes(suite["seconds"])])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, every column as wide as its widest cell."""
    widths = [max(len(cell) for cell in cells) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def read_table(file: Path) -> list[str]:
    """Return the lines of a table: a row for each suite, a column for each session; below it a row for each part."""
    entries = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sessions = [entry for entry in entries if "suites" in entry]
    lines: list[str] = []
    if sessions:
        suites = sorted({suite for session in sessions for suite in session["suites"]})
        rows = [["", *(session["broker"] for session in sessions)]]
        rows += [[suite, *(told(session["suites"].get(suite)) for session in sessions)] for suite in suites]
        lines += aligned([*rows, ["start to end", *(minutes(session["seconds"]) for session in sessions)]])
    parts = [[entry["part"], entry["result"], minutes(entry["seconds"])] for entry in entries if "part" in entry]
    return lines + aligned(parts)


def append(file: Path, entry: dict[str, Any]) -> None:
    """Add a line to a file."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(entry) + "\n")


class Matrix:
    """pytest plug-in: counts what is reported, in the process that hears from all workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, str] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._began = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[suite_of(report.nodeid)] += report.duration
        if report.failed:
            self._outcomes[report.nodeid] = "failed"  # in whichever phase
        elif report.skipped or report.when == "call":
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def finish(self, versions: Iterable[str]) -> list[str]:
        """Add this session's column to the file; return the table of all."""
        broker = f"RabbitMQ {' and '.join(sorted(set(versions))) or 'not asked for'}"
        counts = Counter((suite_of(nodeid), outcome) for nodeid, outcome in self._outcomes.items())
        suites = {
            suite: {"seconds": seconds, **{outcome: counts[suite, outcome] for outcome in OUTCOMES}}
            for suite, seconds in self._seconds.items()
        }
        append(self._file, {"broker": broker, "suites": suites, "seconds": time.monotonic() - self._began})
        return read_table(self._file)


def asked(config: pytest.Config) -> Matrix | None:
    """The plug-in, where the environment asks for it; None in a worker, which reports to another process."""
    named = os.environ.get(FILE_VARIABLE)
    return Matrix(Path(named)) if named and not hasattr(config, "workerinput") else None


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    if words:
        append(Path(path), {"part": words[0], "result": words[1], "seconds": float(words[2])})
    else:
        print("\n".join(read_table(Path(path))))  # noqa: T201
