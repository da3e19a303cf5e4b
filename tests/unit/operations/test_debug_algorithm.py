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
    assert "ok      masked tokens do not affect the loss" in out


def test_a_kl_in_the_rewards_is_in_what_is_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for more in ([], ["algorithm.reward_kl={coef: 0.5}"]):
        assert main(["debug", "algorithm", str(config), "algorithm.algorithm_type=reinforceplusplus", *more]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


LOSS = """
import torch

def falls_off(log_ratio, logprob, advantage, width=0.3):
    return -advantage * log_ratio.exp() * torch.exp(-(log_ratio.detach() / width).square())

def wrong_way(log_ratio, logprob, advantage):
    return advantage * log_ratio.exp()

def detached(log_ratio, logprob, advantage):
    return -advantage * log_ratio.detach().exp()

def looks_around(log_ratio, logprob, advantage):
    return -(advantage - advantage.mean()) * log_ratio.exp()
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("falls_off", 0, "ok      good tokens become likelier"),
        ("wrong_way", 1, "FAILED  good tokens become likelier: 40 of 40 tokens are pushed against their advantage"),
        ("looks_around", 1, "FAILED  micro-batches add up: the gradient of two halves differs"),
    ],
)
def test_a_loss_of_the_users_own(
    name: str, code: int, words: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / f"losses_{name}.py").write_text(LOSS)
    surrogate = f"algorithm.surrogate={{kind: losses_{name}.{name}}}"
    settings = [f"plugin_dirs=[{config.parent}]", surrogate, "algorithm.repeat_times=16"]
    assert main(["debug", "algorithm", str(config), *settings]) == code
    assert words in capsys.readouterr().out


def test_a_loss_without_a_gradient_is_an_error(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "losses_detached.py").write_text(LOSS)
    settings = [f"plugin_dirs=[{config.parent}]", "algorithm.surrogate={kind: losses_detached.detached}"]
    assert main(["debug", "algorithm", str(config), *settings]) == 2
    assert "returns losses without a gradient: nothing would be learned" in capsys.readouterr().err


def test_what_is_shown(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "algorithm", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "grpo on 2 tasks x 4 runs of 6 tokens"
    assert lines[2].split() == ["task/run", "token", "reward", "advantage", "ratio", "gradient"]
    assert sum("masked" in line for line in lines[3:27]) == 4
    assert any(line.startswith("loss ") for line in lines)
