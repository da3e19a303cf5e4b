"""The previous release reads every message that this one writes, and this one what the previous one writes.

The bodies that it wrote are kept: ``tests/golden/test_released.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.releases import GOLDENS, ROOT, write_bodies
from tests.golden.forms import GOLDEN
from tests.golden.test_control import contains
from tests.upgrade.conftest import Built

pytestmark = [pytest.mark.extended, pytest.mark.any_broker, pytest.mark.timeout(300)]


def read(python: Path, bodies: Path, out: Path) -> dict[str, Any]:
    """Return what the release of ``python`` finds in bodies."""
    script = str(ROOT / "tests" / "golden" / "released.py")
    subprocess.run([str(python), script, "read", str(bodies), str(out)], check=True, cwd=out.parent, env={})
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
    beat = found["control/beat.v1.release"]
    assert "uptime" in written["control/beat.v1.release"]["holds"]
    assert "uptime" not in beat, "the previous release was not the one that read"


def test_the_kept_bodies_are_those_that_it_writes(previous: Built, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    write_bodies(previous.python, previous.source / "schemas" / "golden", again)
    assert again.read_bytes() == (ROOT / GOLDENS / previous.version / "bodies.json").read_bytes()
