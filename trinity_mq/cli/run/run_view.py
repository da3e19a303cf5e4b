"""The state of a run for a person, from heartbeats, metrics and process events. Pure: time is an argument."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinity_mq.cli.run.metric_names import REWARD, STALENESS, TOKENS_PER_SECOND, evaluations
from trinity_mq.messages import ExplorerStatus, GateStatus, Heartbeat, Metrics, TrainerStatus, Version
from trinity_mq.runtime.supervisor import ProcessEvent

RATE_WINDOW = 50
"""Steps over which the time left is estimated."""
WAIT_SHOWN = 10.0
"""Seconds; shorter waits are normal and not shown."""
SYNC_COUNTS = ("syncs", "aborts", "pulls", "canary_failures", "quarantined")
OVER = ("finished", "gone")
"""States after which no heartbeats are expected."""


@dataclass(frozen=True, slots=True)
class AgentRow:
    """One agent."""

    id: str
    role: str
    state: str
    """The last reported state; ``silent`` after its lease."""
    waits_for: str | None = None
    waits_seconds: float = 0.0

    @property
    def alive(self) -> bool:
        """The agent sends heartbeats and has not ended."""
        return self.state not in {"silent", *OVER}


@dataclass(frozen=True, slots=True)
class MemberRow:
    """One engine in the gate, as the trainer reports it."""

    id: str
    version: str | None
    """The committed version that it serves; None: no committed version."""
    state: str


@dataclass(frozen=True, slots=True)
class SyncRow:
    """The last weight sync, and counts over all syncs."""

    version: str | None
    phases: Mapping[str, float]
    """Milliseconds."""
    counts: Mapping[str, int]
    """Those that are not zero."""


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot of everything that is shown. None: not known yet."""

    run: str
    step: int = 0
    total: int | None = None
    reward: float | None = None
    results: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Latest evaluation of each taskset: step, accuracy."""
    tokens_per_second: float | None = None
    version: str | None = None
    staleness: float | None = None
    depths: Mapping[str, int | None] = field(default_factory=dict)
    agents: tuple[AgentRow, ...] = ()
    seconds_left: float | None = None
    members: tuple[MemberRow, ...] = ()
    sync: SyncRow | None = None

    @property
    def alive(self) -> int:
        """The number of agents that are alive."""
        return sum(agent.alive for agent in self.agents)

    @property
    def waiting(self) -> tuple[AgentRow, ...]:
        """Agents that have waited for at least ``WAIT_SHOWN`` seconds."""
        return tuple(agent for agent in self.agents if agent.waits_for and agent.waits_seconds >= WAIT_SHOWN)


@dataclass(slots=True)
class _Heard:
    beat: Heartbeat
    at: float


class RunView:
    """Collects messages and events; returns :class:`View` and news.

    Args:
        run: The run's name.
        total: Steps of the run, None where only the explorer will know.
    """

    def __init__(self, run: str, total: int | None) -> None:
        self._run, self._total = run, total
        self._agents: dict[str, _Heard] = {}
        self._metrics: dict[str, float] = {}
        self._results: dict[str, tuple[int, float]] = {}
        self._depths: dict[str, int | None] = {}
        self._step = 0
        self._passed: collections.deque[tuple[float, int]] = collections.deque(maxlen=RATE_WINDOW)
        self._news: list[str] = []

    def receive(self, message: object, now: float) -> None:
        """Take in a heartbeat or metrics; other messages are ignored."""
        if isinstance(message, Heartbeat):
            self._hear_beat(message, now)
        elif isinstance(message, Metrics):
            self._hear_metrics(message)

    def set_depths(self, depths: Mapping[str, int | None]) -> None:
        """Take in the depths of queues, by the names to be shown."""
        dead, before = depths.get("dead"), self._depths.get("dead")
        if dead and dead > (before or 0):
            self._news.append(f"{dead} dead letter{'s' if dead > 1 else ''}: see `trinity-mq dead list`")
        self._depths = dict(depths)

    def add_event(self, event: ProcessEvent) -> None:
        """Add news of a process event, if it is worth a line."""
        if event.what == "restarting":
            self._news.append(
                f"{event.name} died and starts again in {event.delay:g} s (restart {event.restarts}); "
                f"see logs/{event.name}.*"
            )
        elif event.what == "killed":
            self._news.append(f"{event.name} did not end in time and was killed")
        elif event.what == "failed":
            self._news.append(f"{event.name} failed for good (exit code {event.code}): {event.reason}")

    def final_state(self, agent: str) -> str | None:
        """Return the state in which an agent ended, ``finished`` or ``gone``; None while it has not."""
        heard = self._agents.get(agent)
        return heard.beat.state if heard and heard.beat.state in OVER else None

    def add_news(self, text: str) -> None:
        """Add a line of news."""
        self._news.append(text)

    def take_news(self) -> list[str]:
        """Return and clear the lines since the last call."""
        news, self._news = self._news, []
        return news

    def view(self, now: float) -> View:
        """Return the state at ``now``, on the clock of :meth:`receive`."""
        tokens = next((self._metrics[name] for name in TOKENS_PER_SECOND if name in self._metrics), None)
        return View(
            run=self._run,
            step=self._step,
            total=self._total,
            reward=self._metrics.get(REWARD),
            results=dict(self._results),
            tokens_per_second=tokens,
            version=self._version(),
            staleness=self._metrics.get(STALENESS),
            depths=dict(self._depths),
            agents=tuple(_row(heard, now) for _, heard in sorted(self._agents.items(), key=_by_role)),
            seconds_left=self._seconds_left(now),
            members=_members(self._gate()),
            sync=_sync(self._gate()),
        )

    def _hear_beat(self, beat: Heartbeat, now: float) -> None:
        known = self._agents.get(beat.id)
        if known and known.beat.incarnation == beat.incarnation and known.beat.seq >= beat.seq:
            return
        self._agents[beat.id] = _Heard(beat, now)
        if isinstance(beat.detail, ExplorerStatus):
            self._total = beat.detail.total_batches or self._total
        if isinstance(beat.detail, TrainerStatus):
            step = beat.detail.progress
            if step is not None and step != self._step:
                if step < self._step:
                    self._passed.clear()  # went back to its checkpoint
                self._step = step
                self._passed.append((now, step))

    def _hear_metrics(self, metrics: Metrics) -> None:
        self._metrics.update(metrics.values)
        for taskset, value in evaluations(metrics.values).items():
            if self._results.get(taskset) == (metrics.step, value):
                continue
            self._results[taskset] = (metrics.step, value)
            self._news.append(f"evaluation at step {metrics.step}: {taskset} accuracy {value:.3f}")

    def _version(self) -> str | None:
        return next((_version(trainer.committed) for trainer in self._trainers() if trainer.committed), None)

    def _gate(self) -> GateStatus:
        """Return the trainer's status of its gate."""
        return next((trainer.sync for trainer in self._trainers() if trainer.sync), GateStatus())

    def _trainers(self) -> list[TrainerStatus]:
        details = (heard.beat.detail for heard in self._agents.values())
        return [detail for detail in details if isinstance(detail, TrainerStatus)]

    def _seconds_left(self, now: float) -> float | None:
        if self._total is None or len(self._passed) < 2:
            return None
        (first, step), (last, now_step) = self._passed[0], self._passed[-1]
        a_step = (last - first) / (now_step - step)
        return max(0.0, (self._total - now_step) * a_step - (now - last))


def _by_role(item: tuple[str, _Heard]) -> tuple[int, str]:
    roles = ("explorer", "engine", "runner", "operator", "trainer")
    role = item[1].beat.role
    return roles.index(role) if role in roles else len(roles), item[0]


def _row(heard: _Heard, now: float) -> AgentRow:
    beat, age = heard.beat, now - heard.at
    if beat.state in OVER:
        return AgentRow(beat.id, beat.role, beat.state)
    if age >= beat.lease:
        return AgentRow(beat.id, beat.role, "silent", "a sign of life", age)
    return AgentRow(beat.id, beat.role, beat.state, beat.waits_for, beat.waits_seconds + age if beat.waits_for else 0.0)


def _members(gate: GateStatus) -> tuple[MemberRow, ...]:
    return tuple(
        MemberRow(name, _version(member.version), member.state) for name, member in sorted(gate.members.items())
    )


def _sync(gate: GateStatus) -> SyncRow | None:
    if not gate.phases:
        return None
    counts = {name: getattr(gate, name) for name in SYNC_COUNTS}
    return SyncRow(_version(gate.version), gate.phases, {name: count for name, count in counts.items() if count})


def _version(version: Version | None) -> str | None:
    return None if version is None else f"{version[0]}.{version[1]}"
