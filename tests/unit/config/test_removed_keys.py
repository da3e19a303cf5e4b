"""Removed settings: a warning that teaches in 0.2, an error from 0.3 on."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest

from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.load import (
    REMOVED_KEYS,
    RemovedKey,
    RemovedSettingWarning,
    is_refusing,
    without_removed_keys,
)
from trinity_mq.config.settings_table import all_settings

TINY = {"model": {"tiny": {}}}
RENAMED_PAGE = Path(__file__).parents[3] / "docs" / "renamed.md"
OTHER = "another value"
"""A value that no constant has."""


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the sections of a dotted key; auxiliary models are a list."""
    for part in reversed(key.split(".")):
        value = {part: [value] if part == "auxiliary_models" else value}
    assert isinstance(value, dict)
    return value


def test_a_removed_key_warns_with_its_value_the_constant_and_the_next_step() -> None:
    with pytest.warns(RemovedSettingWarning) as caught:
        config = load_config(TINY, ["explorer.batch_tries=7", "explorer.eval_interval=3"])
    (warning,) = caught
    assert str(warning.message) == (
        "explorer.batch_tries: this setting was removed; 3 (trinity_agents.explorer.training_batches.MANIFEST_TRIES) "
        "is used, not 7: remove it; to wait longer for an idle operator, raise explorer.operator_deadline. Release 0.3 "
        "refuses the key"
    )
    assert config == load_config(TINY, ["explorer.eval_interval=3"]), "nothing else is ignored"


def test_the_file_of_a_user_is_named_and_stages_warn_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {tiny: {}}\nexplorer: {batch_tries: 9}\nstages: [{stage_name: a}]\n")
    with pytest.warns(RemovedSettingWarning, match=r"explorer.batch_tries: .* is used, not 9:") as caught:
        load_stages(path)
    assert [warning.filename for warning in caught] == [f"{path}: stage a"]


def test_the_value_of_the_constant_is_no_warning_because_folders_of_earlier_runs_have_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(TINY, ["explorer.batch_tries=3", "explorer.cancel_grace=2"]) == load_config(TINY)


def test_release_0_3_refuses_what_0_2_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_refusing("0.2.9")
    assert is_refusing("0.3.0.dev0")
    assert is_refusing("1.0.0")
    monkeypatch.setattr("trinity_mq.config.loading.load.is_refusing", lambda: True)
    with pytest.raises(ConfigError, match=r"configuration: explorer.batch_tries: this setting was removed"):
        load_config(TINY, ["explorer.batch_tries=7"])
    assert load_config(TINY, ["explorer.batch_tries=3"]) == load_config(TINY)


def test_a_section_that_is_none_is_left_to_the_validation() -> None:
    with pytest.raises(ConfigError, match="explorer"):
        load_config({**TINY, "explorer": 3})


@pytest.mark.parametrize(("key", "row"), REMOVED_KEYS.items(), ids=REMOVED_KEYS)
def test_each_row_is_true(key: str, row: RemovedKey) -> None:
    settings = nested(key, OTHER)
    kept, (line,) = without_removed_keys(settings)
    assert kept == nested(key.rpartition(".")[0], {})
    assert settings == nested(key, OTHER), "the caller's settings stay"
    assert repr(OTHER) in line
    assert row.advice in line
    module, _, name = row.constant.rpartition(".")
    if module:
        assert getattr(importlib.import_module(module), name) == row.value
        assert name in line
    shown = f"`{row.value!r}`" if module else "none"
    assert f"| `{key}` | {shown} | {row.advice} |" in RENAMED_PAGE.read_text(encoding="utf-8")
    assert key not in {setting.key.replace(".<n>", "") for setting in all_settings()}
    for word in row.advice.replace(",", " ").replace(";", " ").split():
        if "." in word and "=" not in word and "/" not in word:
            assert word in {setting.key for setting in all_settings()}, "the advice names settings that there are"
