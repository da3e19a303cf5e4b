"""Type hints as a package that depends on this one sees them: mypy --strict against the installed wheel."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import Clean, ran

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]

DOWNSTREAM = Path(__file__).with_name("downstream")
WANTED = re.compile(r"# E: ([\w-]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def said(clean: Clean) -> str:
    """The whole package checked at once: most of the time goes into the dependencies."""
    folder = clean.folder / "downstream"
    folder.mkdir()
    for name in ("good.py", "bad.py"):
        (folder / name).write_text((DOWNSTREAM / name).read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--strict", "--python-executable", clean.python, "--no-error-summary", "--hide-error-context"]
    # exit code 1: the errors of bad.py
    mypy = (
        f"{sys.executable} -m mypy --no-pretty --config-file= {' '.join(map(str, words))} good.py bad.py; test $? = 1"
    )
    return ran(["sh", "-c", mypy], folder, 600)


def lines(said: str, name: str) -> set[tuple[int, str]]:
    found = re.findall(rf"^{name}:(\d+): error: .*\[([\w-]+)\]$", said, re.MULTILINE)
    return {(int(number), code) for number, code in found}


def test_the_documented_interface_passes_strict(said):
    assert lines(said, "good.py") == set(), said


def test_every_wrong_use_is_an_error(said):
    text = (DOWNSTREAM / "bad.py").read_text(encoding="utf-8")
    wanted = {(number, found[1]) for number, line in enumerate(text.splitlines(), 1) if (found := WANTED.search(line))}
    assert len(wanted) > 10
    assert lines(said, "bad.py") == wanted, said


def test_no_error_is_in_the_package_itself(said):
    assert [line for line in said.splitlines() if "error:" in line and not line.startswith(("good.py", "bad.py"))] == []
