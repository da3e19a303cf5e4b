from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.cli.main import main


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
