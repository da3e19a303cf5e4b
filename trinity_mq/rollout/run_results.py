"""Accumulates the finished runs of a slice, so that a timeout or a cancellation keeps partial results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_mq.experience import Experience
from trinity_mq.messages import Version
from trinity_mq.messages.tasks import MOST_ANSWER, MOST_ANSWERS, TRUTH
from trinity_mq.rewards.ground_truth import expected_answer, truncate_middle
from trinity_mq.rollout.failures import last_step
from trinity_mq.rollout.status import RunFailure, SliceOutcome
from trinity_mq.telemetry import aggregate_runs
from trinity_mq.workflows import Task


@dataclass
class RunResults:
    """The finished runs of a slice, and the first failure."""

    experiences: dict[int, list[Experience]] = field(default_factory=dict)
    """Experiences by run."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by run."""
    failure: RunFailure | None = None
    """The first failure, even if a later attempt at the run finished. None: no failure."""
    on_run: Callable[[int], None] | None = None
    """Called with the number of each run when the run is finished."""

    def add_failure(self, failure: RunFailure) -> None:
        """Store ``failure``, unless an earlier failure is stored."""
        self.failure = self.failure or failure

    def finished(self, task: Task, run: int, experiences: list[Experience], seconds: float) -> None:
        """Add ids, taskset, ground truth and model version to the experiences of ``run``, which took ``seconds``, and
        store them with the run's metrics.
        """
        taskset, index = task.index.get("taskset"), task.index.get("index")
        truth = expected_answer(task.truth)
        last = last_step(experiences)
        for experience in experiences:
            eid = experience.eid
            eid.batch, eid.run, eid.task = task.batch_id, run, task.task_id if eid.task == "" else eid.task
            if experience.taskset is None and isinstance(taskset, str):
                experience.taskset = taskset
            if experience.index is None and isinstance(index, int):
                experience.index = index
            if (oldest := experience.version_min) is not None:
                experience.info = {**(experience.info or {}), "model_version": oldest[1]}
            if truth is not None:
                experience.info = {TRUTH: truth, **(experience.info or {})}
        metrics = {"response_tokens:sum": float(sum(experience.response_length for experience in experiences))}
        if last.reward is not None:
            metrics["reward"] = last.reward
        if reported := [experience.metrics for experience in experiences if experience.metrics]:
            metrics |= aggregate_runs(reported)
        metrics["time/run_execution"] = seconds
        self.keep(run, experiences, metrics)

    def keep(self, run: int, experiences: list[Experience], metrics: dict[str, float]) -> None:
        """Store a finished run without changes."""
        self.experiences[run] = experiences
        self.metrics[run] = metrics
        if self.on_run is not None:
            self.on_run(run)

    def outcome(self, seconds: float) -> SliceOutcome:
        """Return the finished runs as the outcome of a slice that took ``seconds``."""
        runs = sorted(self.experiences)
        experiences = [experience for run in runs for experience in self.experiences[run]]
        versions: set[Version] = {(row[1], row[2]) for experience in experiences for row in experience.versions or ()}
        return SliceOutcome(
            experiences=experiences,
            runs=runs,
            metrics=[self.metrics[run] for run in runs],
            message=None if self.failure is None else self.failure.message,
            failure_kind=None if self.failure is None else self.failure.kind,
            retryable=self.failure is None or self.failure.retryable,
            version_min=min(versions, default=None),
            version_max=max(versions, default=None),
            seconds=seconds,
        )


def answer_texts(outcome: SliceOutcome) -> list[str]:
    """Return the answers of the first :data:`MOST_ANSWERS` finished runs of a slice, for a person: the text of the last
    workflow step of each run, shortened to :data:`MOST_ANSWER` characters.
    """
    by_run = defaultdict[int, list[Experience]](list)
    for experience in outcome.experiences:
        by_run[experience.eid.run].append(experience)
    return [
        truncate_middle(_text_of(last_step(by_run[run])) if run in by_run else "", MOST_ANSWER)
        for run in outcome.runs[:MOST_ANSWERS]
    ]


def _text_of(experience: Experience) -> str:
    if experience.response_text is not None:
        return experience.response_text
    contents = (
        message.get("content") for message in reversed(experience.messages or ()) if message.get("role") == "assistant"
    )
    return next((text for text in contents if isinstance(text, str)), "")
