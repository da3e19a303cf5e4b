"""History of each agent's states and waits, from its heartbeats, for the timeline of the page."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trinity_mq.roles import row_of

KEPT_SECONDS = 900.0
"""Seconds after its end at which an interval is removed."""
MOST = 4000
"""Maximum number of intervals kept per agent."""


@dataclass(slots=True)
class Interval:
    """A period in which an agent's state did not change. Times are in seconds since the epoch."""

    start: float
    end: float
    state: str
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent's state at one moment."""

    agent: str
    role: str
    state: str
    waits_for: str | None = None


class Intervals:
    """Joins observations of agents into intervals."""

    def __init__(self) -> None:
        self._by_agent: dict[str, collections.deque[Interval]] = {}
        self._roles: dict[str, str] = {}

    def observe(self, states: Iterable[AgentState], now: float) -> None:
        """Record the current states of all agents. ``now`` is in seconds since the epoch."""
        for state in states:
            self._roles[state.agent] = state.role
            intervals = self._by_agent.setdefault(state.agent, collections.deque(maxlen=MOST))
            if intervals and (intervals[-1].state, intervals[-1].waits_for) == (state.state, state.waits_for):
                intervals[-1].end = now
            else:
                if intervals:
                    intervals[-1].end = now
                intervals.append(Interval(now, now, state.state, state.waits_for))
            while intervals and intervals[0].end < now - KEPT_SECONDS:
                intervals.popleft()

    def since(self, start: float) -> list[dict[str, Any]]:
        """Return the lanes of all agents from ``start`` on, ordered by role. ``start`` is in seconds since the
        epoch.
        """
        order = sorted(self._by_agent, key=lambda name: (row_of(self._roles[name]).shown, name))
        return [
            {
                "agent": name,
                "role": self._roles[name],
                "intervals": [
                    [round(max(interval.start, start), 2), round(interval.end, 2), interval.state, interval.waits_for]
                    for interval in self._by_agent[name]
                    if interval.end >= start
                ],
            }
            for name in order
        ]

    def busy(self, seconds: float, now: float) -> dict[str, float]:
        """Return, by role, the fraction of the last ``seconds`` in which its agents worked without waiting."""
        spent: dict[str, list[float]] = {}
        for name, intervals in self._by_agent.items():
            worked = total = 0.0
            for interval in intervals:
                overlap = min(interval.end, now) - max(interval.start, now - seconds)
                if overlap > 0:
                    total += overlap
                    worked += overlap if interval.state == "working" and interval.waits_for is None else 0.0
            if total:
                spent.setdefault(self._roles[name], []).append(worked / total)
        return {role: sum(shares) / len(shares) for role, shares in spent.items()}
