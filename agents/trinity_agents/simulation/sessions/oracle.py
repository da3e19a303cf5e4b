"""Sessions computed from the whole log of their stream, by the rules of docs/protocol.md and docs/serving.md and
without the library's code. Gateways, which read only the part that retention has left, are compared with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trinity_agents.simulation.sessions.gateways import answer_number
from trinity_mq.bus.memory.queues import Stored
from trinity_mq.messages import (
    DecodeError,
    Message,
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReward,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
    decode,
    decode_any,
)
from trinity_mq.workflows.sessions.assembly import superseded_calls

OUTSIDE: Mapping[str, type[Message]] = {"session_reward": SessionReward, "session_end": SessionEnd}
"""Kinds that programs other than gateways may publish."""
Event = SessionCall | SessionReward | SessionEnd


@dataclass
class OracleSession:
    """A session."""

    id: str
    opened: SessionOpened
    began: int
    """Offset of the event that opened the session."""
    calls: dict[str, SessionCall] = field(default_factory=dict)
    reward: float | None = None
    call_rewards: dict[str, float] = field(default_factory=dict)
    accepted: list[float] = field(default_factory=list)
    """Accepted rewards in order."""
    ends: list[str] = field(default_factory=list)
    """Outcomes of its end events in order."""
    decided: SessionsDecided | None = None
    decided_at: int = -1
    batch: SubmissionOutcome | None = None
    trained: SessionsTrained | None = None
    path: list[str] = field(default_factory=lambda: ["open"])
    """States in the order in which the session passed through them."""

    @property
    def state(self) -> str:
        """State of the session, named as in docs/serving.md."""
        if self.trained is not None and self.trained.outcome == "trained":
            return "trained"
        if self.decided is not None and not self.decided.submission:
            return "evaluated" if self.decided.dropped == "evaluation" else "dropped"
        if self.trained is not None or (self.batch is not None and not self.batch.completed_runs):
            return "dropped"
        if self.decided is not None:
            return "queued" if self.batch is None else "batched"
        return "parked" if self.ends else "open"

    @property
    def is_settled(self) -> bool:
        """True if the session's state is final."""
        return self.state in {"trained", "evaluated", "dropped"}

    @property
    def worth(self) -> dict[int, float]:
        """Rewards of the trained answers by answer number."""
        # tests/unit/gateway/test_repeats.py tests this function
        superseded = superseded_calls(list(self.calls.values()))
        rewards: dict[int, float] = {}
        following = self.reward
        for name, call in reversed(self.calls.items()):
            worth = self.call_rewards.get(name, following)
            if name not in superseded and worth is not None:
                rewards[answer_number(call.choices[0].ids[0])] = following = worth
        return rewards

    def refuses(self, body: Event) -> bool:
        """Return whether an event is too late or names an unknown call."""
        if self.decided is not None:
            return True
        if isinstance(body, SessionEnd) and self.ends:
            if body.outcome == "discard":
                return False
            is_news = body.outcome == "done" == self.ends[-1] and body.reward is not None and self.reward is None
            return not is_news
        return isinstance(body, SessionReward) and isinstance(body.call, str) and body.call not in self.calls

    def take(self, body: Event) -> None:
        """Apply an event."""
        if isinstance(body, SessionCall):
            self.calls.setdefault(body.call, body)
            self._end("done", unless=not self.opened.ended)
        elif isinstance(body, SessionEnd):
            if body.reward is not None:
                self._rewarded(body.reward)
            self._end(body.outcome, unless=bool(self.ends) and body.outcome != "discard")
        elif body.call is not None:
            self.call_rewards[str(body.call)] = body.reward
            self.accepted.append(body.reward)
        else:
            self._rewarded(body.reward + (self.reward or 0.0) if body.how == "add" else body.reward, amount=body.reward)
            self._end("done", unless=not body.final)

    def _rewarded(self, reward: float, amount: float | None = None) -> None:
        self.reward = reward
        self.accepted.append(reward if amount is None else amount)

    def _end(self, outcome: str, *, unless: bool) -> None:
        if not unless and not (self.ends and outcome == "done"):
            self.ends.append(outcome)


class Oracle:
    """The sessions of a run.

    Args:
        log: All messages that were ever on the stream, in order.
    """

    def __init__(self, log: Iterable[Stored]) -> None:
        self.sessions: dict[str, OracleSession] = {}
        self.refused: list[tuple[str, str, str]] = []
        """(message id, kind, routing key) of each event that no session took."""
        self.contradictions: list[str] = []
        """Descriptions of repeated decisions about a session."""
        self.copies = 0
        """Number of messages that repeat an earlier message."""
        self._known: set[tuple[str, bool]] = set()
        """(message id, whether an external program chose the id) of each message."""
        self._early: dict[str, list[tuple[Stored, Event]]] = {}
        """Events of sessions that are not open yet, by session."""
        self._trained: dict[str, SessionsTrained] = {}
        for stored in log:
            self._read(stored)
        for waiting in self._early.values():
            self.refused += [_named(stored) for stored, _ in waiting]

    def _read(self, stored: Stored) -> None:
        try:
            body = _decoded(stored)
        except DecodeError:
            self.refused.append(_named(stored))
            return
        if stored.routing_key == "session" and body.kind not in OUTSIDE:
            self.refused.append(_named(stored))
            return
        name = str(stored.message_id), "session" in (stored.routing_key, stored.headers.get("by"))
        if name in self._known:
            self.copies += 1
            return
        self._known.add(name)
        self._apply(stored, body)
        for session in self.sessions.values():
            if session.state != session.path[-1]:
                session.path.append(session.state)

    def _apply(self, stored: Stored, body: Message) -> None:
        match body:
            case SessionOpened():
                opened = self.sessions[body.session] = OracleSession(body.session, body, stored.offset or 0)
                for early, event in self._early.pop(opened.id, ()):
                    self._event(early, event)
            case SessionCall() | SessionReward() | SessionEnd():
                self._event(stored, body)
            case SessionsDecided():
                self._decided(stored, body)
            case SubmissionOutcome():
                for session in self._of_submission(body.submission_id):
                    session.batch = session.batch or body
                    session.trained = session.trained or self._trained.get(session.batch.ticket)
            case SessionsTrained():
                self._trained[body.ticket] = body
                for session in self.sessions.values():
                    if session.batch is not None and session.batch.ticket == body.ticket:
                        session.trained = body
            case _:
                pass

    def _event(self, stored: Stored, body: Event) -> None:
        session = self.sessions.get(body.session)
        if session is None:
            self._early.setdefault(body.session, []).append((stored, body))
        elif session.refuses(body):
            self.refused.append(_named(stored))
        else:
            session.take(body)

    def _decided(self, stored: Stored, body: SessionsDecided) -> None:
        """Apply a decision. If any of its sessions is already decided, the whole decision is ignored."""
        members = [self.sessions[name] for name in body.sessions]
        if already_decided := [member.id for member in members if member.decided is not None]:
            self.contradictions.append(f"{already_decided} were decided before {body}")
            return
        for member in members:
            member.decided, member.decided_at = body, stored.offset or 0

    def _of_submission(self, submission: str) -> list[OracleSession]:
        return [
            session
            for session in self.sessions.values()
            if session.decided and session.decided.submission == submission
        ]

    @property
    def tasks(self) -> Mapping[str, list[OracleSession]]:
        """Sessions by their submission."""
        by_submission: dict[str, list[OracleSession]] = {}
        for session in self.sessions.values():
            if session.decided is not None and session.decided.submission:
                by_submission.setdefault(session.decided.submission, []).append(session)
        return by_submission


def _decoded(stored: Stored) -> Message:
    kind = OUTSIDE.get(str(stored.headers.get("kind")))
    if kind is not None:
        return decode(stored.body, kind, stored.content_type)
    return decode_any(stored.body, stored.content_type)


def _named(stored: Stored) -> tuple[str, str, str]:
    return str(stored.message_id), str(stored.headers.get("kind")), stored.routing_key
