"""Observation of a run, and the findings made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity_mq.messages import Heartbeat

State = Literal["moving", "waiting", "stuck", "over", "silent"]
Stage = Literal["explorer", "runner", "engine", "operator", "trainer", "sync", "sessions"]
Room = Literal["devices", "cores"]
"""Free resource of a machine: a device for another engine or trainer process, a core for another small process."""

BROKER = "broker"
"""The culprit if the broker is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All known facts about a run at one moment."""

    heartbeats: Mapping[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    """The last heartbeat of each agent by id, with the seconds since it was received."""
    depths: Mapping[str, int | None] = field(default_factory=dict)
    """Ready messages of queues by short name (``closed``, ``tasks.train``); None: the queue is missing or did not
    answer."""
    broker: str = ""
    """Problem with the broker, in words: unreachable, or an alarm; empty: no problem."""
    still: float = 0.0
    """Seconds since the last progress, or since heartbeats are expected if there was none yet."""
    listened: float = 60.0
    """Seconds for which heartbeats have been received. An agent without heartbeats is missing only after some time."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Number of agents that the configuration requires, by role; empty: unknown."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings in seconds that bound a wait, by key, such as ``explorer.max_timeout``; findings name them."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the last minute, 0 to 1, in which a stage was busy, by stage; unknown stages are missing."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that measure how busy a stage is: the mean over the minute that ends with the latest value, by name."""
    room: frozenset[Room] | None = None
    """Kinds of resources that are free on the machine that runs the agents; None: unknown."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A waiting agent and the target of its wait."""

    waiter: str
    """Id of the waiting agent."""
    waits_for: str
    """The condition that it waits for, as it reports it."""
    seconds: float
    on: str | None = None
    """Id of the agent, or role, that it waits for; None: unknown, or outside the run."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """The reason why a run does not move, or the statement that it moves."""

    state: State
    """``moving``, also if no agent takes longer than usual; ``waiting``: current work takes longer than usual, agents
    start, or external input is awaited; ``stuck``: the run cannot continue without the culprit; ``over``: the run has
    ended; ``silent``: no agent sends heartbeats."""
    sentence: str
    """The finding in one sentence."""
    culprit: str | None = None
    """Id of an agent, a role without a living agent, or ``broker``; None: no culprit."""
    evidence: tuple[str, ...] = ()
    """Facts that support the finding, one line each."""
    lever: str = ""
    """The remedy: a command, or settings; empty if no action is needed."""
    edges: tuple[Edge, ...] = ()
    """All waits that agents report, longest first."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that limits the throughput of a moving run."""

    stage: Stage
    sentence: str
    lever: str
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the time, 0 to 1, in which each known stage is busy."""
