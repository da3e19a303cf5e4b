"""The rules for Prometheus hold what they promise, by its own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there: Debian's package prometheus")
@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_each_alert_is_raised_by_what_it_is_for(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=GRAFANA, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
