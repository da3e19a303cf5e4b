"""Marked points: moments of a running run that its messages show, or that are inside agents. Pure logic: messages in,
names of points out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trinity_mq.messages import (
    BatchClosed,
    BatchReady,
    ExplorerStatus,
    Heartbeat,
    Progress,
    RunnerStatus,
    SessionCall,
    SessionsDecided,
    SessionsTrained,
    SyncEvent,
    TaskResult,
    TaskResults,
)


@dataclass(frozen=True)
class Point:
    """A moment that messages show and at which a fault is likely to cause damage."""

    text: str
    """Description of the moment."""
    roles: tuple[str, ...]
    """Roles that are in the middle of work at this moment, or that hold work for the next role."""


POINTS: Mapping[str, Point] = {
    "batch_opened": Point("a batch was opened, its slices are on their way", ("explorer", "runner", "broker")),
    "slices_in_flight": Point("a runner has slices in hand", ("runner", "engine", "broker")),
    "result_published": Point("a slice's result is published, its batch is still open", ("runner", "explorer")),
    "batch_closed": Point(
        "a batch's manifest is published, its batch_ready is not", ("explorer", "operator", "broker")
    ),
    "chunk_published": Point("a processed chunk is published, its batch_ready is not", ("operator", "broker")),
    "batch_ready": Point("a batch is ready, the trainer has not trained on it", ("operator", "trainer", "broker")),
    "step_done": Point("the trainer has consumed a batch", ("trainer", "explorer")),
    "sync_prepare": Point("a sync was announced, engines pause", ("trainer", "engine", "explorer")),
    "sync_go": Point("all engines are ready, weights travel", ("trainer", "engine", "explorer", "broker")),
    "sync_applied": Point("an engine holds new weights that are not committed", ("trainer", "engine", "explorer")),
    "sync_commit": Point("a version was just committed", ("trainer", "engine", "runner", "explorer")),
    "evaluating": Point("an evaluation was asked for or began", ("explorer", "engine", "runner")),
    "agent_back": Point("an agent that had died is back", ("explorer", "runner", "operator", "trainer", "gateway")),
    "session_answered": Point("an answer of a session is on its stream, its client may not have it", ("gateway",)),
    "sessions_decided": Point("sessions are decided, their task is not submitted", ("gateway",)),
    "sessions_trained": Point("sessions were reported as trained", ("gateway",)),
}


@dataclass(frozen=True)
class InsidePoint:
    """A moment inside an agent that is not visible in messages. The agent stops itself there
    (:mod:`trinity_mq.runtime.processes.chaos_points`).
    """

    text: str
    """Description of the moment."""
    role: str
    """The role that passes the point."""
    passed: str
    """Name of the point in the agent: ``confirmed KIND``, ``acknowledging KIND``, or a name defined by the agent."""


INSIDE: Mapping[str, InsidePoint] = {
    "parts_confirmed": InsidePoint("parts are confirmed, their result is not", "runner", "confirmed experience_part"),
    "result_confirmed": InsidePoint(
        "a result is confirmed, its slice unacknowledged", "runner", "confirmed task_result"
    ),
    "slice_unacknowledged": InsidePoint("a slice is about to be acknowledged", "runner", "acknowledging task_slice"),
    "chunk_confirmed": InsidePoint(
        "a chunk is confirmed, its batch_ready is not", "operator", "confirmed experience_chunk"
    ),
    "ready_confirmed": InsidePoint(
        "a batch_ready is confirmed, its manifest unacknowledged", "operator", "confirmed batch_ready"
    ),
    "manifest_unacknowledged": InsidePoint(
        "a manifest is about to be acknowledged", "operator", "acknowledging batch_closed"
    ),
    "submission_unacknowledged": InsidePoint(
        "a submission is saved and not acknowledged", "explorer", "acknowledging task_submission"
    ),
    "slices_confirmed": InsidePoint("slices are confirmed", "explorer", "confirmed task_slice"),
    "manifest_confirmed": InsidePoint("a manifest is confirmed", "explorer", "confirmed batch_closed"),
    "outcome_confirmed": InsidePoint(
        "a submission's outcome is confirmed, and not noted", "explorer", "confirmed submission_outcome"
    ),
    "progress_confirmed": InsidePoint("progress is confirmed, its checkpoint is not", "trainer", "confirmed progress"),
    "checkpoint_saved": InsidePoint("a checkpoint is written, no message reports it", "trainer", "saved checkpoint"),
    "opened_confirmed": InsidePoint(
        "a session's beginning is confirmed, its client has no answer", "gateway", "confirmed session_opened"
    ),
    "answer_confirmed": InsidePoint("an answer is confirmed, its client has none", "gateway", "confirmed session_call"),
    "reward_confirmed": InsidePoint(
        "a reward is confirmed, its client has no answer", "gateway", "confirmed session_reward"
    ),
    "end_confirmed": InsidePoint("an end is confirmed, its client has no answer", "gateway", "confirmed session_end"),
    "decision_confirmed": InsidePoint(
        "a decision is confirmed, its task is not submitted", "gateway", "confirmed sessions_decided"
    ),
    "task_confirmed": InsidePoint("a session's task is confirmed", "gateway", "confirmed task_submission"),
    "trained_confirmed": InsidePoint(
        "the trainer's report on sessions is confirmed", "gateway", "confirmed sessions_trained"
    ),
}
"""Points inside agents by name. Most are between the confirm of a publish and the acknowledgement of the delivery that
caused it."""
SYNC_POINTS = {"prepare": "sync_prepare", "go": "sync_go", "applied": "sync_applied", "commit": "sync_commit"}

SHOWN_BY: Mapping[type, str] = {
    TaskResult: "result_published",
    TaskResults: "result_published",
    BatchClosed: "batch_closed",
    BatchReady: "batch_ready",
    Progress: "step_done",
    SessionCall: "session_answered",
    SessionsDecided: "sessions_decided",
    SessionsTrained: "sessions_trained",
}
"""Points by the type of the message that shows them. Sync events, heartbeats and chunks show further points."""


class PointWatch:
    """Names the marked points that messages show. A repeated sync event, and a further chunk of the same processing, do
    not count again.
    """

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        """Occurrences so far, by point."""
        self._opened: int | None = None
        self._evaluating: int | None = None
        self._incarnations: dict[str, str] = {}
        self._processings: set[tuple[object, object]] = set()
        self._last_sync: dict[str, object] = {}

    def receive(self, message: object) -> list[str]:
        """Count and return the points that a decoded message shows."""
        return self._counted(self._of(message))

    def receive_chunk(self, ticket: object, processing: object) -> list[str]:
        """Count and return the point that the first chunk of a processed batch shows; an empty list for the other
        chunks. ``ticket`` and ``processing`` come from the chunk's headers.
        """
        if (ticket, processing) in self._processings:
            return []
        self._processings.add((ticket, processing))
        return self._counted(["chunk_published"])

    def _counted(self, names: list[str]) -> list[str]:
        self.passed.update(names)
        return names

    def _of(self, message: object) -> list[str]:
        match message:
            case SyncEvent():
                return self._of_sync(message)
            case Heartbeat():
                return list(self._of_heartbeat(message))
        return [SHOWN_BY[type(message)]] if type(message) in SHOWN_BY else []

    def _of_sync(self, event: SyncEvent) -> list[str]:
        name = SYNC_POINTS.get(event.verb)
        key = (event.sender, event.version, event.epoch, event.attempt)
        if name is None or self._last_sync.get(name) == key:  # the gate repeats its events until they are answered
            return []
        self._last_sync[name] = key
        return [name]

    def _of_heartbeat(self, beat: Heartbeat) -> Iterator[str]:
        before = self._incarnations.get(beat.id)
        self._incarnations[beat.id] = beat.incarnation
        if before not in {None, beat.incarnation}:
            yield "agent_back"
        status = beat.detail
        if isinstance(status, RunnerStatus) and status.running:
            yield "slices_in_flight"
        if not isinstance(status, ExplorerStatus) or not status.run_id:
            return
        if self._opened is not None and status.opened > self._opened:
            yield "batch_opened"
        self._opened = status.opened
        if status.evaluating is not None and status.evaluating != self._evaluating:
            yield "evaluating"
        self._evaluating = status.evaluating


def points_for(role: str) -> list[str]:
    """Return the names of the points at which a fault of ``role`` is useful, in the table's order."""
    return [name for name, point in POINTS.items() if role in point.roles]


def inside_points_for(role: str) -> list[str]:
    """Return the names of the points inside the agents of ``role``, in the table's order."""
    return [name for name, point in INSIDE.items() if point.role == role]
