"""The history of a run for the page: states of agents over time, activities, curves and samples, bounded in memory."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trinity_mq.messages import EngineStatus, Metrics
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.run_state import AgentRow
from trinity_mq.observability.samples import SampleStore
from trinity_mq.observability.timeline import Span, spans
from trinity_mq.roles import row_of

KEPT_SECONDS = 900.0
"""Seconds for which an interval is kept after its end."""
MOST_INTERVALS = 4000
"""Maximum number of intervals kept per agent."""
MOST_ACTIVITIES = 20_000


@dataclass(slots=True)
class Interval:
    """A period in which the state of an agent, and the event that it waits for, did not change. Times are in seconds
    since the epoch.
    """

    start: float
    end: float
    state: str
    waits_for: str | None = None


class RunHistory:
    """The history of one run.

    Args:
        workflows: Workflow name by taskset name.
    """

    def __init__(self, workflows: Mapping[str, str] | None = None) -> None:
        self.curves = Curves()
        self.samples = SampleStore(workflows)
        self.activities: collections.deque[Span] = collections.deque(maxlen=MOST_ACTIVITIES)
        """The latest activities of agents, in the order of their ends."""
        self._intervals: dict[tuple[str, str], collections.deque[Interval]] = {}
        """Intervals by (role, agent id)."""

    def receive(self, message: object, at: float) -> None:
        """Process metrics that were written or received at ``at``, in seconds since the epoch. Other messages are
        ignored.
        """
        if isinstance(message, Metrics):
            self.curves.add(message)
            line = {**message.values, "time": at, "role": message.role, "agent": message.id, "step": message.step}
            self.activities.extend(spans([line]))

    def observe(self, agents: Iterable[AgentRow], now: float) -> None:
        """Record the current states of all agents. ``now`` is in seconds since the epoch."""
        for agent in agents:
            empty: collections.deque[Interval] = collections.deque(maxlen=MOST_INTERVALS)
            intervals = self._intervals.setdefault((agent.beat.role, agent.id), empty)
            state = _state_of(agent)
            if intervals:
                intervals[-1].end = now
            if not intervals or (intervals[-1].state, intervals[-1].waits_for) != (state, agent.waits_for):
                intervals.append(Interval(now, now, state, agent.waits_for))
            while intervals[0].end < now - KEPT_SECONDS:
                intervals.popleft()

    def lanes(self, start: float) -> list[dict[str, Any]]:
        """Return the intervals of all agents from ``start`` on, ordered by role. ``start`` is in seconds since the
        epoch.
        """
        return [
            {
                "agent": agent,
                "role": role,
                "intervals": [
                    [round(max(interval.start, start), 2), round(interval.end, 2), interval.state, interval.waits_for]
                    for interval in self._intervals[role, agent]
                    if interval.end >= start
                ],
            }
            for role, agent in sorted(self._intervals, key=lambda lane: (row_of(lane[0]).shown, lane[1]))
        ]


def _state_of(agent: AgentRow) -> str:
    """Return an agent's state. An engine that samples nothing is idle."""
    detail = agent.beat.detail
    is_idle = agent.state == "working" and isinstance(detail, EngineStatus) and detail.load == 0
    return "idle" if is_idle else agent.state
