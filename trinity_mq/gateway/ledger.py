"""Works out the sessions of a run from the events on their stream, and what is due about them.

Every gateway reads the whole stream and comes to the same sessions, for all follows from the events' order. One of them
acts: it publishes what :meth:`Ledger.due` says, and submits the tasks of :meth:`Ledger.queued`, each under an id that
follows from its sessions, so that whoever acts next may do both again.

Retention cuts the beginning of the stream. What is not settled is published again in time (:meth:`Ledger.to_carry`)
under its own message ids, with the offsets of the first copies: the state stays the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import SessionCall, SessionEnd, SessionOpened, SessionRefused, SessionsDecided, SessionsTrained
from trinity_mq.messages.sessions import Drop
from trinity_mq.messages.tasks import SubmissionOutcome

KEPT_SETTLED = 100_000
"""Settled sessions about which people may still ask."""
LEAST_GROUP = 2
"""Sessions that can be compared with each other; a group that has waited long enough needs no more."""

Taken = Literal["new", "repeated", "refused", "unknown"]


@dataclass(slots=True)
class Applied:
    """The effect of one event."""

    taken: Taken
    reason: str = ""
    """Why it was refused."""


@dataclass(slots=True)
class _Unknown:
    """Events of a session whose beginning has not been read."""

    events: list[Event] = field(default_factory=list)
    decided: bool = False


class Ledger:
    """Sessions by id."""

    def __init__(self) -> None:
        self.live: dict[str, Session] = {}
        """Those that are not settled, in the order in which they began."""
        self._settled: OrderedDict[str, Session] = OrderedDict()
        self._unknown: dict[str, _Unknown] = {}
        self._submissions: dict[str, list[Session]] = {}
        """Sessions that became a task, by its submission's id, until they are settled."""
        self._tickets: dict[str, list[Session]] = {}
        """Sessions by the ticket of their batch, the settled ones too, as far as they are kept."""
        self._trained: OrderedDict[str, SessionsTrained] = OrderedDict()
        """Outcomes of batches in the trainer, by ticket: those of the tasks may be read before or after."""
        self._keys: dict[str, Session] = {}
        """Live sessions by the hash of their key."""
        self.kept_bytes = 0
        """Bytes of the events of live sessions."""
        self.counts = dict.fromkeys(("opened", "calls", "tokens", "trained", "dropped", "evaluated", "sampled_out"), 0)
        """Since the first event that was read."""
        self.evaluated: list[float] = []
        """Rewards of sessions that were opened for evaluation, since somebody took them."""
        self.over = 0
        """Live sessions that have ended."""
        self.waiting = 0
        """Live sessions that became tasks."""
        self.results_offset = 0
        """Position on the results stream up to which progress is known."""

    def get(self, session: str) -> Session | None:
        """Return a session whose beginning is known."""
        return self.live.get(session) or self._settled.get(session)

    def of_key(self, key_hash: str) -> Session | None:
        """Return the live session whose key has this hash."""
        return self._keys.get(key_hash)

    def __iter__(self) -> Iterator[Session]:
        yield from self.live.values()
        yield from self._settled.values()

    # -- in

    def apply(self, event: Event) -> Applied:
        """Take in an event of one session or, ``sessions_decided``, of several."""
        body = event.body
        if isinstance(body, SessionsDecided):
            return self._apply_decision(event, body)
        session = self.live.get(body.session)
        if isinstance(body, SessionOpened):
            if session is not None or body.session in self._settled:
                return self._repeat(session, event)
            return self._open(event, body)
        if session is None:
            if (settled := self._settled.get(body.session)) is not None:
                return Applied("refused", reason=settled.too_late(body) or "")
            self._unknown.setdefault(body.session, _Unknown()).events.append(event)
            return Applied("unknown", reason=f"no session {body.session!r} is known here; POST /sessions makes one")
        return self._add(session, event)

    def _open(self, event: Event, body: SessionOpened) -> Applied:
        session = self.live[body.session] = Session(body.session)
        if body.key_hash:
            self._keys[body.key_hash] = session
        self.counts["opened"] += 1
        self.counts["sampled_out"] += body.sampled_out
        earlier = self._unknown.pop(body.session, _Unknown()).events
        applied = self._add(session, event)
        for one in earlier:
            self._add(session, one)
        return applied

    def _repeat(self, session: Session | None, event: Event) -> Applied:
        """Note where the newest copy of an event lies. What was read as its first copy may have been a later one, where
        retention has cut the first: one that is carried says where it was.
        """
        for known in () if session is None else tuple(session.events):
            if known.message_id != event.message_id:
                continue
            if event.origin < known.origin and session is not None:
                was_over = session.end is not None
                session.replace(known, event)
                self.over += (session.end is not None) - was_over
            else:
                known.position = event.position
        return Applied("repeated")

    def _add(self, session: Session, event: Event) -> Applied:
        if session.has(event.message_id):
            return self._repeat(session, event)
        is_newest = not session.events or event.origin > session.events[-1].origin
        if is_newest and (reason := session.too_late(event.body)) is not None:  # else it is judged in its place
            return Applied("refused", reason=reason)
        was_over = session.end is not None
        session.add(event)
        self.over += (session.end is not None) - was_over
        self.kept_bytes += event.size
        if isinstance(event.body, SessionCall):
            self.counts["calls"] += 1
            self.counts["tokens"] += sum(len(choice.ids) for choice in event.body.choices)
        return Applied("new")

    def _apply_decision(self, event: Event, body: SessionsDecided) -> Applied:
        is_new = False
        for name in body.sessions:
            session = self.live.get(name)
            if session is None:
                if name not in self._settled:
                    self._unknown.setdefault(name, _Unknown()).decided = True
                    self._unknown[name].events.append(event)
                continue
            if session.decided is not None or session.has(event.message_id):
                self._repeat(session, event)
                continue
            is_new = True
            session.add(replace(event))  # each session has its own copy, whose position changes
            self.kept_bytes += event.size
            if body.submission:
                self._submissions.setdefault(body.submission, []).append(session)
                self.waiting += 1
            self._settle(session)
        return Applied("new" if is_new else "repeated")

    def apply_outcome(self, outcome: SubmissionOutcome) -> None:
        """Take in what a batch made of a task."""
        sessions = list(self._submissions.get(outcome.submission_id, ()))
        trained = self._trained.get(outcome.ticket) if outcome.ticket else None
        known = self._tickets.setdefault(outcome.ticket, []) if outcome.ticket else []
        for session in sessions:
            if session.batch is None:
                session.batch = outcome
                known.append(session)
            if session.trained is None:
                session.trained = trained
            self._settle(session)

    def apply_trained(self, trained: SessionsTrained) -> None:
        """Take in what the trainer made of a batch. A step that is done again is told again."""
        self.results_offset = max(self.results_offset, trained.offset)
        self._trained[trained.ticket] = trained
        while len(self._trained) > KEPT_SETTLED:
            self._trained.popitem(last=False)
        for session in self._tickets.get(trained.ticket, ()):
            if session.state != "dropped" or session.trained is not None:
                session.trained = trained
                self._settle(session)

    def apply_committed(self) -> None:
        """Take in that groups wait no longer for further members."""
        for session in self.live.values():
            session.committed = session.committed or (session.end is not None and session.has_reward)

    def apply_refused(self, refused: SessionRefused) -> None:
        """Forget an event that was refused before."""
        for name, unknown in list(self._unknown.items()):
            unknown.events = [event for event in unknown.events if event.origin != refused.offset]
            if not unknown.events:
                del self._unknown[name]

    def _settle(self, session: Session) -> None:
        if not session.is_settled or session.id not in self.live:
            return
        del self.live[session.id]
        if session.opened is not None:
            self._keys.pop(session.opened.key_hash, None)
        self.over -= session.end is not None
        self.kept_bytes -= session.size
        self.counts[session.state] += 1
        if session.state == "evaluated" and session.reward is not None:
            self.evaluated.append(session.reward)
        if session.decided is not None and session.decided.submission:
            self._submissions.pop(session.decided.submission, None)
            self.waiting -= 1
        session.forget_events()
        self._settled[session.id] = session
        while len(self._settled) > KEPT_SETTLED:
            _, oldest = self._settled.popitem(last=False)
            if oldest.batch is not None:
                self._tickets.pop(oldest.batch.ticket, None)

    # -- out

    def take_unknown(self) -> list[Event]:
        """Return, once, the events that belong to no session. To be asked only where all that is on the stream was read
        when the events were: what was settled long ago may have lost its beginning to retention.
        """
        found = [
            event
            for unknown in self._unknown.values()
            if not unknown.decided
            for event in unknown.events
            if not isinstance(event.body, SessionsDecided)
        ]
        self._unknown.clear()
        return found

    def queued(self) -> list[tuple[str, list[Session]]]:
        """Return the tasks, by submission, of which no batch has reported yet."""
        return [(name, list(found)) for name, found in self._submissions.items() if found[0].batch is None]

    def due(self, now: float) -> list[SessionsDecided | SessionEnd]:
        """Return the events that are to be published now: ends of sessions whose time is over, and what becomes of
        those that are over.
        """
        found: list[SessionsDecided | SessionEnd] = []
        groups: dict[str, list[Session]] = {}
        for session in self.live.values():
            opened = session.opened
            if opened is None or session.decided is not None:
                continue
            if session.end is None:
                if now - session.last_at > opened.idle_ttl:
                    reason = f"nothing came for {opened.idle_ttl:g} s"
                    found.append(SessionEnd(session=session.id, reason=reason))
                continue
            if (drop := _drop(session, opened, now)) is not None:
                found.append(SessionsDecided(sessions=[session.id], dropped=drop[0], reason=drop[1]))
            elif session.replay is not None or (session.has_reward and not session.group):
                found.append(_task([session]))
            elif session.has_reward:
                groups.setdefault(session.group, []).append(session)
        for members in groups.values():
            found += _grouped(sorted(members, key=lambda one: one.ripe_at), now)
        return found

    def to_carry(self, before: float) -> list[Session]:
        """Return the live sessions of which something lies before a position on the stream, for publishing all their
        events again, the oldest first.
        """
        found = [session for session in self.live.values() if session.first_position < before]
        return sorted(found, key=lambda one: one.first_position)


def _drop(session: Session, opened: SessionOpened, now: float) -> tuple[Drop, str] | None:
    """Return why a session that is over never becomes a task, None while it may."""
    end = session.end
    assert end is not None
    over = now - session.ended_at > opened.reward_ttl
    if end.outcome == "discard":
        return "discarded", end.reason
    if opened.record == "off":
        return "not recorded", "training was behind" if opened.sampled_out else ""
    if not session.calls:
        return "no answers", end.reason or "it ended before the model was asked"
    if session.replay is not None:
        return None
    if opened.record == "eval":
        return ("evaluation", "") if session.has_reward or over or end.outcome == "failed" else None
    if end.outcome == "failed" and not session.has_reward:
        return "failed", end.reason
    if not session.has_reward and over:
        return "no reward", f"no reward came within {opened.reward_ttl:g} s"
    return None


def _grouped(members: Sequence[Session], now: float) -> list[SessionsDecided]:
    """Return the tasks of a group's members that are over and have rewards, and what becomes of those left."""
    found: list[SessionsDecided] = []
    left = list(members)
    while left:
        opened = left[0].opened
        assert opened is not None
        if len(left) >= opened.group_size:
            found.append(_task(left[: opened.group_size]))
            del left[: opened.group_size]
            continue
        if now - left[0].ripe_at > opened.reward_ttl or (left[0].committed and len(left) >= LEAST_GROUP):
            if len(left) >= LEAST_GROUP:
                found.append(_task(left))
            else:
                reason = (
                    f"{len(left)} of {opened.group_size} sessions of {left[0].group!r} within {opened.reward_ttl:g} s"
                )
                found.append(SessionsDecided(sessions=[left[0].id], dropped="group not full", reason=reason))
        break
    return found


def _task(sessions: Sequence[Session]) -> SessionsDecided:
    names = [session.id for session in sessions]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]
    return SessionsDecided(sessions=names, submission=f"sessions-{digest}")
