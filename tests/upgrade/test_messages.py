"""The previous release reads every message and file that this one writes, and this one what the previous one writes.

The bodies that it wrote are kept: ``tests/golden/test_released.py``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.releases import ROOT
from tests.golden import released_state
from tests.golden.forms import GOLDEN
from tests.golden.test_control import contains
from tests.upgrade.conftest import Built

pytestmark = [pytest.mark.extended, pytest.mark.any_broker, pytest.mark.timeout(300)]


def read(python: Path, bodies: Path, out: Path) -> dict[str, Any]:
    """Return what the release of ``python`` finds in bodies."""
    script = str(ROOT / "tests" / "golden" / "released.py")
    subprocess.run([str(python), "-I", script, "read", str(bodies), str(out)], check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_it_reads_all_that_this_one_writes(previous: Built, tmp_path: Path) -> None:
    """It ignores fields that it does not know, and finds the others as they were written."""
    ours = tmp_path / "ours.json"
    script = str(ROOT / "tests" / "golden" / "released.py")
    subprocess.run([sys.executable, script, "write", str(GOLDEN), str(ours)], check=True)
    written = json.loads(ours.read_text(encoding="utf-8"))
    found = read(previous.python, ours, tmp_path / "found.json")
    assert found.keys() == written.keys()
    wrong = {name: holds for name, holds in found.items() if not contains(written[name]["holds"], holds)}
    assert wrong == {}
    call = "control/session_call.v1.full"
    assert "tied" in written[call]["holds"]  # a field that the previous release lacks
    assert "tied" not in found[call], "the previous release was not the one that read"


def found_in(python: Path, run: Path, out: Path) -> Any:
    """Return what a release finds in a run's folder; it saves the explorer's state."""
    script = str(ROOT / "tests" / "golden" / "released_state.py")
    subprocess.run([str(python), "-I", script, "read", str(run), str(out)], check=True)
    return json.loads(out.read_text(encoding="utf-8"))


async def test_it_goes_on_from_files_of_this_one(previous: Built, tmp_path: Path) -> None:
    """The way back, as long as no format has risen."""
    await released_state.write(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    ours = json.loads(json.dumps(await released_state.read(tmp_path / "copy")))
    theirs = found_in(previous.python, tmp_path / "run", tmp_path / "found.json")
    assert contains(ours, theirs)
    again = json.loads(json.dumps(await released_state.read(tmp_path / "run")))
    assert again == {**ours, "submissions": again["submissions"]}
