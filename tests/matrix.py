"""Which suite ran on which broker, with counts and times: a table at the end of a test session, over several of them.

``TRINITY_MQ_TEST_MATRIX`` names a file that each session of one CI run adds its line to, and shows all lines of.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

FILE_VARIABLE = "TRINITY_MQ_TEST_MATRIX"


@dataclass(frozen=True)
class Cell:
    """What became of a suite's tests, and the seconds that they took, one worker's added to another's."""

    passed: int
    failed: int
    skipped: int
    seconds: float

    def __str__(self) -> str:
        counts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        told = [f"{number} {what}" for what, number in counts.items() if number or what == "passed"]
        return f"{', '.join(told)}, {self.seconds:.0f} s"


@dataclass(frozen=True)
class Column:
    """One session: the broker that it ran on, and its suites."""

    broker: str
    suites: dict[str, Cell]

    @classmethod
    def from_line(cls, line: str) -> Column:
        read = json.loads(line)
        return cls(read["broker"], {suite: Cell(**cell) for suite, cell in read["suites"].items()})

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def suite_of(nodeid: str) -> str:
    """The folder below ``tests`` that a test is in."""
    parts = Path(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else parts[0]


def table(columns: Sequence[Column]) -> list[str]:
    """The lines of a table: a row for each suite, a column for each session."""
    suites = sorted({suite for column in columns for suite in column.suites})
    rows = [["", *(column.broker for column in columns)]]
    rows += [[suite, *(str(column.suites.get(suite, "-")) for column in columns)] for suite in suites]
    widths = [max(len(cell) for cell in cells) for cells in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class Matrix:
    """The plug-in: takes note of what is reported, in the process that hears from all workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, str] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

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
        with self._file.open("a", encoding="utf-8") as file:
            file.write(Column(broker, suites).to_line() + "\n")
        return table([Column.from_line(line) for line in self._file.read_text(encoding="utf-8").splitlines()])


def asked(config: pytest.Config) -> Matrix | None:
    """The plug-in, where the environment asks for it; None in a worker, which reports to another process."""
    named = os.environ.get(FILE_VARIABLE)
    return Matrix(Path(named)) if named and not hasattr(config, "workerinput") else None
