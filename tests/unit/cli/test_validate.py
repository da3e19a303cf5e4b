from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.runtime import plugins


def write(folder: Path, text: str) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    return str(path)


def test_a_good_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    text = f"name: x\nmodel: {{tiny: {{}}}}\nbuffer: {{taskset: {{name: mine, path: {tmp_path}/t.jsonl}}}}"
    assert main(["validate", write(tmp_path, text), "seed=3"]) == 0
    assert "taskset 'mine': 1 tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {tiny: {}}\nbufer: {}", "did you mean 'buffer'?"),
        ("model: {tiny: {}}\nbuffer: {taskset: {path: /no/such/file.jsonl}}", "/no/such/file.jsonl cannot be read"),
        ("model: {tiny: {}}\nbuffer: {taskset: {storage_type: synthetic, path: ops4}}", "did you mean 'ops3'?"),
        (
            "model: {tiny: {}}\nbuffer: {taskset: {reward_fn: char_mach, storage_type: queue}}",
            "did you mean 'char_match'",
        ),
        (
            "model: {tiny: {}}\nbuffer: {taskset: {storage_type: queue, reward_fn: gsm8k, reward_fn_args: {x: 1}}}",
            "reward_fn_args {'x': 1}",
        ),
        (
            "model: {tiny: {}}\noperator: {operators: [{name: reward_filtr}]}",
            "did you mean 'reward_filter'",
        ),
        (
            "model: {tiny: {}}\noperator: {operators: [{name: reward_filter, args: {treshold: 1}}]}",
            "operator.operators: operator 'reward_filter' cannot be made with args {'treshold': 1}",
        ),
        ("[]", "holds a list"),
    ],
)
def test_bad_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    assert main(["validate", write(tmp_path, text)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "/no/such.yaml"]) == 2
    assert capsys.readouterr().err == "trinity-mq validate: /no/such.yaml: cannot be read: No such file or directory\n"


def test_a_blob_store_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queue = "model: {tiny: {}}\nbuffer: {taskset: {storage_type: queue}}"
    assert main(["validate", write(tmp_path, queue), f"broker.blob_store={tmp_path}/blobs"]) == 0
    assert f"blob store file://{tmp_path}/blobs/run: can be written and read" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["validate", write(tmp_path, queue), f"broker.blob_store={tmp_path}/file"]) == 2
    assert "broker.blob_store: " in capsys.readouterr().err
    assert main(["validate", write(tmp_path, queue), "broker.blob_store=nosuch://x"]) == 2
    assert "no library opens nosuch://" in capsys.readouterr().err


MINE = """
from trinity_mq.workflows import AsyncStepWiseRewardWorkflow, Workflow

class Mine(Workflow):
    pass

class Steps(AsyncStepWiseRewardWorkflow):
    pass
"""


def with_workflow(folder: Path, name: str, more: str = "") -> str:
    (folder / "plugins").mkdir()
    (folder / "plugins" / "validated_workflows.py").write_text(MINE)
    taskset = f"{{name: mine, storage_type: queue, workflow: {name}}}"
    text = f"model: {{tiny: {{}}}}\nplugin_dirs: ['{folder / 'plugins'}']\nbuffer: {{taskset: {taskset}}}\n{more}"
    return write(folder, text)


@pytest.fixture
def _path_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_added", {})
    yield
    sys.modules.pop("validated_workflows", None)


@pytest.mark.usefixtures("_path_as_before")
def test_a_workflow_of_a_plug_in_folder_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", with_workflow(tmp_path, "validated_workflows.Mine")]) == 0
    assert f"workflow Mine from {tmp_path}/plugins/validated_workflows.py" in capsys.readouterr().out


@pytest.mark.usefixtures("_path_as_before")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Mine", "taskset 'mine': unknown workflow 'Mine'; known: "),
        ("Mine", "(in plugin_dirs there is 'validated_workflows.Mine')"),
        ("math_workflw", "did you mean 'math_workflow'"),
        ("validated_workflows.Steps", "set explorer.rollout_model.enable_history: true"),
    ],
)
def test_a_workflow_that_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main(["validate", with_workflow(tmp_path, name)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("_path_as_before")
def test_history_that_is_on_is_no_problem(tmp_path: Path) -> None:
    more = "explorer: {rollout_model: {enable_history: true}}"
    assert main(["validate", with_workflow(tmp_path, "validated_workflows.Steps", more)]) == 0


@pytest.mark.usefixtures("_path_as_before")
def test_a_plug_in_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model: {tiny: {}}\nplugin_dirs: [nowhere]\nbuffer: {taskset: {storage_type: queue}}"
    assert main(["validate", write(tmp_path, text)]) == 2
    assert "plugin_dirs: there is no folder 'nowhere'" in capsys.readouterr().err
