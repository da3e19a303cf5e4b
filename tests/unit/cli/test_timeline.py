"""``trinity-mq timeline`` on run folders as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trinity_mq.cli.main import main
from trinity_mq.cli.run.report import make_report

LINES = [
    {"time": 1002.0 + n, "role": "trainer", "agent": "trainer-0", "step": n, "time/batch": 0.5} for n in range(1, 9)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "smoke"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return run


def titles(picture: Path) -> list[str]:
    svg = ElementTree.fromstring(picture.read_text())
    return [str(one.text) for one in svg.iter("{http://www.w3.org/2000/svg}title")]


def test_by_name_folder_or_file_it_draws_into_the_runs_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent.parent / "smoke.yaml").write_text("name: smoke\nmodel: {tiny: {}}\n")
    for target in ("smoke", "smoke.yaml", str(folder)):
        (folder / "timeline.svg").unlink(missing_ok=True)
        assert main(["timeline", target]) == 0
        assert capsys.readouterr().out.strip().endswith("timeline.svg")
        assert len(titles(folder / "timeline.svg")) == 8
    assert "timeline.svg" in make_report("smoke", folder)


def test_some_batches_to_another_place(folder: Path) -> None:
    assert main(["timeline", "smoke", "--steps", "3-4", "--out", "part.svg"]) == 0
    assert titles(folder.parent.parent / "part.svg") == ["train, progress 3: 0.500 s", "train, progress 4: 0.500 s"]
    assert not (folder / "timeline.svg").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no run has left a folder there"),
        (["smoke", "--steps", "4-3"], "wanted FIRST-LAST"),
        (["smoke", "--steps", "all"], "wanted FIRST-LAST"),
        (["smoke", "--steps", "100-200"], "no batch from 100 to 200"),
        (["smoke", "--out", "no/such/folder.svg"], "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["timeline", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_metrics_without_durations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metrics.jsonl").write_text('{"time": 1.0, "role": "trainer", "agent": "t", "step": 1, "x": 1.0}\n')
    assert main(["timeline", "smoke"]) == 2
    assert "no line that says how long" in capsys.readouterr().err
