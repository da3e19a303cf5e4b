"""The list of algorithms, and what is said of one."""

from __future__ import annotations

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.config import AlgorithmConfig
from trinity_mq.config.algorithm.presets import PRESETS
from trinity_mq.config.algorithm.reference import RewardKL


def test_each_algorithm_is_listed_with_its_pieces_and_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["algorithms"]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines() if line[:1].isalpha()} == set(PRESETS)
    assert max(map(len, out.splitlines())) <= 80
    assert "ratio sequence; surrogate clip(low 0.0003" in " ".join(out.split())


def test_what_is_shown_of_one_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "show", "gspo", "surrogate.low=0.1"]) == 0
    words, _, text = capsys.readouterr().out.partition("\nalgorithm:\n")
    assert "arXiv 2507.18071" in words
    assert "max(-A s" in words
    found = AlgorithmConfig.model_validate(yaml.safe_load(text))
    assert found == AlgorithmConfig.model_validate({"algorithm_type": "gspo", "surrogate": {"low": 0.1}})
    assert main(["algorithms", "show", "ppo", "kl=null", "reward_kl={coef: 0.1}"]) == 0
    words, _, text = capsys.readouterr().out.partition("\nalgorithm:\n")
    assert "needs: a reference model" in words
    assert AlgorithmConfig.model_validate(yaml.safe_load(text)).reward_kl == RewardKL(coef=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_each_can_be_shown_and_pasted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "show", name]) == 0
    text = capsys.readouterr().out.partition("\nalgorithm:\n")[2]
    assert AlgorithmConfig.model_validate(yaml.safe_load(text)) == AlgorithmConfig.model_validate(
        {"algorithm_type": name}
    )


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "show", "gsp"]) == 2
    assert "did you mean gspo" in capsys.readouterr().err
    assert main(["algorithms", "show", "gspo", "surrogate.lo=1"]) == 2
    assert "lo" in capsys.readouterr().err
