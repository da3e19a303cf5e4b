"""The report of a run as one page: what is in it, that it needs nothing else, and that names cannot break it."""

from __future__ import annotations

import json
import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.observability.report.curves import MOST_CURVES, PICTURES, as_svg, downsample, drawn
from trinity_mq.telemetry import METRICS_FILE

SETTINGS: dict[str, Any] = {
    "name": "shown",
    "model": {"tiny": {}},
    "broker": {"url": "amqp://me:secret@host/"},
    "buffer": {"total_steps": 4},
}


def run_folder(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    with (folder / METRICS_FILE).open("w") as file:
        for number, line in enumerate(lines):
            file.write(json.dumps({"time": 100.0 + number, "role": "trainer", "agent": "t", **line}) + "\n")
    return folder


class Page(HTMLParser):
    """Elements that are open at the end, texts, and what points out of the page."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in {"src", "href", "xlink:href"} and value and not value.startswith("#"):
                self.outside.append(value)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "rollout/reward/mean": step / 4, "time/batch": 1.0} for step in range(1, 5)
    ]
    lines += [{"step": step, "eval/held/accuracy/mean@4": step / 4, "eval/held/pass@4": 1.0} for step in (0, 4)]
    lines.append({"step": 4, "sample/dropped_stale_groups": 3.0, "odd/<script>alert(1)</script>": 1.0})
    folder = run_folder(tmp_path / "run", *lines)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"the report is in {folder / 'report.html'}\n"
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.texts.count("shown") == 2, "title and heading"
    assert "groups too old" in " ".join(page.texts)
    assert {"held", "accuracy/mean@4", "pass@4", "1.000"} <= set(page.texts)
    assert page.tags.count("svg") == 4, "accuracy, pass@k, reward, seconds; what is not known has none"
    assert (page.outside, "script" in page.tags) == ([], False)
    assert len(set(page.ids)) == len(page.ids), "the pictures' names are apart"
    assert "secret" not in text
    assert "total_steps: 4" in text


def test_another_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {"step": 1, "actor/entropy": 1.0})
    assert main(["report", str(folder), "-o", str(tmp_path / "mine.html")]) == 0
    assert (tmp_path / "mine.html").is_file()
    assert not (folder / "report.html").exists()


def test_without_metrics_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_folder(tmp_path / "run"))]) == 2
    assert "run 'shown' has no metrics yet in" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text", True])
def test_values_that_cannot_be_drawn_break_nothing(tmp_path: Path, value: Any) -> None:
    folder = run_folder(tmp_path / "run", {"step": 1, "actor/entropy": value}, {"step": 2, "actor/grad_norm": 1.0})
    assert main(["report", str(folder)]) == 0


def test_a_long_curve_is_averaged_and_keeps_its_end() -> None:
    points = [(step, float(step)) for step in range(1000)] + [(1000, math.nan)]
    found = downsample(points, 10)
    assert len(found) == 10
    assert found[0] == (99, 49.5)
    assert found[-1] == (999, 949.5)
    assert downsample(points[:5], 10) == points[:5]


def test_few_curves_in_a_picture_and_each_picture_has_names_of_its_own() -> None:
    curves = {f"eval/{n}/accuracy/mean@1": [(0, 0.0), (1, 1.0)] for n in range(20)}
    chosen = drawn(curves, PICTURES[0])
    assert len(chosen) == MOST_CURVES
    assert as_svg(chosen, 1) == as_svg(chosen, 1), "the same run makes the same page"
    assert "#010203" not in as_svg(chosen, 1)


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = run_folder(tmp_path / "run", {"step": 1, "actor/entropy": 1.0})
    assert main(["report", str(folder)]) == 2
    assert "pip install 'trinity-mq[report]'" in capsys.readouterr().err
