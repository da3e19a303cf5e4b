"""All problems of a configuration are reported at once, each with the line of the file that it is about."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from trinity_mq.cli.main import main
from trinity_mq.config import ConfigError, load_config, load_stages
from trinity_mq.config.loading.load import read_file
from trinity_mq.config.loading.problems import KeyLines

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


@pytest.mark.parametrize(
    ("text", "overrides", "lines"),
    [
        # a key beside << is the cause, wherever << is
        (
            "buffer:\n  taskset: &base {path: x, limit: 1}\n  eval_tasksets:\n"
            "    - <<: *base\n      name: y\n      limit: z\n",
            [],
            ["7"],
        ),
        ("x: &a {nprok: 3}\ntrainer:\n  <<: [*a]\n", [], ["2", "2"]),
        ("trainer: &a\n  <<: *a\n  nprok: 3\n", [], ["4"]),
        ("buffer:\n  eval_tasksets:\n    - {path: y, limit: 1}\n", ["buffer.eval_tasksets[0].limit=z"], [""]),
        ("name: x  # a\u0085b\n", ["stall=3"], [""]),
        (
            "operator: {operators: [{name: 'a\u2028b', args: 3}]}\nstall: 3\n",
            [],
            ["2", "3"],
        ),  # no line end to an editor
        ("trainer: {1: 2}\nbroker: {url: 3, amqp://u:secret@h: 4}\n", [], ["2", "3", "3"]),
    ],
)
def test_the_line_is_the_one_that_sets_the_value(
    tmp_path: Path, text: str, overrides: list[str], lines: list[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("model: {tiny: {}}\n" + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    places = [line.removeprefix(f"{path}:").partition(" ")[0].rstrip(":") for line in str(caught.value).splitlines()]
    assert places == lines
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("second", "overrides", "problem"),
    [
        ("nprok: 2", [], ":9: stage second: trainer.nprok: unknown key; did you mean 'nproc'?"),
        ("nproc: 2", ["buffer.batch_size=x"], ": stage first: buffer.batch_size: "),
        ("nproc: 1}\nbuffer: {batch_size: x", [], ":10: stage first: buffer.batch_size: "),
        ("nproc: 1", ["stages.0.buffer.batch_size=a"], ": stage first: buffer.batch_size: "),
    ],
)
def test_a_problem_of_a_stage_has_the_line_inside_or_outside(
    tmp_path: Path, second: str, overrides: list[str], problem: str
) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(
        "model: {tiny: {}}\nstages:\n  - stage_name: first\n    buffer:\n      total_steps: 3\n"
        f"  - stage_name: second\n    buffer:\n      total_steps: 3\n    trainer: {{{second}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_stages(path, overrides)
    assert str(caught.value).startswith(f"{path}{problem}")


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""A kibibyte whose aliases stand for 9 ** 11 values."""


@pytest.mark.parametrize(
    "text",
    ["buffer: &a [*a]\n", "buffer: &a {b: *a}\n", BOMB, *(f"buffer: {'[' * n}{']' * n}" for n in (150, 999, 20_000))],
    ids=["list", "mapping", "bomb", "deep", "deeper", "deepest"],
)
@pytest.mark.parametrize("read", [load_config, read_file])
def test_a_file_without_an_end_or_too_deep_is_refused(
    tmp_path: Path, text: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="too many levels"):
        read(path)


def test_the_lines_of_many_keys_cost_linear_time() -> None:
    count = 20_000
    lines = KeyLines("model:\n" + "".join(f"  k{number}: {number}\n" for number in range(count)))
    begin = time.process_time()
    assert [lines.line_of_key(("model", f"k{number}")) for number in range(count)] == [*range(2, count + 2)]
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "text",
    [
        "model: {tiny: {}, max_model_len: 32, max_prompt_tokens: 16, max_response_tokenz: 3}",
        "model: {tiny: {}}\ntrainer: {batches_per_step: 3}\nsynchronizer: {sync_intervall: 3}",
        "model: {tiny: {}}\nmod: bench\nsource: {tap: other}\nalgorithm: {algorithm_type: sft}",
        "model: {tiny: {}}\nbuffer: {trainer_input: {auxiliary_buffers: {a: {pathh: x}}}}",
        "model: {tiny: {}}\nalgorithm: {repeat_times: 1, estimatr: {kind: group, baseline: none, scale: none}}",
    ],
)
def test_a_wrong_key_is_one_problem_and_not_also_what_follows_from_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*: unknown key; did you mean '\w+'\?$"):
        load_config(path)


@pytest.mark.parametrize(
    "key",
    ["algorithm.std_level", "algorithm.kl_loss_fn", "algorithm.estimator.kind", "explorer.rollout_model.engine"],
)
@pytest.mark.parametrize("value", ["[]", "{a: 1}"])
def test_a_list_or_a_section_in_the_place_of_a_name_is_refused(key: str, value: str) -> None:
    section = key.partition(".")[0]
    with pytest.raises(ConfigError, match=f"^configuration: {section}"):
        load_config({"model": {"tiny": {}}}, ["algorithm.std_level=group", f"{key}={value}"])


@pytest.mark.parametrize(
    "wrong",
    ["plugin_dir: [FOLDER]", "{plugin_dirs: [FOLDER], explorer: {rollout_model: {enable_histroy: true}}}"],
)
def test_validate_reports_nothing_that_follows_from_a_wrong_key(
    tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recorded_steps.py").write_text(
        "from trinity_mq.workflows import AsyncRewardPropagationWorkflow\n"
        "class Steps(AsyncRewardPropagationWorkflow):\n"
        "    async def step_async(self, step_num): ...\n"
        "    async def reward_async(self, exps): ...\n"
    )
    (tmp_path / "records.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    path = tmp_path / "x.yaml"
    settings = {
        "model": {"tiny": {}},
        "buffer": {"taskset": {"path": str(tmp_path / "records.jsonl"), "workflow": "recorded_steps.Steps"}},
        **yaml.safe_load(wrong.replace("FOLDER", str(tmp_path))),
    }
    path.write_text(yaml.safe_dump(settings))
    assert main(["validate", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "unknown key" in line


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
