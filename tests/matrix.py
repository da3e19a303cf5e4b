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
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

FILE_VARIABLE = "TRINITY_MQ_TEST_MATRIX"
WALL = "start to end"


@dataclass(frozen=True)
class Cell:
    """Counts of a suite's tests, and the seconds that they took, summed over the workers."""

    passed: int
    failed: int
    skipped: int
    seconds: float

    def __str__(self) -> str:
        counts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        told = [f"{number} {what}" for what, number in counts.items() if number or what == "passed"]
        return f"{', '.join(told)}, {minutes(self.seconds)}"


@dataclass(frozen=True)
class Column:
    """One pytest session: the broker that it ran on, its suites, and its seconds from start to end."""

    broker: str
    suites: dict[str, Cell]
    seconds: float


@dataclass(frozen=True)
class Part:
    """A part of the run that is no pytest session of this environment, such as the lint or a fresh machine."""

    part: str
    result: str
    seconds: float


def to_line(entry: Column | Part) -> str:
    """Return a line of the file."""
    return json.dumps(asdict(entry))


def from_line(line: str) -> Column | Part:
    """Read a line of the file."""
    read = json.loads(line)
    if "part" in read:
        return Part(**read)
    return Column(read["broker"], {name: Cell(**cell) for name, cell in read["suites"].items()}, read["seconds"])


def minutes(seconds: float) -> str:
    """Return seconds as minutes with one decimal."""
    return f"{seconds / 60:.1f} min"


def suite_of(nodeid: str) -> str:
    """The folder below ``tests`` that a test is in."""
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else parts[0]


def table(entries: Iterable[Column | Part]) -> list[str]:
    """Return the lines of a table: a row for each suite, a column for each session; below it a row for each part."""
    known = list(entries)
    columns = [entry for entry in known if isinstance(entry, Column)]
    parts = [entry for entry in known if isinstance(entry, Part)]
    lines: list[str] = []
    if columns:
        suites = sorted({suite for column in columns for suite in column.suites})
        rows = [["", *(column.broker for column in columns)]]
        rows += [[suite, *(str(column.suites.get(suite, "-")) for column in columns)] for suite in suites]
        lines += aligned([*rows, [WALL, *(minutes(column.seconds) for column in columns)]])
    return lines + aligned([[part.part, part.result, minutes(part.seconds)] for part in parts])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, every column as wide as its widest cell."""
    widths = [max(len(cell) for cell in cells) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def read_table(file: Path) -> list[str]:
    """Return the table of all that a file holds."""
    return table(from_line(line) for line in file.read_text(encoding="utf-8").splitlines())


def append(file: Path, entry: Column | Part) -> None:
    """Add a line to a file."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(to_line(entry) + "\n")


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
            suite: Cell(*(counts[suite, outcome] for outcome in ("passed", "failed", "skipped")), seconds)
            for suite, seconds in self._seconds.items()
        }
        append(self._file, Column(broker, suites, time.monotonic() - self._began))
        return read_table(self._file)


def asked(config: pytest.Config) -> Matrix | None:
    """The plug-in, where the environment asks for it; None in a worker, which reports to another process."""
    named = os.environ.get(FILE_VARIABLE)
    return Matrix(Path(named)) if named and not hasattr(config, "workerinput") else None


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    if words:
        name, result, seconds = words
        append(Path(path), Part(name, result, float(seconds)))
    else:
        print("\n".join(read_table(Path(path))))  # noqa: T201
