"""Derives the sessions of a run, and the events due for them, from the events on their stream.

Every gateway reads the whole stream and derives the same sessions, because only the order of the events matters. A
single gateway acts: it publishes the events of :meth:`Ledger.due` and submits the tasks of :meth:`Ledger.queued`. Each
task has an id that follows from its sessions, so the next acting gateway may repeat both without harm. :class:`Agenda`
computes the due events: ends of sessions past their time limit, and decisions about ended sessions.

Retention removes the beginning of the stream. Events of unsettled sessions are published again in time
(:meth:`Ledger.to_carry`), under their own message ids and with the offsets of their first copies. The state stays the
same.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import SessionCall, SessionEnd, SessionOpened, SessionRefused, SessionsDecided, SessionsTrained
from trinity_mq.messages.sessions import OF_SESSIONS, Drop
from trinity_mq.messages.tasks import SubmissionOutcome
from trinity_mq.transport.event_log import EventEffect

KEPT_SETTLED = 100_000
"""Maximum number of settled sessions that the ledger can still describe. Also the maximum number of outcomes of
submissions and of batches that it keeps.
"""

LEAST_GROUP = 2
"""Minimum sessions of a task whose sessions are compared with each other. A group whose wait has expired becomes a task
from this size.
"""
EARLY = 1e-3
"""Seconds before its time limit at which a session is checked. Sums of floats are not exact."""


@dataclass(slots=True)
class _Unknown:
    """Events of a session whose opened event has not been read."""

    events: dict[int, Event] = field(default_factory=dict)
    """Events by ``origin``."""
    decided: bool = False


class Ledger:
    """The sessions of a run, as derived from the events read so far."""

    def __init__(self) -> None:
        self.live: dict[str, Session] = {}
        """Unsettled sessions by id, in the order of their opened events."""
        self._settled: OrderedDict[str, Session] = OrderedDict()
        self._unknown: dict[str, _Unknown] = {}
        self._unknown_names: dict[int, str] = {}
        """Ids of the sessions in ``_unknown``, by ``origin`` of their events other than decisions."""
        self._submissions: dict[str, list[Session]] = {}
        """Sessions of each task by submission id, until they are settled."""
        self._tickets: dict[str, list[Session]] = {}
        """Sessions by the ticket of their batch, including the settled sessions that the ledger still remembers."""
        self._outcomes: OrderedDict[str, SubmissionOutcome] = OrderedDict()
        """Outcomes of submissions by submission id, for submissions whose decision has not been read."""
        self._trained: OrderedDict[str, SessionsTrained] = OrderedDict()
        """Outcomes of batches in the trainer, by ticket. The outcomes of the tasks in the batch may be read before or
        after.
        """
        self._new_tasks: dict[str, None] = {}
        """Submissions decided since the last call of :meth:`take_new_tasks`."""
        self._agenda = Agenda(self.live)
        self._keys: dict[str, Session] = {}
        """Live sessions by the hash of their key."""
        self.kept_bytes = 0
        """Bytes of the events of all live sessions."""
        self.counts = dict.fromkeys(("opened", "calls", "tokens", "trained", "dropped", "evaluated", "sampled_out"), 0)
        """Totals since the first event that was read."""
        self.evaluated: list[float] = []
        """Rewards of evaluated sessions since a reader last took and cleared the list."""
        self.over = 0
        """Number of live sessions that have ended."""
        self.waiting = 0
        """Number of live sessions that belong to a task."""
        self.results_offset = 0
        """Offset on the results stream up to which results have been applied."""

    @property
    def open(self) -> int:
        """Number of sessions that have not ended."""
        return len(self.live) - self.over

    def get(self, session: str) -> Session | None:
        """Return a session whose opened event has been read. None: it is unknown, or was settled too long ago."""
        return self.live.get(session) or self._settled.get(session)

    def call(self, session: str, call: str) -> SessionCall | None:
        """Return a call of a session. None: the call is unknown, or the session is settled."""
        return None if (live := self.live.get(session)) is None else live.calls.get(call)

    def of_key(self, key_hash: str) -> Session | None:
        """Return the live session whose key has this hash, or None."""
        return self._keys.get(key_hash)

    def __iter__(self) -> Iterator[Session]:
        yield from self.live.values()
        yield from self._settled.values()

    # -- events

    def apply(self, event: Event) -> EventEffect:
        """Apply an event of one session, or a ``sessions_decided`` event of one or more sessions, and return its
        effect. An event of a session that is not opened yet is kept until the session is opened.
        """
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
                    return EventEffect("repeated")
                return EventEffect("refused", reason=settled.refusal_reason(body) or "")
            self._unknown.setdefault(body.session, _Unknown()).events[event.origin] = event
            self._unknown_names[event.origin] = body.session
            return EventEffect(
                "unknown", reason=f"no session {body.session!r} is known here; POST /sessions opens a session"
            )
        return self._add(session, event)

    def _open(self, event: Event, body: SessionOpened) -> EventEffect:
        session = self.live[body.session] = Session(body.session)
        if body.key_hash:
            self._keys[body.key_hash] = session
        self.counts["opened"] += 1
        self.counts["sampled_out"] += body.sampled_out
        earlier = self._forget_unknown(body.session)
        applied = self._add(session, event)
        for early_event in earlier:
            self.apply(early_event)
        return applied

    def _forget_unknown(self, session: str) -> list[Event]:
        """Remove the kept events of a session, and return them."""
        events = self._unknown.pop(session, _Unknown()).events
        for origin in events:
            self._unknown_names.pop(origin, None)
        return list(events.values())

    def _repeat(self, session: Session | None, event: Event) -> EventEffect:
        """Record the position of the newest copy of an event. The copy that was read first may be a later copy if
        retention removed the first copy. A carried copy states the offset of the first copy, so a smaller origin
        replaces a greater origin.
        """
        for stored_event in () if session is None else tuple(session.events):
            if not stored_event.is_copy_of(event):
                continue
            if event.origin < stored_event.origin and session is not None:
                with self._changing(session):
                    session.replace(stored_event, event)
            else:
                stored_event.position = event.position
        return EventEffect("repeated")

    @contextlib.contextmanager
    def _changing(self, session: Session) -> Iterator[None]:
        """Keep the counts correct while a session changes, and schedule the session for a check."""
        was_over = session.end is not None
        yield
        self.over += (session.end is not None) - was_over
        self._agenda.touch(session)

    def _add(self, session: Session, event: Event) -> EventEffect:
        if session.has(event):
            return self._repeat(session, event)
        is_newest = not session.events or event.origin > session.events[-1].origin
        # an older event is judged at its own position in the order
        if is_newest and (reason := session.refusal_reason(event.body)) is not None:
            return EventEffect("refused", reason=reason)
        with self._changing(session):
            session.add(event)
        self.kept_bytes += event.size
        if isinstance(event.body, SessionCall):
            self.counts["calls"] += 1
            self.counts["tokens"] += sum(len(choice.ids) for choice in event.body.choices)
        return EventEffect("new")

    def _apply_decision(self, event: Event, body: SessionsDecided) -> EventEffect:
        """Apply a decision once all of its sessions are known. A decision counts as a whole or not at all. Of two
        decisions about a session, the decision with the smaller ``origin`` counts, in whatever order they arrive.
        Sessions that only the other decision names stay undecided.
        """
        if (unknown := self._wait_for_sessions(event, body)) is not None:
            return EventEffect("unknown", reason=f"no session {unknown!r} is known here")
        return self._decide(event, body)

    def _decide(self, event: Event, body: SessionsDecided) -> EventEffect:
        """Apply a decision to its known sessions. Refuse it if one of them is settled or has an earlier decision."""
        sessions = [session for name in body.sessions if (session := self.get(name)) is not None]
        if all(session.decided == body for session in sessions):
            for session in sessions:
                self._repeat(session, event)
            return EventEffect("repeated")
        for session in sessions:
            earlier = session.decision
            if session.is_settled or (earlier is not None and earlier.origin <= event.origin):
                return EventEffect("refused", reason=f"session {session.id} was decided before: it is {session.state}")
        for session in sessions:
            self._withdraw_decision(session)
        for session in sessions:
            with self._changing(session):
                session.add(replace(event))  # each session has its own copy, whose position changes
            self.kept_bytes += event.size
        self._begin_task(body.submission, sessions)
        for session in sessions:
            self._settle(session)
        return EventEffect("new")

    def _wait_for_sessions(self, event: Event, body: SessionsDecided) -> str | None:
        """Keep a decision until the last of its sessions is known. Return the id of the first unknown session, or None
        if all are known.
        """
        unknown = [name for name in body.sessions if self.get(name) is None]
        for name in unknown:
            later = self._unknown.setdefault(name, _Unknown())
            later.decided = True
            later.events[event.origin] = event
        return unknown[0] if unknown else None

    def finish_reading(self) -> None:
        """Apply decisions that name sessions whose opened event was removed by retention, except decisions for a task
        whose outcome has not been read. Only settled sessions lose events, and the sessions of a decision are settled
        together. Call this once everything on the stream was read.
        """
        decisions = {
            event.origin: event
            for unknown in self._unknown.values()
            for event in unknown.events.values()
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
        """Undo the decision about a session for all sessions that the decision names. An earlier decision that was read
        later makes it void.
        """
        if (event := session.decision) is None or not isinstance(event.body, SessionsDecided):
            return
        for name in event.body.sessions:
            member = self.live.get(name)
            decision = None if member is None else member.decision
            if member is None or decision is None or decision.body != event.body:
                continue
            with self._changing(member):
                member.withdraw(decision)
            member.batch = None
            self.kept_bytes -= decision.size
            self.waiting -= bool(event.body.submission)
        self._forget_task(event.body.submission)

    def _forget_task(self, submission: str) -> None:
        self._submissions.pop(submission, None)
        self._new_tasks.pop(submission, None)

    def apply_outcome(self, outcome: SubmissionOutcome) -> None:
        """Apply the outcome of a task of sessions. Keep the outcome if the decision for the task has not been read."""
        sessions = list(self._submissions.get(outcome.submission_id, ()))
        self._new_tasks.pop(outcome.submission_id, None)
        if not sessions:
            self._outcomes[outcome.submission_id] = outcome
            while len(self._outcomes) > KEPT_SETTLED:
                self._outcomes.popitem(last=False)
            return
        trained = self._trained.get(outcome.ticket) if outcome.ticket else None
        batch_sessions = self._tickets.setdefault(outcome.ticket, []) if outcome.ticket else []
        for session in sessions:
            if session.batch is None:
                session.batch = outcome
                batch_sessions.append(session)
            if session.trained is None:
                session.trained = trained
            self._settle(session)

    def apply_trained(self, trained: SessionsTrained) -> None:
        """Apply the outcome of a batch in the trainer. A repeated train step reports its outcome again."""
        self.results_offset = max(self.results_offset, trained.offset)
        self._trained[trained.ticket] = trained
        while len(self._trained) > KEPT_SETTLED:
            self._trained.popitem(last=False)
        for session in self._tickets.get(trained.ticket, ()):
            if session.state != "dropped" or session.trained is not None:
                session.trained = trained
                self._settle(session)

    def apply_committed(self) -> None:
        """Mark the ended and rewarded sessions as committed: their groups stop waiting for further members."""
        for session in self.live.values():
            session.committed = session.committed or (session.end is not None and session.has_reward)
            self._agenda.touch(session)

    def apply_refused(self, refused: SessionRefused) -> None:
        """Remove the event that ``refused`` names from the events of unknown sessions. An acting gateway has already
        refused it.
        """
        if (name := self._unknown_names.pop(refused.offset, None)) is None:
            return
        events = self._unknown[name].events
        del events[refused.offset]
        if not events:
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
        """Adopt sessions of an earlier ledger that are unknown here. All of these sessions have been settled by now. A
        session whose outcome was not read counts as lost.
        """
        for session in sessions:
            if self.get(session.id) is None:
                session.lost = session.lost or not session.is_settled
                session.forget_events()
                self._settled[session.id] = session

    # -- results: unknown events, tasks, due events

    def unknown_events(self) -> list[Event]:
        """Return the events of sessions that were never opened, until :meth:`apply_refused` removes them. Decisions,
        and events of sessions that a decision names, are dropped. Call this only if the stream had been read to its end
        when these events were read: a session that was settled long ago may have lost its opened event to retention.
        """
        for name in [name for name, unknown in self._unknown.items() if unknown.decided]:
            self._forget_unknown(name)
        return [event for unknown in self._unknown.values() for event in unknown.events.values()]

    def queued(self) -> list[tuple[str, list[Session]]]:
        """Return the tasks without a reported batch, as pairs of submission id and sessions."""
        return [(name, list(sessions)) for name, sessions in self._submissions.items() if sessions[0].batch is None]

    def take_new_tasks(self) -> list[str]:
        """Return, once, the submissions that were decided since the last call and that no batch has reported."""
        names = list(self._new_tasks)
        self._new_tasks.clear()
        return names

    def sessions_of(self, submission: str) -> list[Session]:
        """Return the sessions of a task. The list is empty once a batch has reported the task."""
        sessions = self._submissions.get(submission, [])
        return list(sessions) if sessions and sessions[0].batch is None else []

    def due(self, now: float) -> list[SessionsDecided | SessionEnd]:
        """Return the events to publish now: ends of sessions past their time limit, and decisions about ended sessions.
        Only sessions that changed or whose time has come are checked.
        """
        return self._agenda.due(now)

    def to_carry(self, before: float) -> list[Session]:
        """Return the live sessions with at least one event before a stream position. All their events must be published
        again. The session with the oldest event comes first.
        """
        sessions = [session for session in self.live.values() if session.first_position < before]
        return sorted(sessions, key=lambda carried: carried.first_position)


class Agenda:
    """Finds the events that are due for sessions. The cost grows with the number of changed sessions, not with the
    number of all sessions.

    Args:
        live: Unsettled sessions by id: the mapping of their ledger, not a copy.
    """

    def __init__(self, live: Mapping[str, Session]) -> None:
        self._live = live
        self._changed: dict[str, None] = {}
        """Ids of the sessions to check, in the order of their changes."""
        self._changed_groups: dict[str, None] = {}
        self._limits: list[tuple[float, str]] = []
        """Heap of (time, session id): the times at which to check sessions that receive no further event."""
        self._limit_of: dict[str, float] = {}
        """Earliest time on the heap, by session id."""
        self._members: dict[str, dict[str, Session]] = {}
        """Sessions that wait for more members of their group, by group and session id."""
        self._group_of: dict[str, str] = {}

    def touch(self, session: Session) -> None:
        """Mark a session as changed."""
        self._changed[session.id] = None

    def forget(self, session: Session) -> None:
        """Remove a session that is settled."""
        self._changed.pop(session.id, None)
        self._limit_of.pop(session.id, None)
        self._sort_in(session.id, None, waits=False)

    def due(self, now: float) -> list[SessionsDecided | SessionEnd]:
        """Return the events that are due. An event is returned again by each call until it is applied."""
        while self._limits and self._limits[0][0] <= now + EARLY:
            _, name = heapq.heappop(self._limits)
            self._limit_of.pop(name, None)
            self._changed[name] = None
        events: list[SessionsDecided | SessionEnd] = []
        for name in list(self._changed):
            session = self._live.get(name)
            event = None if session is None else due_alone(session, now)
            self._sort_in(name, session, waits=event is None)
            if event is None:
                del self._changed[name]
                self._wait(session)
            else:
                events.append(event)
        for group in list(self._changed_groups):
            decisions = due_in_group(self._members.get(group, {}).values(), now)
            events += decisions
            if not decisions:
                del self._changed_groups[group]
        return events

    def _sort_in(self, name: str, session: Session | None, *, waits: bool) -> None:
        """Add a session to the waiting members of its group, or remove it."""
        old_group = self._group_of.pop(name, "")
        if old_group:
            self._members[old_group].pop(name, None)
            self._changed_groups[old_group] = None
            if not self._members[old_group]:
                del self._members[old_group]
        if session is not None and waits and waits_for_group(session):
            self._group_of[name] = session.group
            self._members.setdefault(session.group, {})[name] = session
            self._changed_groups[session.group] = None

    def _wait(self, session: Session | None) -> None:
        limit = math.inf if session is None else next_limit(session)
        if session is not None and limit < self._limit_of.get(session.id, math.inf):
            self._limit_of[session.id] = limit
            heapq.heappush(self._limits, (limit, session.id))
        if len(self._limits) > 2 * len(self._live) + 64:  # most entries belong to settled sessions
            self._limits = [(limit, name) for name, limit in self._limit_of.items()]
            heapq.heapify(self._limits)


def due_alone(session: Session, now: float) -> SessionsDecided | SessionEnd | None:
    """Return the event that is due for a session independently of its group, or None."""
    opened = session.opened
    if opened is None or session.decided is not None:
        return None
    if session.end is None:
        if now - session.last_at <= opened.idle_ttl:
            return None
        return SessionEnd(session=session.id, reason=f"nothing came for {opened.idle_ttl:g} s")
    if (drop := _drop(session, opened, now)) is not None:
        return SessionsDecided(sessions=[session.id], dropped=drop[0], reason=drop[1])
    if session.replay is not None or (session.has_reward and not session.group):
        return _task([session])
    return None


def waits_for_group(session: Session) -> bool:
    """Return whether a session may become a task together with other sessions. Call it only if :func:`due_alone`
    returned None for the session.
    """
    opened = session.opened
    is_open = opened is None or session.decided is not None or session.end is None
    return not is_open and session.has_reward and bool(session.group)


def next_limit(session: Session) -> float:
    """Return the next time at which an event may be due for a session that receives no further event."""
    opened = session.opened
    if opened is None or session.decided is not None:
        return math.inf
    if session.end is None:
        return session.last_at + opened.idle_ttl
    return (session.ripe_at if waits_for_group(session) else session.ended_at) + opened.reward_ttl


def due_in_group(members: Iterable[Session], now: float) -> list[SessionsDecided]:
    """Return decisions for the ended and rewarded members of a group. The members that were ready first come first."""
    return _grouped(sorted(members, key=lambda session: (session.ripe_at, session.events[0].origin)), now)


def _drop(session: Session, opened: SessionOpened, now: float) -> tuple[Drop, str] | None:
    """Return the reason why an ended session never becomes a task. Return None if it may still become a task."""
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
    """Return the tasks of the ended and rewarded members of a group. Members whose wait expires in a group that is too
    small are dropped.
    """
    decisions: list[SessionsDecided] = []
    waiting = list(members)
    while waiting:
        opened = waiting[0].opened
        assert opened is not None
        if len(waiting) >= opened.group_size:
            decisions.append(_task(waiting[: opened.group_size]))
            del waiting[: opened.group_size]
            continue
        if now - waiting[0].ripe_at > opened.reward_ttl or (waiting[0].committed and len(waiting) >= LEAST_GROUP):
            if len(waiting) >= LEAST_GROUP:
                decisions.append(_task(waiting))
            else:
                reason = (
                    f"{len(waiting)} of {opened.group_size} sessions of {waiting[0].group!r} "
                    f"within {opened.reward_ttl:g} s"
                )
                decisions.append(SessionsDecided(sessions=[waiting[0].id], dropped="group not full", reason=reason))
        break
    return decisions


def _task(sessions: Sequence[Session]) -> SessionsDecided:
    names = [session.id for session in sessions]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:24]
    return SessionsDecided(sessions=names, submission=f"{OF_SESSIONS}{digest}")
