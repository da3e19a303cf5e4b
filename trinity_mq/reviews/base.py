"""The interface by which operators ask people: questions in, answers out, within a bounded time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trinity_mq.messages import ReviewedCall, Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, with its reward where it gives one."""

    verdict: Verdict = "keep"
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A run of a task about which a person is asked."""

    uid: str
    """Id of its last experience, which identifies the question within a batch."""
    calls: Sequence[ReviewedCall] = ()
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    reasons: Sequence[str] = ()
    expected: str | None = None
    """The expected answer of the task."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision about a question."""

    decision: Decision
    timed_out: bool = False
    """Nobody answered in time: it is the default."""
    by: str = ""
    note: str = ""


class Reviews(Protocol):
    """Asks people about runs of the batch that is being processed."""

    async def ask(self, questions: Sequence[Question], *, seconds: float, default: Decision) -> list[Answer]:
        """Return an answer to each question, in their order.

        The time counts from the first time that a question was asked: an operator that takes over from one that was
        killed asks the same questions, finds the verdicts that came meanwhile, and waits for what is left of the time.

        Args:
            questions: Runs of the present batch.
            seconds: Longest wait. With no broker in reach it is the same, and the default counts.
            default: Counts where nobody answers in time.
        """
