"""History of each agent's states and waits, from its heartbeats, for the timeline of the page."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trinity_mq.cli.run.run_view import ROLES

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
        for one in states:
            self._roles[one.agent] = one.role
            own = self._by_agent.setdefault(one.agent, collections.deque(maxlen=MOST))
            if own and (own[-1].state, own[-1].waits_for) == (one.state, one.waits_for):
                own[-1].end = now
            else:
                if own:
                    own[-1].end = now
                own.append(Interval(now, now, one.state, one.waits_for))
            while own and own[0].end < now - KEPT_SECONDS:
                own.popleft()

    def since(self, start: float) -> list[dict[str, Any]]:
        """Return the lanes of all agents from ``start`` on, ordered by role. ``start`` is in seconds since the
        epoch.
        """
        order = sorted(self._by_agent, key=lambda name: (_place(self._roles[name]), name))
        return [
            {
                "agent": name,
                "role": self._roles[name],
                "intervals": [
                    [round(max(one.start, start), 2), round(one.end, 2), one.state, one.waits_for]
                    for one in self._by_agent[name]
                    if one.end >= start
                ],
            }
            for name in order
        ]

    def busy(self, seconds: float, now: float) -> dict[str, float]:
        """Return, by role, the fraction of the last ``seconds`` in which its agents worked without waiting."""
        spent: dict[str, list[float]] = {}
        for name, own in self._by_agent.items():
            worked = total = 0.0
            for one in own:
                overlap = min(one.end, now) - max(one.start, now - seconds)
                if overlap > 0:
                    total += overlap
                    worked += overlap if one.state == "working" and one.waits_for is None else 0.0
            if total:
                spent.setdefault(self._roles[name], []).append(worked / total)
        return {role: sum(shares) / len(shares) for role, shares in spent.items()}


def _place(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)
