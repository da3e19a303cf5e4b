"""Request bodies of the session routes, and the response body that describes a session."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trinity_mq.gateway.lineages import BREAK_CAUSES
from trinity_mq.gateway.rules import Metrics, Reward
from trinity_mq.gateway.session import Session
from trinity_mq.messages import SessionReplay
from trinity_mq.messages.sessions import LONGEST_LABEL, KeyScope, Record

MAX_LABELS = 32
MAX_MESSAGES = 10_000
MAX_SECONDS = 1e9
"""Maximum time limit of a session in seconds, about thirty years."""
MAX_CHOICES = 4096
Text = Annotated[str, Field(max_length=LONGEST_LABEL)]


class Body(BaseModel):
    """Base class of request bodies. Unknown fields are an error."""

    model_config = ConfigDict(extra="forbid")


class OpenBody(Body):
    """Request body of ``POST /sessions``."""

    task: dict[str, Any] = Field(default_factory=dict)
    group: str = Field(default="", max_length=LONGEST_LABEL)
    group_size: int | None = Field(default=None, ge=1, le=4096)
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=MAX_LABELS)
    ttl: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """Seconds to wait for a reward after the end of the session. None: the default of the settings."""
    idle_ttl: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    record: Record = "train"
    scopes: list[KeyScope] | None = Field(default=None, max_length=MAX_LABELS)


class RewardBody(Body):
    """Request body of ``POST /s/<id>/reward``."""

    reward: Reward
    call: Text | Annotated[int, Field(ge=-MAX_MESSAGES, le=MAX_MESSAGES)] | None = None
    choice: int | None = Field(default=None, ge=0, le=MAX_CHOICES)
    lineage: Text | None = None
    """Id of any call of the lineage that is rewarded."""
    how: Literal["replace", "add"] = "replace"
    key: str = Field(default="", max_length=LONGEST_LABEL)
    """Idempotency key: of several rewards of the session with the same key, only the first counts."""
    metrics: Metrics = Field(default_factory=dict)
    final: bool = False


class EndBody(Body):
    """Request body of ``POST /s/<id>/end``."""

    outcome: Literal["done", "failed", "discard"] = "done"
    reward: Reward | None = None
    metrics: Metrics = Field(default_factory=dict)
    replay: SessionReplay | None = None
    reason: str = Field(default="", max_length=1000)


class FeedbackBody(Body):
    """Request body of ``POST /feedback``, in the format of Trinity-RFT."""

    reward: Reward
    msg_ids: list[Text] = Field(min_length=1, max_length=MAX_MESSAGES)
    task_id: int | Text = ""
    run_id: int | Text = 0


def shown(session: Session) -> dict[str, Any]:
    """Return the description of a session, the response body of ``GET /s/<id>``."""
    opened = session.opened
    description: dict[str, Any] = {
        "id": session.id,
        "state": session.state,
        "why": session.why or None,
        "calls": session.asked,
        "sampled_tokens": session.sampled_tokens,
        "reward": session.reward,
        "call_rewards": [
            {"call": call, "choice": choice, "reward": value} for (call, choice), value in session.call_rewards.items()
        ],
        "lineages": [
            {
                "id": lineage.calls[0],
                "parent": lineage.parent,
                "calls": lineage.calls,
                "tokens": lineage.tokens,
                "reward": session.reward_of(lineage),
            }
            for lineage in session.lineages
        ],
        "metrics": session.metrics,
        "group": session.group or None,
        "labels": {} if opened is None else opened.labels,
        "record": None if opened is None else opened.record,
        "sampled_out": opened is not None and opened.sampled_out,
        "call_ids": list(session.calls),
        "breaks": [call.break_cause for call in session.calls.values() if call.break_cause in BREAK_CAUSES],
        "ties": sum(call.tied for call in session.calls.values()),
        "malformed_calls": sum(choice.malformed_calls for call in session.calls.values() for choice in call.choices),
        "versions": sorted(
            {row[1:] for call in session.calls.values() for sampled in call.choices for row in sampled.versions}
        ),
    }
    if session.batch is not None:
        description |= {"batch": session.batch.batch, "ticket": session.batch.ticket}
    if session.state == "trained" and session.trained is not None:
        description["trained"] = {"generation": session.trained.generation, "step": session.trained.step}
    return description
