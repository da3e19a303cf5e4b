"""Computes the events that are due for sessions: ends of sessions past their time limit, and decisions about ended
sessions.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from trinity_mq.gateway.session import Session
from trinity_mq.messages import SessionEnd, SessionOpened, SessionsDecided
from trinity_mq.messages.sessions import OF_SESSIONS, Drop

LEAST_GROUP = 2
"""Minimum sessions of a task whose sessions are compared with each other. A group whose wait has expired becomes a task
from this size.
"""
EARLY = 1e-3
"""Seconds before its time limit at which a session is checked. Sums of floats are not exact."""


class Agenda:
    """Events that are due for sessions. The cost grows with the number of changed sessions, not with the number of all
    sessions.

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


def all_due(sessions: Iterable[Session], now: float) -> list[SessionsDecided | SessionEnd]:
    """Return the events that are due for all of these sessions. :class:`Agenda` finds the same events with less
    work.
    """
    events: list[SessionsDecided | SessionEnd] = []
    groups: dict[str, list[Session]] = {}
    for session in sessions:
        if (event := due_alone(session, now)) is not None:
            events.append(event)
        elif waits_for_group(session):
            groups.setdefault(session.group, []).append(session)
    for members in groups.values():
        events += due_in_group(members, now)
    return events


def due_alone(session: Session, now: float) -> SessionsDecided | SessionEnd | None:
    """Return the event that is due for a session independently of its group."""
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
