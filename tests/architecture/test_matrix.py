"""The table of suites and brokers that CI ends with, from sessions of pytest that are really run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.matrix import FILE_VARIABLE, Cell, Column, to_line

ROOT = Path(__file__).parents[2]
EARLIER = Column("RabbitMQ 4.0.5", {"broker": Cell(5, 0, 1, 61.2)}, 31.0)
CODE = """
import pytest

@pytest.fixture
def fails_later():
    yield
    raise AssertionError("when all is over")

def test_it(): pass
def test_in_teardown(fails_later): pass
def test_twice(fails_later): raise AssertionError("and again in teardown")
@pytest.mark.skip
def test_not_at_all(): pass
"""


def test_the_table_counts_each_test_once_and_tells_of_earlier_sessions(tmp_path: Path) -> None:
    (tmp_path / "tests" / "e2e").mkdir(parents=True)
    (tmp_path / "tests" / "e2e" / "test_some.py").write_text(CODE)
    file = tmp_path / "matrix"
    file.write_text(to_line(EARLIER) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.broker_fixtures", "-n", "1", "tests"],
        cwd=tmp_path,
        env={**os.environ, FILE_VARIABLE: str(file), "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    at = next(number for number, line in enumerate(said) if "RabbitMQ not asked for" in line)
    heads, broker, e2e = (" ".join(line.split()) for line in said[at : at + 3])
    assert re.fullmatch(r"start to end +0\.5 min +\d+\.\d min", said[at + 3])
    assert heads == "RabbitMQ 4.0.5 RabbitMQ not asked for"
    assert broker == "broker 5 passed, 1 skipped, 1.0 min -"
    assert re.fullmatch(r"e2e - 1 passed, 2 failed, 1 skipped, \d+\.\d min", e2e)
    assert re.fullmatch(r"1 failed, 2 passed, 1 skipped, 2 errors in [\d.]+s", said[-1]), "pytest's own line comes last"


def test_parts_that_are_no_sessions_are_added_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "matrix"
    file.write_text(to_line(EARLIER) + "\n")
    command = [sys.executable, "-m", "tests.matrix", str(file)]
    subprocess.run([*command, "fresh machine", "FAILED", "420"], cwd=ROOT, check=True)
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == [
        "              RabbitMQ 4.0.5",
        "broker        5 passed, 1 skipped, 1.0 min",
        "start to end  0.5 min",
        "fresh machine  FAILED  7.0 min",
    ]
