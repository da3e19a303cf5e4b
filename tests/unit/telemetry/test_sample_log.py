"""Samples in a run's folder: what was written is read, whatever was torn or removed meanwhile."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from trinity_mq.telemetry.evaluations.log import (
    MOST_EVALUATIONS,
    Evaluation,
    EvaluationAnswer,
    EvaluationLog,
    EvaluationQuestion,
    read_evaluations,
)
from trinity_mq.telemetry.sample_log import SEGMENTS, SampleLog, SampleLogReader, segments

Opened = Callable[[Path, int], SampleLog]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens logs, which are closed at the end."""
    logs: list[SampleLog] = []

    def open_log(folder: Path, max_bytes: int) -> SampleLog:
        logs.append(SampleLog(folder, max_bytes))
        return logs[-1]

    yield open_log
    for log in logs:
        log.close()


def test_records_of_a_newer_release_are_named_and_those_of_ours_are_read(tmp_path: Path, opened: Opened) -> None:
    for step in (1, 2, 3):
        log = opened(tmp_path, 2**20)
        log.append(step, b"body")
        log.close()
    second = segments(tmp_path)[1]
    second.write_bytes(second.read_bytes().replace(b"TMQSMPL1", b"TMQSMPL2"))
    with capture_logs() as logs:
        assert [one.step for one in SampleLogReader(tmp_path).read()] == [1, 3]
    assert [(line["event"], line["file"], line["format"], line["newest_read"]) for line in logs] == [
        ("samples_of_a_newer_release", second.name, "2", "1")
    ]


def test_the_oldest_go_first(tmp_path: Path, opened: Opened) -> None:
    limit = 2**20
    log, reader = opened(tmp_path, limit), SampleLogReader(tmp_path)
    for step in range(40):
        log.append(step, bytes(limit // 20))
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit + limit // 20 + 24
    steps = [one.step for one in reader.read()]
    assert steps == list(range(steps[0], 40))
    assert 20 - 20 // SEGMENTS - 2 <= len(steps) <= 20


def test_what_is_not_whole_yet_comes_with_a_later_call(tmp_path: Path, opened: Opened) -> None:
    log, reader = opened(tmp_path, 2**20), SampleLogReader(tmp_path)
    log.append(1, b"whole")
    log.append(2, b"under way")
    [path] = segments(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        found = [one.step for one in SampleLogReader(tmp_path).read()]
        assert found == ([1] if length >= 24 + len(b"whole") else [])
    path.write_bytes(data[:-1])
    assert [one.step for one in reader.read()] == [1]
    path.write_bytes(data)
    assert [one.body for one in reader.read()] == [b"under way"]


def test_a_record_torn_by_a_kill_hides_nothing_of_the_next_process(tmp_path: Path, opened: Opened) -> None:
    log = opened(tmp_path, 2**20)
    log.append(1, b"body")
    [path] = segments(tmp_path)
    path.write_bytes(path.read_bytes() + b"TMQSMPL1 torn in the header's mid")
    after = opened(tmp_path, 2**20)
    after.append(2, b"body")
    reader = SampleLogReader(tmp_path)
    assert [one.step for one in reader.read()] == [1, 2]
    after.append(3, b"body")
    assert [one.step for one in reader.read()] == [3]


def test_a_record_that_does_not_fit_is_an_error_and_hides_no_later_record(tmp_path: Path, opened: Opened) -> None:
    log = opened(tmp_path, 2**20)
    log.append(1, b"body")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, hard))  # of the next record only the first part fits
    try:
        with pytest.raises(OSError, match="File too large"):
            log.append(2, bytes(2**13))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append(3, b"body")
    assert [record.step for record in SampleLogReader(tmp_path).read()] == [1, 3]


def test_a_run_begun_anew_is_read_from_its_beginning(tmp_path: Path, opened: Opened) -> None:
    log, reader = opened(tmp_path, 2**20), SampleLogReader(tmp_path)
    log.append(1, b"a long body")
    assert [one.step for one in reader.read()] == [1]
    [path] = segments(tmp_path)
    path.unlink()
    again = opened(tmp_path, 2**20)
    again.append(2, b"short")
    assert [path.name] == [one.name for one in segments(tmp_path)]
    assert [one.step for one in reader.read()] == [2]


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


def test_a_large_set_is_kept_as_far_as_there_is_room_and_the_rest_is_counted(tmp_path: Path) -> None:
    EvaluationLog(tmp_path, 2**16).append(evaluation(0, count=1000, text="é" * 50))
    [found] = read_evaluations(tmp_path)
    assert 10 < len(found.questions) < 1000
    assert len(found.questions) + found.left_out == 1000
    assert [one.task for one in found.questions] == list(range(len(found.questions)))


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    strange = SampleLog(tmp_path / "evaluations", 2**20)
    strange.append(0, b"\xff{")
    strange.append(1, b'{"set": "s", "label": 1, "questions": [], "of_a_later_release": 5}')
    strange.close()
    assert [(one.set, one.label) for one in read_evaluations(tmp_path)] == [("s", 1)]


def test_small_ones_are_bounded_by_their_number(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path, 2**24)
    for label in range(3):
        log.append(evaluation(label))
    last = segments(tmp_path / "evaluations")[-1]
    for number in range(4, MOST_EVALUATIONS + 4):  # as if there had been so many more
        shutil.copy(last, last.with_stem(f"{number:0{len(last.stem)}}"))
    log.append(evaluation(5))
    assert len(segments(tmp_path / "evaluations")) == MOST_EVALUATIONS
    assert [one.label for one in read_evaluations(tmp_path)] == [2, 5]


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    EvaluationLog(tmp_path, 0).append(evaluation(0))
    assert not (tmp_path / "evaluations").exists()
    assert read_evaluations(tmp_path) == []
