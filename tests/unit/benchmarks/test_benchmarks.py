"""Each benchmark whose ratios are recorded still runs and writes ratios."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import comparison

ROOT = Path(__file__).parents[3]


@pytest.mark.extended
@pytest.mark.timeout(330)
@pytest.mark.parametrize("name", sorted(comparison.load()))
def test_quick_run(name, tmp_path):
    script = str(ROOT / "benchmarks" / "run_recorded.py")
    done = subprocess.run(
        [sys.executable, script, name, "--quick", "--log", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=320,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if f"{name}: left out" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert (tmp_path / f"{name}.json").exists()
