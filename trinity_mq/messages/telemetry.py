"""Beats, metrics and control events: state travels as level, so a lost one costs one beat."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from trinity_mq.messages.base import Message

Role = Literal["explorer", "scheduler", "runner", "operator", "trainer", "engine", "supervisor"]


class Heartbeat(Message):
    """An agent's state, every two seconds and on change."""

    model_config = ConfigDict(title="Beat")
    kind: ClassVar[str] = "beat"

    role: Role
    id: str
    seq: int
    """Rises with each beat of this process."""
    incarnation: str
    """Born with the process: a new one means the agent was restarted."""
    lease: float
    """Seconds after which, without another beat, the agent is taken for dead."""
    state: str
    """starting, working, idle, holding, paused, draining, finished."""
    waits_for: str | None = None
    waits_seconds: float = 0.0
    detail: dict[str, Any] = Field(default_factory=dict)


class Metrics(Message):
    """Metric values of one step of one agent."""

    kind: ClassVar[str] = "metrics"

    role: Role
    id: str
    step: int
    values: dict[str, float]


class ControlEvent(Message):
    """A command to one agent (``target``) or to all of a role."""

    kind: ClassVar[str] = "control_event"

    verb: Literal["restart", "drain", "pause", "resume"]
    target: str
    reason: str = ""
