"""Recorded ratios: what counts as a fall, what file and page say, and the command with benchmarks of our own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import comparison
from benchmarks.comparison import Benchmark, Machine, Ratio, compare, in_document, with_new_values

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "performance.md"
MACHINE = Machine(processor="p", cores=2, rabbitmq="4.0.5", python="3.11.7", busy=1.5, calibration=(100.0, 101.0))


def benchmark(**ratios: Ratio) -> Benchmark:
    return Benchmark(command=["bench.py"], ratios=ratios)


@pytest.mark.extended
@pytest.mark.timeout(330)
@pytest.mark.parametrize("name", sorted(comparison.load()))
def test_quick_run(name, tmp_path):
    """Each benchmark whose ratios are recorded still runs and writes ratios."""
    words = (str(ROOT / "benchmarks" / "run_recorded.py"), name, "--quick", "--log", str(tmp_path))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=320, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if f"{name}: left out" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert (tmp_path / f"{name}.json").exists()


@pytest.mark.parametrize(
    ("better", "recorded", "seen", "verdict"),
    [
        ("more", 10.0, 8.01, "held"),
        ("more", 10.0, 7.99, "FELL"),
        ("less", 1.0, 1.24, "held"),
        ("less", 1.0, 1.26, "FELL"),
    ],
)
def test_a_fall_by_a_fifth_is_the_bound(better, recorded, seen, verdict):
    (row,) = compare("b", benchmark(r=Ratio(better=better, value=recorded)), {"r": seen})
    assert (row.verdict, row.failed) == (verdict, verdict == "FELL")


def test_a_ratio_that_is_gone_fails_unless_what_it_needs_is_not_installed():
    one = benchmark(r=Ratio(value=2.0, needs="trl"), s=Ratio(value=3.0))
    rows = compare("b", one, {}, absent={"trl"})
    assert [row.verdict for row in rows] == ["left out", "MISSING"]
    assert rows[1].problem() == "b, s: in recorded.json, but the benchmark wrote no such ratio"
    assert [row.verdict for row in compare("b", one, {})] == ["MISSING", "MISSING"]
    (row,) = compare("b", benchmark(r=Ratio()), {"r": 0.001})
    assert (row.verdict, row.failed) == ("not recorded", False)


def test_recording_keeps_what_was_left_out_and_a_noisy_machine_is_seen():
    old = benchmark(r=Ratio(value=2.0, needs="trl"), s=Ratio(better="less", value=3.0))
    new = with_new_values(old, {"s": 2.5, "unknown": 1.0}, "2026-11-26", MACHINE)
    assert new.ratios == {"r": Ratio(value=2.0, needs="trl"), "s": Ratio(better="less", value=2.5)}
    assert (new.date, new.machine) == ("2026-11-26", MACHINE)
    for change, said in (
        ({}, ""),
        ({"calibration": (100.0, 80.0)}, "a fixed loop made 100 MB/s before, 80 after"),
        ({"busy": 21.0}, "others used 21 % of the processor before it"),
        ({"busy": None, "calibration": None}, ""),
    ):
        machine = MACHINE.model_copy(update=change)
        assert machine.noise() == said
        assert ("NOISY" in comparison.state(machine)) == bool(said)


def test_the_file_is_as_it_is_written_and_the_table_of_the_page_is_its(tmp_path):
    recorded = comparison.load()
    assert comparison.FILE.read_text(encoding="utf-8") == comparison.dump(recorded)
    for name, one in recorded.items():
        assert (ROOT / "benchmarks" / one.command[0]).is_file(), name
        values = [ratio.value for ratio in one.ratios.values() if ratio.value is not None]
        assert bool(values) == bool(one.date and one.machine), f"{name}: values have a date and a machine"
    text = DOCUMENT.read_text(encoding="utf-8")
    said = "recorded.json and docs/performance.md differ: python benchmarks/run_recorded.py --record writes both"
    assert in_document(text, recorded) == text, said
    with pytest.raises(ValueError, match="once each"):
        in_document("# Page\n", recorded)
    (tmp_path / "recorded.json").write_text('{"b": {"command": ["b.py"], "ratios": {"r": {"better": "higher"}}}}')
    with pytest.raises(ValidationError, match=r"b\.ratios\.r\.better"):
        comparison.load(tmp_path / "recorded.json")


PREAMBLE = """
import argparse, figures, sys
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
figures.add_option(parser)
options = parser.parse_args()
"""


class Checkout:
    """The command with benchmarks of our own in place of the real ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "benchmarks").mkdir()
        (folder / "docs").mkdir()
        for name in ("run_recorded.py", "comparison.py", "figures.py"):
            shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
        (folder / "docs" / "performance.md").write_text(f"before\n{comparison.BEGIN}\nold\n{comparison.END}\nafter\n")

    def has(self, name: str, code: str, **ratios: dict[str, object]) -> None:
        (self.folder / "benchmarks" / f"{name}.py").write_text(PREAMBLE + code)
        file = self.folder / "benchmarks" / "recorded.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {name: {"command": [f"{name}.py"], "ratios": ratios}}))

    def run(self, *words: str) -> tuple[int, str]:
        script, logs = str(self.folder / "benchmarks" / "run_recorded.py"), str(self.folder / "logs")
        command = [sys.executable, script, *words, "--log", logs]
        options = {"env": {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, "cwd": self.folder, "timeout": 50}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        return done.returncode, done.stdout + done.stderr

    @property
    def recorded(self) -> comparison.Recorded:
        return comparison.load(self.folder / "benchmarks" / "recorded.json")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_ratio_that_fell_fails_it(checkout):
    checkout.has("bench_a", "figures.write(options, {'r': 1.5})", r={"value": 1.9})
    checkout.has("bench_b", "print('cause'); sys.exit(3)", r={"value": 1.0})
    code, said = checkout.run()
    assert code == 1, said
    assert "FAILED: bench_a, r: recorded 1.9, seen 1.5; it may fall by 20% at most" in said
    assert "FAILED: bench_b ended with 3:\ncause" in said
    assert re.search(r"bench_a: \d+ cores, .*RabbitMQ .*Python .*% busy before.*fixed loop \d+, \d+ MB/s", said)


def test_one_that_held_passes_and_a_new_one_is_recorded_with_the_machine(checkout):
    checkout.has("bench_a", "figures.write(options, {'r': 1.8, 's': 3.14159})", r={"value": 1.9}, s={})
    code, said = checkout.run("bench_a")
    assert code == 0, said
    assert checkout.recorded["bench_a"].ratios["s"].value is None, "nothing is recorded unasked"
    code, said = checkout.run("--record")
    assert code == 0, said
    one = checkout.recorded["bench_a"]
    assert [ratio.value for ratio in one.ratios.values()] == [1.8, 3.142]
    assert one.machine is not None
    assert one.machine.calibration is not None
    page = (checkout.folder / "docs" / "performance.md").read_text()
    assert page == f"before\n{comparison.markdown(checkout.recorded)}\nafter\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--quick"], 0, ""),
        (["bench_z"], 2, "no benchmark bench_z"),
        (["--quick", "--record"], 2, "a quick run measures nothing"),
    ],
)
def test_a_quick_run_compares_nothing_and_words_that_make_no_sense_are_refused(checkout, words, code, said):
    checkout.has("bench_a", "figures.write(options, {'quick': 2.0 if options.quick else 0.0})", r={"value": 1.0})
    ended, output = checkout.run(*words)
    assert ended == code, output
    assert said in output
    assert "recorded " not in output
