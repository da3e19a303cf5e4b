"""Human review: the request for a person's verdict on a run of a task, the verdict, and the final decision.

All of these messages are on one stream, ``tmq.<run>.review``. Any program may publish verdicts there, as JSON or
MessagePack with the routing key ``verdict``.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trinity_mq.messages.base import BatchId, Message

Verdict = Literal["keep", "drop", "reward"]
"""``keep`` the run unchanged, ``drop`` it, or replace its ``reward``."""
REVIEW_ID = r"^[0-9a-f]{16}$"
LONGEST_NAME = 200
"""Maximum characters of the name of the verdict's author."""
LONGEST_NOTE = 2000
"""Maximum characters of the note on a verdict."""


class ReviewedCall(BaseModel):
    """One step of a run: the prompt and the model's response."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    prompt: str = ""
    response: str = ""
    reward: float | None = None
    truncated: bool = False
    """True if the answer reached its token limit."""


class ReviewRequest(Message):
    """A run of a task waits for a verdict until ``deadline``. The first request with an id counts."""

    kind: ClassVar[str] = "review_request"

    request: str = Field(pattern=REVIEW_ID)
    """Id derived from the ticket and the experience, so that a repeated request has the same id."""
    batch: BatchId
    ticket: str
    uid: str
    """Id of the last experience of the run: ``batch/task/run/step/suffix``."""
    calls: list[ReviewedCall] = Field(default_factory=list)
    """The steps of the run, in order."""
    expected: str | None = None
    """The expected answer of the task; null: unknown."""
    reward: float | None = None
    """Reward of the run: the reward of its last step."""
    parts: dict[str, float] = Field(default_factory=dict)
    """Metrics that came with the reward, such as its component scores."""
    reasons: list[str] = Field(default_factory=list)
    """Why the run was selected for review, one line for each reason."""
    asked: float
    """Time of the request in seconds since the epoch."""
    deadline: float
    """Time at which the default takes effect, in seconds since the epoch."""
    default: Verdict = "keep"
    """Verdict that takes effect if none arrives in time."""
    default_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The new reward if ``default`` is ``reward``."""


class ReviewVerdict(Message):
    """A verdict on a run that waits for review. The first verdict on a request counts; later verdicts are refused."""

    kind: ClassVar[str] = "review_verdict"

    request: str = Field(pattern=REVIEW_ID)
    verdict: Verdict
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """The new reward for the verdict ``reward``; null for the other verdicts."""
    by: str = Field(default="", max_length=LONGEST_NAME)
    """Name of the person or program that gave the verdict."""
    note: str = Field(default="", max_length=LONGEST_NOTE)
    """Free text for people."""

    @model_validator(mode="after")
    def _has_its_reward(self) -> Self:
        if (self.verdict == "reward") != (self.reward is not None):
            raise ValueError(
                f"verdict is {self.verdict!r} and reward {self.reward}: the verdict 'reward' needs a number, the "
                "others none"
            )
        return self


class ReviewClosed(Message):
    """The decision about a request. The first decision counts; later verdicts have no effect."""

    kind: ClassVar[str] = "review_closed"

    request: str = Field(pattern=REVIEW_ID)
    batch: BatchId
    ticket: str
    verdict: Verdict
    reward: float | None = Field(default=None, allow_inf_nan=False)
    how: Literal["verdict", "timeout"]
    """``verdict``: a person or program gave the verdict. ``timeout``: the deadline passed, and the default took
    effect."""
    by: str = ""
    note: str = ""
