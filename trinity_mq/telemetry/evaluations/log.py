"""Answers to the questions of evaluations, stored in the folder of a run. Each evaluation of a set is a record.

The records are in a sample log (:mod:`trinity_mq.telemetry.sample_log`), so their size is bounded and the oldest
records are removed first. The body of a record is JSON.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from trinity_mq.telemetry.sample_log import SEGMENTS, SampleLog, SampleLogReader, segments

EVALUATIONS_FOLDER = "evaluations"
MOST_EVALUATIONS = 1000
"""Maximum number of stored evaluations, whatever their size."""


class EvaluationAnswer(BaseModel):
    """Answer of a single rollout run to a question."""

    run: int = 0
    answer: str | None = None
    """Text of the answer. The middle of a long answer is cut out. None: not stored."""
    reward: float | None = None
    accuracy: float | None = None


class EvaluationQuestion(BaseModel):
    """A question of a set, and its answers."""

    task: int = 0
    """Index in the set, from 0."""
    question: str = ""
    expected: str | None = None
    """Expected answer. None: unknown."""
    answers: list[EvaluationAnswer] = Field(default_factory=list)
    """Answers of the rollout runs that finished."""
    failure: str | None = None
    """First failure message. None: no failure."""


class Evaluation(BaseModel):
    """A single evaluation of a set."""

    set: str = ""
    label: int = 0
    """Number of closed batches before the evaluation. In mode ``bench``, the number of batches that the checkpoint was
    trained on."""
    time: float = 0.0
    """End of the evaluation in seconds since the epoch."""
    questions: list[EvaluationQuestion] = Field(default_factory=list)
    """First questions of the set, as many as fit into a record."""
    left_out: int = 0
    """Number of further questions of the set, which are not stored."""


class EvaluationLog:
    """Writes evaluations. Only one process may write at a time.

    Args:
        run_dir: Folder of the run.
        max_bytes: Maximum bytes of the whole log. 0: nothing is stored.
    """

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self._most = max_bytes // SEGMENTS
        self._folder = run_dir / EVALUATIONS_FOLDER
        self._log = SampleLog(self._folder, max_bytes)

    def append(self, evaluation: Evaluation) -> None:
        """Append an evaluation, with as many of its questions as fit into a record. Of more than
        :data:`MOST_EVALUATIONS` stored evaluations, remove the oldest.

        Raises:
            OSError: The disk is full, or the folder is not writable.
        """
        if not self._most:
            return
        body = bounded(evaluation, self._most).model_dump_json(exclude_none=True)
        try:
            self._log.append(evaluation.label, body.encode())
        finally:
            self._log.close()  # evaluations are rare, and each has its own file
        for path in segments(self._folder)[:-MOST_EVALUATIONS]:
            path.unlink(missing_ok=True)


def bounded(evaluation: Evaluation, most: int) -> Evaluation:
    """Return the evaluation with only its first questions, as many as fit into ``most`` bytes."""
    size = fitting = 0
    for question in evaluation.questions:
        size += len(question.model_dump_json(exclude_none=True).encode()) + 1
        if size > most:
            break
        fitting += 1
    left_out = evaluation.left_out + len(evaluation.questions) - fitting
    return evaluation.model_copy(update={"questions": evaluation.questions[:fitting], "left_out": left_out})


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations in the folder of a run, ordered by set and label. If an evaluation was repeated, the later
    record counts. Unreadable records are skipped.

    Raises:
        OSError: The folder cannot be read.
    """
    by_set_and_label: dict[tuple[str, int], Evaluation] = {}
    for record in SampleLogReader(run_dir / EVALUATIONS_FOLDER).read():
        try:
            evaluation = Evaluation.model_validate_json(record.body)
        except ValidationError:  # from a release with another format
            continue
        by_set_and_label[evaluation.set, evaluation.label] = evaluation
    return [by_set_and_label[key] for key in sorted(by_set_and_label)]
