"""The state of one run, collected from messages and from lines of files. It does no I/O: sources call it, and the clock
is injected.
"""

from __future__ import annotations

import collections
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from trinity_mq.messages import EngineStatus, ExplorerStatus, Heartbeat, Metrics, RunnerStatus, TrainerStatus
from trinity_mq.observability.curves import Curves
from trinity_mq.observability.diagnosis import (
    Observation,
    Room,
    bottleneck,
    bottleneck_filter,
    diagnose,
    finding_filter,
)
from trinity_mq.observability.display import main_figures
from trinity_mq.observability.follow import parse_metrics
from trinity_mq.observability.intervals import AgentState, Intervals
from trinity_mq.observability.run_view import AgentRow, RunView, version_text
from trinity_mq.observability.samples import SampleStore
from trinity_mq.roles import FLOW
from trinity_mq.telemetry.timeline import Span, spans

RATE_SECONDS = 20.0
"""Window in seconds for rates."""
BUSY_SECONDS = 60.0
"""Window in seconds for busy fractions."""
MOST_NEWS = 200
MOST_ACTIVITIES = 20_000


class RunState:
    """The state of one run.

    Args:
        run: The run's name.
        total: Number of steps of the run. None: unknown.
        workflows: Workflow name by taskset name.
        expected: Number of configured agents by role.
        limits: Timeouts of waits in seconds, by settings key.
        room: Free resources of this machine. They are used only if the run works on this machine.
        clock: Returns seconds since the epoch.
    """

    def __init__(
        self,
        run: str,
        total: int | None = None,
        workflows: Mapping[str, str] | None = None,
        *,
        expected: Mapping[str, int] | None = None,
        limits: Mapping[str, float] | None = None,
        room: frozenset[Room] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.view = RunView(run, total)
        self.curves, self.intervals = Curves(), Intervals()
        self.samples = SampleStore(workflows)
        self.connection = ""
        """Description of a connection problem with the broker. Empty: connected, or no connection is needed."""
        self.broker_trouble = ""
        """Reason why the broker does not accept messages, such as an alarm. Empty: it accepts messages."""
        self.is_live = False
        """True while a source receives heartbeats."""
        self.reviews = 0
        """Number of runs that wait for a person's verdict."""
        self.news: collections.deque[tuple[float | None, str]] = collections.deque(maxlen=MOST_NEWS)
        """News lines, each with its time in seconds since the epoch. None: before this observatory's first message
        about the event.
        """
        self.activities: collections.deque[Span] = collections.deque(maxlen=MOST_ACTIVITIES)
        """The latest activities of agents, in the order of their ends."""
        self.problems: collections.deque[str] = collections.deque(maxlen=20)
        """Messages about data that could not be read."""
        self._clock = clock
        self._began = clock()
        self._heard_agents: set[str] = set()
        """Ids of the agents with at least one received heartbeat."""
        self._progress = 0
        """Number of batches consumed, from the trainer's latest metrics."""
        self._counters: dict[tuple[str, str], collections.deque[tuple[float, float]]] = {}
        """(time, value) pairs of each counter, by (agent id, counter name)."""
        self._expected, self._limits, self._room = expected or {}, limits or {}, room
        self._limit, self._finding = bottleneck_filter(), finding_filter()

    # -- input

    def receive(self, message: object) -> None:
        """Process a message of the telemetry exchange."""
        now = self._clock()
        self.view.receive(message, now)
        # the first heartbeat received from a running agent also reports earlier events, whose times are unknown
        is_late = isinstance(message, Heartbeat) and message.seq > 1 and message.id not in self._heard_agents
        self._copy_news(None if is_late else now)
        if isinstance(message, Metrics):
            self._take_metrics(message, now)
        elif isinstance(message, Heartbeat):
            self._heard_agents.add(message.id)
            self._count(message, now)

    def receive_line(self, line: Mapping[str, Any]) -> None:
        """Process a line of the run's metrics file."""
        message, at = parse_metrics(line), line.get("time")
        if message is not None and isinstance(at, int | float):
            self.view.receive(message, at)
            self._copy_news(at)
            self._take_metrics(message, at)

    def _take_metrics(self, message: Metrics, at: float) -> None:
        """Process metrics that were written at ``at``, in seconds since the epoch."""
        self.curves.add(message)
        line = {**message.values, "time": at, "role": message.role, "agent": message.id, "step": message.step}
        self.activities.extend(spans([line]))
        if message.role == "trainer":
            self._progress = message.step

    def set_depths(self, depths: Mapping[str, int | None]) -> None:
        """Record the depths of queues by their short names."""
        is_first = not self.view.depths
        self.view.set_depths(depths)
        self._copy_news(None if is_first else self._clock())

    def tick(self) -> None:
        """Update the intervals and verdicts to the current time."""
        now = self._clock()
        self.intervals.observe(self._states(now), now)
        self._update_verdicts(now)

    def _update_verdicts(self, now: float) -> Observation:
        """Update the displayed verdicts and return the observation behind them."""
        observation = self.observation()
        if self.is_live:
            limit = self._limit.read(bottleneck(observation), now)
            self._finding.read(diagnose(observation, lambda _: limit), now)
        return observation

    def _copy_news(self, at: float | None) -> None:
        """Copy pending news from the view with the time ``at``."""
        self.news.extend((at, text) for text in self.view.take_news())

    def _news(self) -> list[list[Any]]:
        """Return the news in time order. News without a time precede the start of this observatory."""
        ordered = sorted(self.news, key=lambda item: self._began if item[0] is None else item[0])
        return [[None if at is None else round(at, 1), text] for at, text in ordered]

    def _states(self, now: float) -> list[AgentState]:
        beats = self.view.heartbeats(now)
        return [_state_of(row, beats[row.id][0]) for row in self.view.agents(now) if row.id in beats]

    def _count(self, heartbeat: Heartbeat, now: float) -> None:
        detail = heartbeat.detail
        counters: dict[str, float] = {}
        if isinstance(detail, ExplorerStatus):
            counters = {"opened": detail.opened, "closed": detail.closed}
        elif isinstance(detail, RunnerStatus):
            counters = {"slices": detail.done}
        elif isinstance(detail, EngineStatus):
            counters = {"tokens": detail.tokens}
        elif isinstance(detail, TrainerStatus) and detail.progress is not None:
            counters = {"progress": detail.progress}
        for name, value in counters.items():
            points = self._counters.setdefault((heartbeat.id, name), collections.deque(maxlen=256))
            if points and value < points[-1][1]:
                points.clear()  # a restarted process counts from zero
            points.append((now, float(value)))

    def rate(self, name: str, now: float) -> float:
        """Return a counter's increase per second, summed over all agents."""
        total = 0.0
        for (_, counter), points in self._counters.items():
            if counter != name:
                continue
            recent = [(at, value) for at, value in points if at >= now - RATE_SECONDS]
            if len(recent) > 1 and recent[-1][0] > recent[0][0]:
                total += (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        return total

    # -- output

    @property
    def still(self) -> float:
        """Seconds since the last progress."""
        return self.view.still(self._clock())

    def observation(self) -> Observation:
        """Return the current observation for a diagnosis."""
        return self.view.observation(
            self._clock(),
            broker=self.connection or self.broker_trouble,
            expected=self._expected,
            limits=self._limits,
            room=self._room if self._is_here(self.view.heartbeats(self._clock())) else None,
        )

    @staticmethod
    def _is_here(beats: Mapping[str, tuple[Heartbeat, float]]) -> bool:
        """Return whether explorer and trainer report that they run on this machine."""
        details = [beat.detail for beat, _ in beats.values()]
        places = [detail.place for detail in details if isinstance(detail, ExplorerStatus | TrainerStatus)]
        return bool(places) and all(place.startswith(f"{socket.gethostname()}:") for place in places)

    def state(self) -> dict[str, Any]:
        """Return the state of the run as JSON."""
        now, view = self._clock(), self.view
        beats = view.heartbeats(now)
        agents = [
            {
                "id": row.id,
                "role": beats[row.id][0].role if row.id in beats else "",
                "state": row.state,
                "waits_for": row.waits_for,
                "waits_seconds": round(row.waits_seconds, 1),
                "alive": row.alive,
                "detail": beats[row.id][0].detail.as_map() if row.id in beats else {},
            }
            for row in view.agents(now)
        ]
        observation = self._update_verdicts(now)
        limit, finding = (self._limit.shown, self._finding.shown) if self.is_live else (None, None)
        return {
            "run": view.run,
            "now": round(now, 2),
            "live": self.is_live,
            "connection": self.connection,
            "over": bool(agents) and not any(agent["alive"] for agent in agents),
            "step": view.step or self._progress,
            "total": view.total,
            "figures": [list(figure) for figure in main_figures(view, now)],
            "agents": agents,
            "flow": self._flow(now, agents, observation.busy if limit is None else limit.busy),
            "finding": None if finding is None else _as_map(finding),
            "bottleneck": None if limit is None else _as_map(limit),
            "sync": {
                "version": version_text(view.gate.version),
                "phases": dict(view.gate.phases),
                "counts": {
                    name: getattr(view.gate, name)
                    for name in ("syncs", "aborts", "pulls", "canary_failures", "quarantined")
                },
                "trouble": view.gate.trouble,
                "members": {
                    name: {"version": version_text(member.version), "state": member.state}
                    for name, member in sorted(view.gate.members.items())
                },
            },
            "sessions": None if view.sessions is None else view.sessions.as_map(),
            "failures": [failure.line() for failure in view.failures],
            "news": self._news(),
            "problems": list(self.problems),
            "reviews": self.reviews,
            "samples": self.samples.seen,
            "curves": self.curves.changes,
        }

    def _flow(self, now: float, agents: list[dict[str, Any]], shares: Mapping[str, float]) -> dict[str, Any]:
        busy, depths = {**self.intervals.busy(BUSY_SECONDS, now), **shares}, self.view.depths
        nodes = [
            {
                "role": role,
                "alive": sum(agent["alive"] for agent in agents if agent["role"] == role),
                "count": sum(agent["role"] == role for agent in agents),
                "busy": None if role not in busy else round(busy[role], 3),
                "item": _item(role, [agent["detail"] for agent in agents if agent["role"] == role and agent["alive"]]),
            }
            for role in FLOW
            if any(agent["role"] == role for agent in agents)
        ]
        in_hand = sum(len(agent["detail"].get("in_hand", ())) for agent in agents if agent["role"] == "trainer")
        tasks = [depths.get("tasks.train"), depths.get("tasks.eval")]
        arrows = [
            {
                "from": "explorer",
                "to": "runner",
                "depth": _sum(tasks),
                "rate": self.rate("slices", now),
                "of": "slices",
            },
            {"from": "runner", "to": "engine", "depth": None, "rate": self.rate("tokens", now), "of": "tokens"},
            {
                "from": "runner",
                "to": "operator",
                "depth": depths.get("closed"),
                "rate": self.rate("closed", now),
                "of": "batches",
            },
            {
                "from": "operator",
                "to": "trainer",
                "depth": in_hand,
                "rate": self.rate("progress", now),
                "of": "batches",
            },
        ]
        return {"nodes": nodes, "arrows": arrows}


def _state_of(row: AgentRow, heartbeat: Heartbeat) -> AgentState:
    """Return an agent's state. An engine that samples nothing is idle."""
    state, detail = row.state, heartbeat.detail
    if state == "working" and isinstance(detail, EngineStatus) and detail.load == 0:
        state = "idle"
    return AgentState(row.id, heartbeat.role, state, row.waits_for)


def _as_map(verdict: Any) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(verdict).items()}


def _sum(values: list[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _item(role: str, details: list[dict[str, Any]]) -> str:
    """Return a few words on the current work of a role's agents."""

    def total(name: str) -> float:
        return sum(float(detail.get(name, 0)) for detail in details)

    match role:
        case "explorer":
            return f"{len([batch for detail in details for batch in detail.get('open', ())])} open"
        case "runner":
            return f"{total('running'):.0f} slices"
        case "engine":
            return f"{total('load'):.0f} sequences"
        case "operator":
            return f"{sum(detail.get('ticket') is not None for detail in details)} batches"
        case "trainer":
            return f"step {total('step'):.0f}"
        case _:
            return f"{total('asking'):.0f} asking"
