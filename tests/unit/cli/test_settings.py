"""The reference of the settings: made from the models, complete, and up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.config import Config
from trinity_mq.config.settings_table import FIRST_SETTINGS, all_settings, page

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_agrees_with_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: trinity-mq settings --out docs/settings.md"


def test_the_page_opens_with_twelve_settings_that_there_are() -> None:
    assert len(FIRST_SETTINGS) == 12
    assert set(FIRST_SETTINGS) <= {one.key for one in all_settings()}
    head = page().split("## ")[1]
    assert head.startswith("Twelve to try first")
    assert re.findall(r"^\| `([a-z_.]+)` \|", head, re.MULTILINE) == list(FIRST_SETTINGS)


def test_each_setting_has_its_meaning_and_stands_once() -> None:
    found = all_settings()
    assert [one.key for one in found if not one.meaning] == []
    keys = [one.key for one in found]
    assert len(keys) == len(set(keys))
    assert set(Config.model_fields) == {key.partition(".")[0] for key in keys}


def test_type_default_unit_and_limits() -> None:
    known = {one.key: one for one in all_settings()}
    total = known["buffer.total_steps"]
    assert (total.type, total.default, total.unit) == ("int or null, ≥ 1", "`null`", "batches")
    message = known["broker.max_message_bytes"]
    assert (message.type, message.default, message.unit) == ("int, ≥ 65 536, ≤ 16 777 216", "`8388608`", "bytes")
    assert known["trainer.num_threads"].type == "`auto` or int, ≥ 1"
    assert known["runner.blocking"].type == "`thread`, `process`"
    assert known["operator.operators.<n>.name"].default == "required"
    assert known["buffer.eval_tasksets"].type == "list of section as `buffer.taskset`"


def test_a_section_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "supervisor"]) == 0
    out = capsys.readouterr().out
    assert "supervisor.grace  (float, > 0, seconds, default `30.0`)\n    Seconds in which a process drains" in out
    assert "trainer." not in out
    assert main(["settings", "bufer"]) == 2
    assert "no section or setting 'bufer'; known sections: algorithm, " in capsys.readouterr().err


def test_the_page_goes_to_a_file(tmp_path: Path) -> None:
    assert main(["settings", "--out", str(tmp_path / "s.md")]) == 0
    assert (tmp_path / "s.md").read_text(encoding="utf-8") == page()
    assert main(["settings", "--out", str(tmp_path / "no" / "s.md")]) == 2
