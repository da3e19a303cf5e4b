"""The benchmark of observability: its reading of a run's metrics, and a quick run."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_observability import tokens_a_second

ROOT = Path(__file__).parents[3]


def test_tokens_of_the_steps_after_the_first_ones_count():
    lines = [{"trainer/step": n, "time": 10.0 + 2 * n, "data/trained_tokens": 100.0 * n} for n in (1, 2, 3, 4, 5, 6)]
    lines.append({"time": 90.0, "time/sync": 1.0})
    assert tokens_a_second(lines) == pytest.approx((300 + 400 + 500 + 600) / 8)


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_quick_run():
    script = str(ROOT / "benchmarks" / "bench_observability.py")
    done = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "on/off: " in done.stdout
