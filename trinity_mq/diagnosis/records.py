"""Observation of a run, and the findings that are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity_mq.messages import Heartbeat

State = Literal["moving", "waiting", "stuck", "over", "silent"]
Stage = Literal["explorer", "runner", "engine", "operator", "trainer", "sync", "sessions"]
Room = Literal["devices", "cores"]
"""Free resource of a machine: a device for a further engine or trainer process, a core for a further small process."""

BROKER = "broker"
"""The culprit where the broker is."""
OVER = ("finished", "gone")
"""States after which no heartbeats are expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything known about a run at one moment."""

    heartbeats: Mapping[str, tuple[Heartbeat, float]] = field(default_factory=dict)
    """The last heartbeat of each agent by id, and the seconds since it was received."""
    depths: Mapping[str, int | None] = field(default_factory=dict)
    """Ready messages of queues by short name (``closed``, ``tasks.train``); None: there is no queue, or no answer."""
    broker: str = ""
    """Trouble with the broker, in words: not reachable, or an alarm; empty where there is none."""
    still: float = 0.0
    """Seconds since anything progressed."""
    listened: float = 60.0
    """Seconds for which heartbeats have been received: an agent of which none came is missing only after a while."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Number of agents that the configuration asks for, by role; empty where it is not known."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Settings in seconds that are named where they will end a wait, by key, such as ``explorer.max_timeout``."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the last minute, 0 to 1, in which a stage was at work."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each metric over the last minute, else its latest value."""
    room: frozenset[Room] | None = None
    """Free resources of the machine on which the run works; None: not known."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An agent that waits, and for what."""

    waiter: str
    """Id of the agent."""
    waits_for: str
    """The condition that it waits for, in its words."""
    seconds: float
    on: str | None = None
    """Id of the agent, or role, that this leads to; None: not known, or outside of the run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why a run does not move, or that it does."""

    state: State
    """``moving``; ``waiting``: work is under way that takes longer than usual, or input from outside is awaited;
    ``stuck``: nothing will come without the culprit; ``over``: the run has ended; ``silent``: no agent is heard."""
    sentence: str
    """The finding in one sentence."""
    culprit: str | None = None
    """Id of an agent, a role of which no agent lives, ``broker``; None: nobody is to blame."""
    evidence: tuple[str, ...] = ()
    """Facts behind it, a line each."""
    lever: str = ""
    """The remedy: a command, or settings; empty where nothing is to be done."""
    edges: tuple[Edge, ...] = ()
    """All waits that agents report, longest first."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that limits the throughput of a run that moves."""

    stage: Stage
    sentence: str
    lever: str
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the time, 0 to 1, in which each stage is at work, where known."""
