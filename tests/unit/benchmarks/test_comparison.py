"""Recorded ratios: what counts as a fall, what file and page say, and the command with benchmarks of our own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks import comparison
from benchmarks.comparison import Benchmark, Machine, Ratio, compare, fall, in_document, with_new_values

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "performance.md"
POSITIVE = st.floats(1e-3, 1e3)
MACHINE = Machine(processor="p", cores=2, rabbitmq="4.0.5", python="3.11.7", busy=1.5, calibration=(100.0, 101.0))


def benchmark(**ratios: Ratio) -> Benchmark:
    return Benchmark(command=["bench.py"], ratios=ratios)


class TestAFall:
    @pytest.mark.parametrize(
        ("better", "recorded", "seen", "verdict"),
        [
            ("more", 10.0, 8.01, "held"),
            ("more", 10.0, 7.99, "FELL"),
            ("more", 10.0, 100.0, "held"),
            ("less", 1.0, 1.24, "held"),
            ("less", 1.0, 1.26, "FELL"),
            ("less", 1.0, 0.1, "held"),
        ],
    )
    def test_a_fifth_is_the_bound(self, better, recorded, seen, verdict):
        (row,) = compare("b", benchmark(r=Ratio(better=better, value=recorded)), {"r": seen})
        assert row.verdict == verdict
        assert row.failed == (verdict == "FELL")

    @given(POSITIVE, POSITIVE)
    def test_a_ratio_and_its_inverse_fall_alike(self, recorded, seen):
        more, less = Ratio(value=recorded), Ratio(better="less", value=1 / recorded)
        assert fall(more, seen) == pytest.approx(fall(less, 1 / seen))

    def test_the_problem_names_benchmark_and_both_ratios(self):
        (row,) = compare("bench_codec", benchmark(encode=Ratio(value=1.9)), {"encode": 1.234})
        assert row.problem() == "bench_codec, encode: recorded 1.9, seen 1.23; it may fall by 20% at most"

    def test_what_is_not_recorded_yet_is_shown_and_not_judged(self):
        (row,) = compare("b", benchmark(r=Ratio()), {"r": 0.001})
        assert (row.verdict, row.failed) == ("not recorded", False)

    def test_a_ratio_that_is_gone_fails_unless_what_it_needs_is_not_installed(self):
        one = benchmark(r=Ratio(value=2.0, needs="trl"), s=Ratio(value=3.0))
        rows = compare("b", one, {}, absent={"trl"})
        assert [row.verdict for row in rows] == ["left out", "MISSING"]
        assert rows[1].problem() == "b, s: in recorded.json, but the benchmark wrote no such ratio"
        assert [row.verdict for row in compare("b", one, {})] == ["MISSING", "MISSING"]


def test_recording_keeps_what_was_left_out():
    old = benchmark(r=Ratio(value=2.0, needs="trl"), s=Ratio(better="less", value=3.0))
    new = with_new_values(old, {"s": 2.5, "unknown": 1.0}, "2026-11-26", MACHINE)
    assert new.ratios == {"r": Ratio(value=2.0, needs="trl"), "s": Ratio(better="less", value=2.5)}
    assert (new.date, new.machine) == ("2026-11-26", MACHINE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"calibration": (100.0, 80.0)}, "a fixed loop made 100 MB/s before, 80 after"),
        ({"busy": 21.0}, "others used 21 % of the processor before it"),
        ({"busy": None, "calibration": None}, ""),
    ],
)
def test_a_noisy_machine_is_seen(change, said):
    machine = MACHINE.model_copy(update=change)
    assert machine.noise() == said
    assert ("NOISY" in comparison.state(machine)) == bool(said)


class TestTheFileAndThePage:
    def test_the_file_is_as_it_is_written(self):
        recorded = comparison.load()
        assert comparison.FILE.read_text(encoding="utf-8") == comparison.dump(recorded)
        for name, one in recorded.items():
            assert (ROOT / "benchmarks" / one.command[0]).is_file(), name
            values = [ratio.value for ratio in one.ratios.values() if ratio.value is not None]
            assert bool(values) == bool(one.date and one.machine), f"{name}: values have a date and a machine"

    def test_what_does_not_fit_is_said(self, tmp_path):
        file = tmp_path / "recorded.json"
        file.write_text('{"b": {"command": ["b.py"], "ratios": {"r": {"better": "higher"}}}}')
        with pytest.raises(ValidationError, match=r"b\.ratios\.r\.better"):
            comparison.load(file)

    def test_the_table_of_the_page_is_the_recorded_one(self):
        text = DOCUMENT.read_text(encoding="utf-8")
        said = "recorded.json and docs/performance.md differ: python benchmarks/run_recorded.py --record writes both"
        assert in_document(text, comparison.load()) == text, said

    def test_a_page_without_the_markers_is_refused(self):
        with pytest.raises(ValueError, match="once each"):
            in_document("# Page\n", comparison.load())

    def test_ratios_in_the_other_tables_of_the_page_are_recorded_ones(self):
        """They stand beside the bare figures that they were made of, which a person writes there."""
        recorded = comparison.load()
        side_by_side = DOCUMENT.read_text(encoding="utf-8").partition("## Side by side")[2].partition("\n## ")[0]
        found = list(written_ratios(side_by_side.partition(comparison.BEGIN)[0]))
        assert {name for name, _ in found} >= {"bench_demo", "bench_ray", "bench_codec", "bench_sync", "bench_gateway"}
        for name, number in found:
            values = [ratio.value for ratio in recorded[name].ratios.values() if ratio.value is not None]
            assert any(same(number, value) for value in values), f"{name}: {number} is none of {values}"


def written_ratios(text: str) -> list[tuple[str, str]]:
    """The ratios of a table's column of that name, and those behind a colon in the demo's column of wishes."""
    found, name, column = [], "", None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or set(cells[0]) == {"-"}:
            continue
        if script := re.match(r"`(?:benchmarks/)?(bench_\w+)\.py", cells[0]):
            name = script[1]
        if "wanted" in cells:
            column = cells.index("ratio") if "ratio" in cells else None
        elif column is not None:
            found += [(name, number) for number in re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", cells[column]))]
        else:
            found += [(name, number) for number in re.findall(r": ([\d.]+)", cells[-1])]
    return found


def same(written: str, value: float) -> bool:
    digits = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5001 * 10**-digits


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
        preamble = "import argparse, figures, subprocess, sys, time\n"
        preamble += "parser = argparse.ArgumentParser()\nparser.add_argument('--quick', action='store_true')\n"
        preamble += "figures.add_option(parser)\noptions = parser.parse_args()\n"
        (self.folder / "benchmarks" / f"{name}.py").write_text(preamble + code)
        file = self.folder / "benchmarks" / "recorded.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {name: {"command": [f"{name}.py"], "ratios": ratios}}))

    def run(self, *words: str) -> tuple[int, str]:
        command = [
            sys.executable,
            str(self.folder / "benchmarks" / "run_recorded.py"),
            *words,
            "--log",
            str(self.folder / "logs"),
        ]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=50, check=False, env=environment, cwd=self.folder
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def recorded(self) -> comparison.Recorded:
        return comparison.load(self.folder / "benchmarks" / "recorded.json")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


class TestTheCommand:
    def test_a_ratio_that_fell_fails_it(self, checkout):
        checkout.has("bench_a", "figures.write(options, {'r': 1.5})", r={"value": 1.9})
        code, said = checkout.run()
        assert code == 1, said
        assert "FAILED: bench_a, r: recorded 1.9, seen 1.5; it may fall by 20% at most" in said
        assert re.search(r"bench_a: \d+ cores, .*RabbitMQ .*Python .*% busy before.*fixed loop \d+, \d+ MB/s", said)

    def test_one_that_held_passes_and_a_new_one_is_recorded_with_the_machine(self, checkout):
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

    @pytest.mark.extended
    def test_a_benchmark_that_breaks_fails_it_and_the_others_run(self, checkout):
        checkout.has("bench_a", "print('cause'); sys.exit(3)", r={"value": 1.0})
        checkout.has("bench_b", "figures.write(options, {})", r={"value": 1.0})
        checkout.has("bench_c", "figures.write(options, {'r': 1.0})", r={"value": 1.0})
        code, said = checkout.run()
        assert code == 1
        assert "FAILED: bench_a ended with 3:\ncause" in said
        assert "FAILED: bench_b wrote no ratio" in said
        assert re.search(r"r +recorded +1.000 +seen +1.000 +held", said)
        checkout.has("bench_c", "figures.write(options, {'other': 1.0})", r={})
        code, said = checkout.run("bench_c", "--record")
        assert code == 1
        assert "FAILED: bench_c, r: in recorded.json, but the benchmark wrote no such ratio" in said

    def test_quick_compares_nothing(self, checkout):
        checkout.has("bench_a", "figures.write(options, {'quick': 2.0 if options.quick else 0.0})", r={"value": 1.0})
        code, said = checkout.run("--quick")
        assert code == 0, said
        assert "recorded " not in said

    @pytest.mark.parametrize(
        ("words", "said"),
        [(["bench_z"], "no benchmark bench_z"), (["--quick", "--record"], "a quick run measures nothing")],
    )
    def test_words_that_make_no_sense_are_refused(self, checkout, words, said):
        checkout.has("bench_a", "figures.write(options, {'r': 1.0})", r={"value": 1.0})
        code, output = checkout.run(*words)
        assert code == 2
        assert said in output
