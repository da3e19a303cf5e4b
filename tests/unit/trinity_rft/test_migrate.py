"""``trinity-mq migrate``: what it writes, what it says, and what it does not overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.trinity_configs import DPO, GSM8K
from trinity_mq.cli.main import main
from trinity_mq.config import load_config


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.yaml"
    path.write_text(yaml.safe_dump(GSM8K))
    return path


def test_a_file_is_written_that_says_what_it_changed_and_lacks(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ours.yaml"
    assert main(["migrate", str(source), "-o", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("# Written by trinity-mq migrate from gsm8k.yaml, a configuration of Trinity-RFT.\n")
    assert "# Trinity-RFT's default; here it is 360 s\n  max_timeout: 1800\n" in text
    assert "# Has no counterpart here:\n#   explorer.rollout_model.dtype: bfloat16 - " in text
    assert "# Is not needed here:\n" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    assert load_config(out).buffer.taskset.workflow == "math_workflow"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "no counterpart: explorer.rollout_model.dtype: bfloat16 - engines sample in `model.dtype`, which is that of "
        "the trained weights too",
        f"{out} is valid; next: trinity-mq validate {out}",
    ]


def test_a_file_that_is_there_stays(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ours.yaml"
    out.write_text("mine")
    assert main(["migrate", str(source), "-o", str(out)]) == 2
    assert f"{out} already exists; give another name, or --force to overwrite it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["migrate", str(source), "-o", str(out), "--force"]) == 0
    assert "qwen2-5-1-5b-gsm8k" in out.read_text()
    capsys.readouterr()
    assert main(["migrate", str(source)]) == 0
    said = capsys.readouterr()
    assert load_config(yaml.safe_load(said.out)).name == "qwen2-5-1-5b-gsm8k"
    assert "the result is valid; next: write it with -o FILE" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8k.yaml", "-o", "none/x.yaml"], "x.yaml cannot be written: No such file or directory; give another file"),
        (["none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_files_that_are_not_there(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(source.parent)
    assert main(["migrate", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_valid_as_it_stands_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRINITY_TASKSET_PATH", raising=False)
    source = tmp_path / "dpo.yaml"
    source.write_text(yaml.safe_dump(DPO))
    out = tmp_path / "ours.yaml"
    assert main(["migrate", str(source), "-o", str(out)]) == 1
    said = capsys.readouterr().err
    assert f"{out} needs an edit:\n  buffer.trainer_input.experience_buffer.path: environment variable" in said
    monkeypatch.setenv("TRINITY_TASKSET_PATH", "pairs.jsonl")
    assert load_config(out).algorithm.algorithm_type == "dpo"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "holds a list, wanted sections"),
        ("a: [", "is not YAML"),
        ("name: x\n", "is not a configuration of Trinity-RFT"),
        ("model: {}\nstages: 3\n", "stages: wanted a list"),
        ("model: 5\n", "is not a configuration of Trinity-RFT"),
        ("model: {}\nbuffer: [1]\n", "model"),
    ],
)
def test_rubbish_is_an_error_and_no_crash(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "bad.yaml"
    source.write_text(text)
    assert main(["migrate", str(source)]) in {1, 2}
    assert words in capsys.readouterr().err
