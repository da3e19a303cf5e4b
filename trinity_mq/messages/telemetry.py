"""Heartbeats, metrics and control events. A heartbeat carries the whole state, so a lost heartbeat delays news by one
interval only.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_serializer, field_validator

from trinity_mq.messages.base import Message, SchemaRange
from trinity_mq.messages.status import STATUS_BY_ROLE, AgentStatus, AnyStatus
from trinity_mq.release import FIRST
from trinity_mq.roles import Role


def _status_class(fields: dict[str, Any]) -> type[AnyStatus]:
    return STATUS_BY_ROLE.get(fields.get("role", "supervisor"), AgentStatus)


class Heartbeat(Message):
    """An agent's state, sent every two seconds and on each change."""

    model_config = ConfigDict(title="Beat")
    kind: ClassVar[str] = "beat"

    role: Role
    id: str
    seq: int
    """Rises with each heartbeat of this process."""
    incarnation: str
    """Identifies the process: a new value means that the agent was restarted."""
    lease: float
    """Seconds without a heartbeat after which the agent counts as dead."""
    state: str
    """``starting``, ``working``, ``idle``, ``holding``, ``paused``, ``draining``, ``finished`` or ``gone``."""
    waits_for: str | None = None
    """Condition that the agent waits for, in plain text; null while it works."""
    waits_seconds: float = 0.0
    """Seconds that the agent has waited for this condition."""
    foreign: int = 0
    """Messages of another run of the same name that the agent has dropped since it started."""
    release: str = FIRST
    """Release of trinity-mq that the agent runs; release 0.1.0 omits the field."""
    reads: SchemaRange = (1, 1)
    """Oldest and newest message schema that the agent reads; see docs/upgrading.md."""
    writes: int = 1
    """Message schema that the agent writes."""
    uptime: float | None = None
    """Seconds since the agent's first heartbeat; null: unknown, as for release 0.1.0."""
    detail: AnyStatus = Field(default_factory=lambda fields: _status_class(fields)())
    """The status of the agent's role."""

    @property
    def has_ended(self) -> bool:
        """True if the agent has ended, so that no further heartbeat is expected."""
        return self.state in {"finished", "gone"}

    @field_validator("detail", mode="before")
    @classmethod
    def _parse_detail(cls, detail: Any, info: ValidationInfo) -> AgentStatus:
        try:
            return _status_class(info.data).model_validate(detail)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'detail'}: {first['msg']}") from error

    @field_serializer("detail")
    def _dump_detail(self, detail: AgentStatus) -> dict[str, Any]:
        return detail.as_map()


class Metrics(Message):
    """Metric values of one step of one agent."""

    kind: ClassVar[str] = "metrics"

    role: Role
    id: str
    step: int
    values: dict[str, float]


class ControlEvent(Message):
    """A command to one agent (``target``) or to all agents of a role."""

    kind: ClassVar[str] = "control_event"

    verb: Literal["restart", "drain", "pause", "resume"]
    target: str
    reason: str = ""
