"""``inspect --evaluation``: the answers to evaluations by question, from the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trinity_mq.cli.main import main
from trinity_mq.telemetry.evaluations.log import Evaluation, EvaluationAnswer, EvaluationLog, EvaluationQuestion


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with three evaluations of two sets."""
    (tmp_path / "config.yaml").write_text(f"name: r\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}\n")
    log = EvaluationLog(tmp_path, 2**20)
    for name, label in (("sums", 0), ("sums", 5), ("words", 5)):
        questions = [
            EvaluationQuestion(
                task=task,
                question=f"{name} {task}?",
                expected="7" if task else None,
                answers=[EvaluationAnswer(run=run, answer=f"{run} at {label}", reward=run / 2) for run in range(2)],
                failure="run 2: KeyError" if task == 2 else None,
            )
            for task in range(3)
        ]
        log.append(Evaluation(set=name, label=label, time=9.0, questions=questions))
    return tmp_path


def test_the_last_evaluation_of_each_set_by_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--evaluation"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("question 2") == 2
    for words in (
        "sums at 5, question 1",
        "asked  sums 1?",
        "expected  7",
        "expected  unknown",
        "run 1  reward 0.5: 1 at 5",
    ):
        assert words in out
    assert "failure  run 2: KeyError" in out
    assert "at 0" not in out


def test_one_question_of_one_evaluation_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(folder), "--evaluation", "sums", "--step", "0", "--task", "1", "--json"]
    assert main(words) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["set"], found["label"], found["task"], found["expected"]) == ("sums", 0, 1, "7")
    assert [one["answer"] for one in found["answers"]] == ["0 at 0", "1 at 0"]


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--limit", "2"], 0, "2 of 6 questions shown"),
        (["nothing"], 1, "answers are kept of: sums at 0, sums at 5, words at 5"),
        (["--step", "7"], 1, "no question matches"),
    ],
)
def test_what_is_not_shown_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, words: str
) -> None:
    assert main(["inspect", str(folder), "--evaluation", *more]) == code
    assert words in capsys.readouterr().err


def test_a_run_without_answers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(f"name: r\nmodel: {{tiny: {{}}}}\nrun_dir: {tmp_path}\n")
    assert main(["inspect", str(tmp_path), "--evaluation"]) == 1
    assert "eval_answers_max_bytes" in capsys.readouterr().err
    assert main(["inspect", "no-such-run", "--evaluation"]) == 2
    assert "has none here" in capsys.readouterr().err
