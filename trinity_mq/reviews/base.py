"""Interface through which operators ask reviewers questions and get answers within a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trinity_mq.messages import ReviewedCall, Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, with a reward if the verdict sets one."""

    verdict: Verdict = "keep"
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a reviewer: whether to keep a run of a task."""

    uid: str
    """Id of the last experience of the run. It identifies the question within a batch."""
    calls: Sequence[ReviewedCall] = ()
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reasons: Sequence[str] = ()
    expected: str | None = None
    """Expected answer of the task."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Decision about a question."""

    decision: Decision
    timed_out: bool = False
    """True if nobody answered in time. The decision is then the default."""
    by: str = ""
    note: str = ""


class Reviews(Protocol):
    """Asks reviewers about runs of the batch that is being processed."""

    async def ask(self, questions: Sequence[Question], *, seconds: float, default: Decision) -> list[Answer]:
        """Return an answer to each question, in the order of the questions.

        The time counts from the first time that a question was asked. An operator that replaces a killed operator asks
        the same questions, finds the verdicts given since, and waits for the remaining time.

        Args:
            questions: Runs of the current batch.
            seconds: Maximum wait in seconds. It also applies while the broker is unreachable; after it, the default
                counts.
            default: Decision that counts if nobody answers in time.
        """
