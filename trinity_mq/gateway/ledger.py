"""Works out the sessions of a run from the events on their stream, and what is due about them.

Every gateway reads the whole stream and comes to the same sessions, for all follows from the events' order. One of them
acts: it publishes what :meth:`Ledger.due` says, and submits the tasks of :meth:`Ledger.queued`, each under an id that
follows from its sessions, so that whoever acts next may do both again.

Retention cuts the beginning of the stream. What is not settled is published again in time (:meth:`Ledger.to_carry`)
under its own message ids, with the offsets of the first copies: the state stays the same.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from trinity_mq.gateway.agenda import Agenda
from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import SessionCall, SessionEnd, SessionOpened, SessionRefused, SessionsDecided, SessionsTrained
from trinity_mq.messages.tasks import SubmissionOutcome

KEPT_SETTLED = 100_000
"""Settled sessions about which people may still ask."""

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
        self._outcomes: OrderedDict[str, SubmissionOutcome] = OrderedDict()
        """Outcomes of submissions whose decision has not been read, by the submission's id."""
        self._trained: OrderedDict[str, SessionsTrained] = OrderedDict()
        """Outcomes of batches in the trainer, by ticket: those of the tasks may be read before or after."""
        self._new_tasks: dict[str, None] = {}
        """Submissions that were decided since :meth:`take_new_tasks`."""
        self._agenda = Agenda(self.live)
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
                if settled.has(event):
                    return Applied("repeated")
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
            self.apply(one)
        return applied

    def _repeat(self, session: Session | None, event: Event) -> Applied:
        """Note where the newest copy of an event lies. What was read as its first copy may have been a later one, where
        retention has cut the first: one that is carried says where it was.
        """
        for known in () if session is None else tuple(session.events):
            if not known.is_copy_of(event):
                continue
            if event.origin < known.origin and session is not None:
                with self._changing(session):
                    session.replace(known, event)
            else:
                known.position = event.position
        return Applied("repeated")

    @contextlib.contextmanager
    def _changing(self, session: Session) -> Iterator[None]:
        """Keep the counts right while a session changes, and have it looked at."""
        was_over = session.end is not None
        yield
        self.over += (session.end is not None) - was_over
        self._agenda.touch(session)

    def _add(self, session: Session, event: Event) -> Applied:
        if session.has(event):
            return self._repeat(session, event)
        is_newest = not session.events or event.origin > session.events[-1].origin
        if is_newest and (reason := session.too_late(event.body)) is not None:  # else it is judged in its place
            return Applied("refused", reason=reason)
        with self._changing(session):
            session.add(event)
        self.kept_bytes += event.size
        if isinstance(event.body, SessionCall):
            self.counts["calls"] += 1
            self.counts["tokens"] += sum(len(choice.ids) for choice in event.body.choices)
        return Applied("new")

    def _apply_decision(self, event: Event, body: SessionsDecided) -> Applied:
        """Take in a decision once all of its sessions are known. It counts as a whole or not at all: of two decisions
        about a session the earlier one counts, and the sessions that only the later one names stay undecided.
        """
        if (unknown := self._wait_for_sessions(event, body)) is not None:
            return Applied("unknown", reason=f"no session {unknown!r} is known here")
        return self._decide(event, body)

    def _decide(self, event: Event, body: SessionsDecided) -> Applied:
        """Take in a decision about its sessions that are known."""
        sessions = [session for name in body.sessions if (session := self.get(name)) is not None]
        if all(session.decided == body for session in sessions):
            for session in sessions:
                self._repeat(session, event)
            return Applied("repeated")
        for session in sessions:
            earlier = session.decision
            if session.is_settled or (earlier is not None and earlier.origin <= event.origin):
                return Applied("refused", reason=f"session {session.id} was decided before: it is {session.state}")
        for session in sessions:
            self._withdraw_decision(session)
        for session in sessions:
            with self._changing(session):
                session.add(replace(event))  # each session has its own copy, whose position changes
            self.kept_bytes += event.size
        self._begin_task(body.submission, sessions)
        for session in sessions:
            self._settle(session)
        return Applied("new")

    def _wait_for_sessions(self, event: Event, body: SessionsDecided) -> str | None:
        """Keep a decision until the last of its sessions is known; return one that is not, None where all are."""
        unknown = [name for name in body.sessions if self.get(name) is None]
        for name in unknown:
            later = self._unknown.setdefault(name, _Unknown())
            later.decided = True
            if not any(known is event for known in later.events):
                later.events.append(event)
        return unknown[0] if unknown else None

    def finish_reading(self) -> None:
        """Take in decisions of which some sessions have lost their beginning to retention. Only settled sessions lose
        it, and the sessions of a decision are settled together. Call this once everything on the stream was read.
        """
        decisions = {
            event.origin: event
            for unknown in self._unknown.values()
            for event in unknown.events
            if isinstance(event.body, SessionsDecided)
        }
        for _, event in sorted(decisions.items()):
            body = event.body
            assert isinstance(body, SessionsDecided)
            if not body.submission or body.submission in self._outcomes:
                self._decide(event, body)

    def _begin_task(self, submission: str, sessions: list[Session]) -> None:
        if not submission:
            return
        self._submissions[submission] = sessions
        self._new_tasks[submission] = None
        self.waiting += len(sessions)
        if (outcome := self._outcomes.pop(submission, None)) is not None:
            self.apply_outcome(outcome)

    def _withdraw_decision(self, session: Session) -> None:
        """Undo the decision about a session, which an earlier one, read later, makes void."""
        if (event := session.decision) is None or not isinstance(event.body, SessionsDecided):
            return
        for name in event.body.sessions:
            member = self.live.get(name)
            known = None if member is None else member.decision
            if member is None or known is None or known.body != event.body:
                continue
            with self._changing(member):
                member.withdraw(known)
            member.batch = None
            self.kept_bytes -= known.size
            self.waiting -= bool(event.body.submission)
        self._forget_task(event.body.submission)

    def _forget_task(self, submission: str) -> None:
        self._submissions.pop(submission, None)
        self._new_tasks.pop(submission, None)

    def apply_outcome(self, outcome: SubmissionOutcome) -> None:
        """Take in what a batch made of a task."""
        sessions = list(self._submissions.get(outcome.submission_id, ()))
        self._new_tasks.pop(outcome.submission_id, None)
        if not sessions:
            self._outcomes[outcome.submission_id] = outcome
            while len(self._outcomes) > KEPT_SETTLED:
                self._outcomes.popitem(last=False)
            return
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
            self._agenda.touch(session)

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
            self._forget_task(session.decided.submission)
            self.waiting -= 1
        self._agenda.forget(session)
        session.forget_events()
        self._settled[session.id] = session
        while len(self._settled) > KEPT_SETTLED:
            _, oldest = self._settled.popitem(last=False)
            if oldest.batch is not None:
                self._tickets.pop(oldest.batch.ticket, None)

    def remember(self, sessions: Iterable[Session]) -> None:
        """Take in sessions of an earlier ledger, all of which are over by now, as far as they are not known here."""
        for session in sessions:
            if self.get(session.id) is None:
                session.lost = session.lost or not session.is_settled
                session.forget_events()
                self._settled[session.id] = session

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

    def take_new_tasks(self) -> list[str]:
        """Return, once, the submissions that were decided since the last call and of which no batch has reported."""
        names = list(self._new_tasks)
        self._new_tasks.clear()
        return names

    def sessions_of(self, submission: str) -> list[Session]:
        """Return the sessions of a task; none once a batch has reported of it."""
        sessions = self._submissions.get(submission, [])
        return list(sessions) if sessions and sessions[0].batch is None else []

    def due(self, now: float) -> list[SessionsDecided | SessionEnd]:
        """Return the events that are to be published now: ends of sessions whose time is over, and what becomes of
        those that are over. It looks at those alone that changed or whose time has come; :func:`all_due` looks at all.
        """
        return self._agenda.due(now)

    def to_carry(self, before: float) -> list[Session]:
        """Return the live sessions of which something lies before a position on the stream, for publishing all their
        events again, the oldest first.
        """
        found = [session for session in self.live.values() if session.first_position < before]
        return sorted(found, key=lambda one: one.first_position)
