"""An algorithm on a small batch: what is shown of it, and what is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.config.algorithm.presets import PRESETS


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"tiny": {}}, "algorithm": {"repeat_times": 4}}))
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_its_checks(name: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "algorithm", str(config), f"algorithm.algorithm_type={name}"]) == 0
    out = capsys.readouterr().out
    assert "FAILED" not in out
    assert "ok      masked tokens have no part in it" in out


def test_what_is_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "algorithm", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "grpo on 2 tasks x 4 runs of 6 tokens"
    assert lines[2].split() == ["task/run", "token", "reward", "advantage", "ratio", "gradient"]
    assert sum("masked" in line for line in lines[3:27]) == 4
    assert any(line.startswith("loss ") for line in lines)
