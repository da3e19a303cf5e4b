"""Answers to the questions of evaluations, kept in a run's folder: one record for each evaluation of a set.

They are in a log of samples (:mod:`trinity_mq.telemetry.sample_log`), so they are bounded and the oldest go first. The
body of a record is JSON.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from trinity_mq.telemetry.sample_log import SEGMENTS, SampleLog, SampleLogReader, segments

EVALUATIONS_FOLDER = "evaluations"
MOST_EVALUATIONS = 1000
"""Evaluations that are kept, however small they are."""


class Answer(BaseModel):
    """One run of a question."""

    run: int = 0
    answer: str | None = None
    """Its text, a long one without its middle; None: not kept."""
    reward: float | None = None
    accuracy: float | None = None


class Question(BaseModel):
    """One question of a set, and the answers to it."""

    task: int = 0
    """Its number in the set, from 0."""
    question: str = ""
    expected: str | None = None
    """The expected answer; None: not known."""
    answers: list[Answer] = Field(default_factory=list)
    """Answers of the runs that finished."""
    failure: str | None = None
    """The first thing that went wrong."""


class Evaluation(BaseModel):
    """One evaluation of one set."""

    set: str = ""
    label: int = 0
    """Closed batches before it; in mode ``bench`` the train step of the checkpoint."""
    time: float = 0.0
    """Seconds since the epoch at its end."""
    questions: list[Question] = Field(default_factory=list)
    """The first questions of the set, as many as a record has room for."""
    left_out: int = 0
    """Further questions of the set, which are not kept."""


class EvaluationLog:
    """Writes evaluations. One process writes at a time.

    Args:
        run_dir: The run's folder.
        max_bytes: Bytes of the whole log; 0: nothing is kept.
    """

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self._most = max_bytes // SEGMENTS
        self._folder = run_dir / EVALUATIONS_FOLDER
        self._log = SampleLog(self._folder, max_bytes)

    def append(self, evaluation: Evaluation) -> None:
        """Append an evaluation, with as many of its questions as a record has room for.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        if not self._most:
            return
        body = bounded(evaluation, self._most).model_dump_json(exclude_none=True)
        try:
            self._log.append(evaluation.label, body.encode())
        finally:
            self._log.close()  # they are rare, and a file for each
        for path in segments(self._folder)[:-MOST_EVALUATIONS]:
            path.unlink(missing_ok=True)


def bounded(evaluation: Evaluation, most: int) -> Evaluation:
    """Return an evaluation with its first questions, which together take at most ``most`` bytes."""
    size = kept = 0
    for question in evaluation.questions:
        size += len(question.model_dump_json(exclude_none=True).encode()) + 1
        if size > most:
            break
        kept += 1
    left_out = evaluation.left_out + len(evaluation.questions) - kept
    return evaluation.model_copy(update={"questions": evaluation.questions[:kept], "left_out": left_out})


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations kept in a run's folder, in the order of sets and labels; of one that was done twice, the
    later one. Records that cannot be read are left out.

    Raises:
        OSError: The folder cannot be read.
    """
    found: dict[tuple[str, int], Evaluation] = {}
    for record in SampleLogReader(run_dir / EVALUATIONS_FOLDER).read():
        try:
            one = Evaluation.model_validate_json(record.body)
        except ValidationError:  # of a release that writes something else
            continue
        found[one.set, one.label] = one
    return [found[key] for key in sorted(found)]
