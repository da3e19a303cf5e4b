"""The table of extended tests, ``tests/EXTENDED.md``, and which collected tests carry the marker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS / "EXTENDED.md"
MARKED = pytest.StashKey[dict[str, bool]]()
"""By the id of each collected test, whether it is marked ``extended``, before any is deselected."""
SOME = "[...]"
HEADS = ("| test |", "|---|")
TEST = re.compile(r"`(\w[\w/]*\.py::\w+)`")


@dataclass(frozen=True)
class Row:
    """A file, a test or some parameters of a test, and the tests that catch its fault earlier."""

    test: str
    reason: str

    @property
    def caught_by(self) -> list[str]:
        """The tests that the reason names."""
        return TEST.findall(self.reason)

    def covers(self, nodeid: str) -> bool:
        """Whether a collected test is one of this row."""
        test = base(nodeid)
        return self.test.removesuffix(SOME) in {test, test.partition("::")[0]}


def base(nodeid: str) -> str:
    """Return the id of a collected test as the tables have it: below ``tests``, without class and parameters."""
    path, _, name = nodeid.partition("::")
    return f"{path.removeprefix('tests/')}::{name.partition('[')[0].rpartition('::')[2]}"


def rows() -> list[Row]:
    """Read the table."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not line.startswith(HEADS):
            _, test, reason, _ = (cell.strip() for cell in line.split("|"))
            found.append(Row(test, reason))
    return found


def note(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests are marked."""
    config.stash[MARKED] = {item.nodeid: item.get_closest_marker("extended") is not None for item in items}
