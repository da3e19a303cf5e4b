"""Workflow of sessions recorded by a gateway: run ``r`` is session ``r`` of the task. The model is not asked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trinity_mq.config.modes.gateway import Merge, SharedPrefix
from trinity_mq.experience import Experience
from trinity_mq.messages import DecodeError, SessionCall, decode
from trinity_mq.workflows.sessions.assembly import session_experiences, session_metrics
from trinity_mq.workflows.workflow import TaskError, Workflow


class RecordedSession(BaseModel):
    """A session in a task's record."""

    model_config = ConfigDict(frozen=True)

    id: str
    calls: list[bytes]
    """Encoded messages of kind ``session_call``."""
    reward: float | None = None
    call_rewards: list[tuple[str, int | None, float]] = Field(default_factory=list)
    lineage_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of lineages, by the id of any call of the lineage."""
    metrics: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)


class RecordedSessions(BaseModel):
    """The record of a task with recorded sessions."""

    model_config = ConfigDict(frozen=True)

    sessions: list[RecordedSession]
    merge: Merge = "renderer"
    turn_discount: float = 1.0
    shared_prefix: SharedPrefix = "first"


class RecordedSessionsWorkflow(Workflow):
    """Converts recorded sessions into experiences."""

    is_async = True
    can_repeat = True

    async def run_async(self) -> list[Experience]:
        """Return the experiences of all runs of the slice.

        Raises:
            TaskError: The record holds no session for a run, or a session that cannot be read.
        """
        try:
            record = RecordedSessions.model_validate(self.task.raw_task)
        except ValidationError as error:
            first = error.errors()[0]
            raise TaskError(
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}; wanted sessions of a gateway"
            ) from error
        experiences: list[Experience] = []
        for run in range(self.run_id_base, self.run_id_base + self.repeat_times):
            if run >= len(record.sessions):
                raise TaskError(f"the task has {len(record.sessions)} sessions, wanted one for run {run}")
            experiences += _experiences(record, record.sessions[run], run)
        return experiences


def _experiences(record: RecordedSessions, session: RecordedSession, run: int) -> list[Experience]:
    try:
        calls = [decode(body, SessionCall) for body in session.calls]
        experiences = session_experiences(
            calls,
            reward=session.reward,
            call_rewards={(call, choice): reward for call, choice, reward in session.call_rewards},
            merge=record.merge,
            turn_discount=record.turn_discount,
            lineage_rewards=session.lineage_rewards,
            shared_prefix=record.shared_prefix,
        )
    except (DecodeError, ValueError) as error:
        raise TaskError(f"session {session.id}: {error}") from error
    if not experiences:
        raise TaskError(f"session {session.id} has no answer with a reward")
    metrics: dict[str, Any] = session_metrics(calls, len(experiences)) | session.metrics
    for step, experience in enumerate(experiences):
        experience.eid.run, experience.eid.step = run, step
        experience.info |= {"session": session.id, **({"labels": session.labels} if session.labels else {})}
    experiences[-1].metrics |= metrics
    return experiences
