"""Human review: a run of a task that waits for a person's verdict, the verdict, and what counted in the end.

All of them are on one stream, ``tmq.<run>.review``. Verdicts may be published there by any program, as JSON or
MessagePack, with the routing key ``verdict``.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trinity_mq.messages.base import BatchId, Message

Verdict = Literal["keep", "drop", "reward"]
"""``keep`` the run as it is, ``drop`` it, or give it another ``reward``."""
REVIEW_ID = r"^[0-9a-f]{16}$"
LONGEST_NAME = 200
"""Characters of the name of who gave a verdict."""
LONGEST_NOTE = 2000
"""Characters of the note on a verdict."""


class ReviewedCall(BaseModel):
    """One step of a run: what the model was asked and what it answered."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    prompt: str = ""
    response: str = ""
    reward: float | None = None
    truncated: bool = False
    """The answer reached its limit of tokens."""


class ReviewRequest(Message):
    """A run of a task waits for a verdict, up to ``deadline``. The first request of an id counts."""

    kind: ClassVar[str] = "review_request"

    request: str = Field(pattern=REVIEW_ID)
    """Id that follows from the ticket and the experience, so that a repeated request has the same."""
    batch: BatchId
    ticket: str
    uid: str
    """Id of the last experience of the run: ``batch/task/run/step/suffix``."""
    calls: list[ReviewedCall] = Field(default_factory=list)
    """The steps of the run, in order."""
    expected: str | None = None
    """The expected answer of the task; null: not known."""
    reward: float | None = None
    """Reward of the run, which is that of its last step."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Metrics that came with the reward, such as the scores it was made of."""
    reasons: list[str] = Field(default_factory=list)
    """Why it was chosen, each in one line."""
    asked: float
    """Seconds since the epoch."""
    deadline: float
    """Seconds since the epoch at which the default counts."""
    default: Verdict = "keep"
    """Counts where no verdict comes in time."""
    default_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The reward of the default ``reward``."""


class ReviewVerdict(Message):
    """A verdict on a run that waits for one. The first for a request counts; later ones are refused."""

    kind: ClassVar[str] = "review_verdict"

    request: str = Field(pattern=REVIEW_ID)
    verdict: Verdict
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """The new reward, with the verdict ``reward``; null with the others."""
    by: str = Field(default="", max_length=LONGEST_NAME)
    """Name of the person or program that gave it."""
    note: str = Field(default="", max_length=LONGEST_NOTE)
    """For people."""

    @model_validator(mode="after")
    def _has_its_reward(self) -> Self:
        if (self.verdict == "reward") != (self.reward is not None):
            raise ValueError(
                f"verdict is {self.verdict!r} and reward {self.reward}: the verdict 'reward' needs a number, the "
                "others none"
            )
        return self


class ReviewClosed(Message):
    """The decision about a request. The first one of a request decides it; verdicts after it come too late."""

    kind: ClassVar[str] = "review_closed"

    request: str = Field(pattern=REVIEW_ID)
    batch: BatchId
    ticket: str
    verdict: Verdict
    reward: float | None = Field(default=None, allow_inf_nan=False)
    how: Literal["verdict", "timeout"]
    """``verdict``: somebody gave it. ``timeout``: nobody did in time, and it is the default."""
    by: str = ""
    note: str = ""
