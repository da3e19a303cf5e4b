"""All problems of a configuration are reported at once, each with the line of the file that it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config, load_stages

BAD = """\
name: x
mode: bench
model:
  tiny: {}
  max_model_len: many
buffer: &buffer
  batch_sise: 3
  total_steps: 10
  taskset:
    workflw: x
trainer:
  batches_per_step: 3
synchronizer: {sync_interval: 2}
stall: 3
"""


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Return the text of each problem by its place, such as line 4."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    lines = {}
    for line in str(caught.value).splitlines():
        place, _, text = line.removeprefix(f"{path}:").partition(" ")
        lines[place.rstrip(":")] = text
    return lines


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(BAD)
    return path


def test_problems_of_keys_and_between_sections_are_reported_together_with_their_lines(bad: Path) -> None:
    texts = problems(bad)
    assert list(texts) == ["2", "5", "7", "9", "10", "12", "14"]
    assert "buffer.eval_tasksets is empty" in texts["2"]
    assert texts["5"].startswith("model.max_model_len: ")
    assert texts["7"] == "buffer.batch_sise: unknown key; did you mean 'batch_size'?"
    assert "did you mean 'workflow'?" in texts["10"]
    assert texts["12"].startswith("trainer.batches_per_step is 3, which does not divide synchronizer.sync_interval 2")
    assert texts["14"].startswith("stall: unknown key")


def test_a_key_that_the_command_line_sets_names_no_line(bad: Path) -> None:
    texts = problems(bad, "model.max_model_len=lots", "mode=both", "trainer.batches_per_step=5")
    assert list(texts) == ["7", "9", "10", "13", "14", ""]
    assert texts[""].startswith("model.max_model_len: ")
    assert texts["13"].startswith("trainer.batches_per_step is 5")  # the other key of the problem


def test_problems_of_a_stage_have_the_lines_of_the_stage(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(
        "model: {tiny: {}}\nstages:\n  - stage_name: first\n  - stage_name: second\n    trainer:\n      nprok: 2\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_stages(path)
    assert str(caught.value) == f"{path}:6: stage second: trainer.nprok: unknown key; did you mean 'nproc'?"


def test_merged_keys_are_looked_up_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "model: {tiny: {}}\n"
        "buffer:\n"
        "  taskset: &base\n"
        "    path: x\n"
        "    limitt: 3\n"
        "  eval_tasksets:\n"
        "    - <<: *base\n"
        "      name: y\n"
    )
    assert {place: text.split(":")[0] for place, text in problems(path).items()} == {
        "5": "buffer.eval_tasksets.0.limitt"
    }


def test_validate_checks_what_is_right_although_a_key_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {tiny: {hiden_size: 8}}\n"
        "trainer: {batches_per_step: 3}\n"
        "operator: {operators: [{name: nonsense}]}\n"
        "buffer:\n"
        "  tasksets:\n"
        "    - {name: first, path: nothing.jsonl, reward_fn: no_such}\n"
        "    - {name: second, path: nothing.jsonl, workflow: nowhere.At}\n"
    )
    assert main(["validate", str(path)]) == 2
    text = capsys.readouterr().err
    for problem in (
        f"{path}:1: model.tiny.hiden_size: unknown key",
        f"{path}:2: trainer.batches_per_step is 3",
        "taskset 'first': unknown reward function 'no_such'",
        "taskset 'first': nothing.jsonl cannot be read",
        "taskset 'second': workflow 'nowhere.At'",
        "unknown operator 'nonsense'",
    ):
        assert problem in text, text
