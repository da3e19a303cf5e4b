"""scripts/gpu/check: its limits and its table on scripted steps, and a rehearsal of all steps on a CPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.gpu import checklist, steps
from scripts.gpu.checklist import TOTAL_SECONDS, Figure, Step, holds, run_all, table, within
from tests.processes import gone

ROOT = Path(__file__).parents[3]
SCRIPTED = """
import json, os, subprocess, sys, time
name = sys.argv[1]
def add(**figure):
    with open(os.environ["TRINITY_MQ_FIGURES"], "a") as file:
        file.write(json.dumps(figure) + "\\n")
if name != "silent":
    add(name="value", observed="3", expected="2 to 4", verdict="failed" if name == "wrong" else "ok")
if name == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    add(name="child", observed=str(child.pid), expected="any", verdict="not judged")
    time.sleep(600)
if name == "crashes":
    sys.exit("CUDA error: out of memory")
"""


def test_each_step_has_its_limit_and_a_failed_one_stops_nothing(tmp_path: Path) -> None:
    names = ("good", "hangs", "crashes", "wrong", "silent", "last")
    scripted = [Step(name, 5.0 if name == "hangs" else 60.0, f"step {name}") for name in names]
    text = io.StringIO()
    began = time.monotonic()
    code, outcomes = run_all(scripted, [sys.executable, "-c", SCRIPTED], tmp_path, text)
    assert time.monotonic() - began < 45
    assert code == 1
    assert [(outcome.step, outcome.passed, outcome.problem) for outcome in outcomes] == [
        ("good", True, ""),
        ("hangs", False, "not finished after 5 s"),
        ("crashes", False, "exit code 1"),
        ("wrong", False, ""),
        ("silent", False, "no figures"),
        ("last", True, ""),
    ]
    child = int(outcomes[1].figures[1].observed)
    assert gone(child), "a process of a step that is over holds no GPU"
    printed = text.getvalue()
    assert "2 of 6 steps passed" in printed
    assert "failed: hangs, crashes, wrong, silent" in printed
    assert "| CUDA error: out of memory" in printed
    written = json.loads((tmp_path / "check.json").read_text())
    assert [row["passed"] for row in written] == [outcome.passed for outcome in outcomes]
    assert written[0]["figures"] == [{"name": "value", "observed": "3", "expected": "2 to 4", "verdict": "ok"}]
    assert run_all([scripted[0], scripted[-1]], [sys.executable, "-c", SCRIPTED], tmp_path / "..", text)[0] == 0


def test_all_steps_together_take_ten_minutes_at_most() -> None:
    assert sum(step.seconds for step in checklist.STEPS) <= TOTAL_SECONDS
    assert [step.name for step in checklist.STEPS] == [name for name in steps.STEPS if name != "child"]


def test_a_figure_shows_what_was_expected() -> None:
    figures = [
        within("peak", 23.456, 20, 26.5, "GB"),
        within("peak", 27, 20, 26.5, "GB"),
        within("rate", 12, 15e3, 60e3, judged=False),
        holds("exit code", 0, 0),
        holds("exit code", -9, 0),
    ]
    assert [(figure.observed, figure.expected, figure.verdict) for figure in figures] == [
        ("23.5 GB", "20 to 26.5 GB", "ok"),
        ("27 GB", "20 to 26.5 GB", "failed"),
        ("12", "15000 to 60000", "not judged"),
        ("0", "0", "ok"),
        ("-9", "0", "failed"),
    ]
    lines = table([checklist.Outcome("a step", "", 1.0, [Figure("x", "1", "1", "ok"), *figures])]).splitlines()
    assert len({line.index("  ") for line in lines[1:]}) == 1
    assert lines[1].split() == ["a", "step", "x", "1", "1", "ok"]


def test_a_wrong_name_of_a_step_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/gpu/check", "--steps", "forks"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no step forks; the steps are fork, tests, memory" in done.stderr


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_rehearsal(tmp_path: Path) -> None:
    """Every step runs on a CPU; figures of a GPU are not judged."""
    done = subprocess.run(
        [ROOT / "scripts/gpu/check", "--device", "cpu"],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    written = json.loads((tmp_path / "check.json").read_text())
    assert [row["step"] for row in written] == [step.name for step in checklist.STEPS]
    judged = {row["step"] for row in written for figure in row["figures"] if figure["verdict"] == "ok"}
    assert judged == {"fork", "memory", "ranks", "loop", "checkpoint"}
    children = [child.as_dict(["cmdline"]) for child in psutil.Process().children(recursive=True)]  # None for a zombie
    assert not [child for child in children if "scripts.gpu" in str(child["cmdline"])]
