"""The log of answers to evaluations: by question, bounded, the latest of each set and label."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_mq.telemetry.evaluations import log as evaluation_log
from trinity_mq.telemetry.evaluations.log import (
    Evaluation,
    EvaluationAnswer,
    EvaluationLog,
    EvaluationQuestion,
    read_evaluations,
)
from trinity_mq.telemetry.sample_log import SEGMENTS, SampleLog, segments


def evaluation(label: int, name: str = "held_out", count: int = 3, text: str = "7") -> Evaluation:
    answers = [EvaluationAnswer(run=0, answer=text, reward=1.0)]
    questions = [EvaluationQuestion(task=n, question=f"{n}?", expected="7", answers=answers) for n in range(count)]
    return Evaluation(set=name, label=label, time=5.0, questions=questions)


def test_what_is_written_is_read_and_a_later_one_replaces_the_earlier(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 2**20)
    for one in (evaluation(4), evaluation(0), evaluation(0, "b"), evaluation(4, text="again")):
        log.append(one)
    assert read_evaluations(tmp_path) == [evaluation(0, "b"), evaluation(0), evaluation(4, text="again")]


def test_the_log_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    limit = 2**16
    log = EvaluationLog(tmp_path, limit)
    for label in range(60):
        log.append(evaluation(label, count=50, text="x" * 100))
        size = sum(path.stat().st_size for path in segments(tmp_path / "evaluations"))
        assert size <= limit + limit // SEGMENTS
    found = read_evaluations(tmp_path)
    assert [one.label for one in found] == list(range(60 - len(found), 60))
    assert 3 <= len(found) < 20


def test_small_ones_are_bounded_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_log, "MOST_EVALUATIONS", 5)
    log = EvaluationLog(tmp_path, 2**20)
    for label in range(9):
        log.append(evaluation(label))
    assert [one.label for one in read_evaluations(tmp_path)] == [4, 5, 6, 7, 8]


def test_a_large_set_is_kept_as_far_as_there_is_room_and_the_rest_is_counted(tmp_path: Path) -> None:
    EvaluationLog(tmp_path, 2**16).append(evaluation(0, count=1000, text="é" * 50))
    [found] = read_evaluations(tmp_path)
    assert 10 < len(found.questions) < 1000
    assert len(found.questions) + found.left_out == 1000
    assert [one.task for one in found.questions] == list(range(len(found.questions)))


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    EvaluationLog(tmp_path, 0).append(evaluation(0))
    assert not (tmp_path / "evaluations").exists()
    assert read_evaluations(tmp_path) == []


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    strange = SampleLog(tmp_path / "evaluations", 2**20)
    strange.append(0, b"\xff{")
    strange.append(1, b'{"set": "s", "label": 1, "questions": [], "of_a_later_release": 5}')
    strange.close()
    assert [(one.set, one.label) for one in read_evaluations(tmp_path)] == [("s", 1)]
