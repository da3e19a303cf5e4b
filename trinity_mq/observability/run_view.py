"""The displayed state of a run, from heartbeats, metrics and process events. It does no I/O: the time is an
argument.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from trinity_mq.messages import (
    Compatibility,
    EmptyBatchStatus,
    ExplorerStatus,
    FailureStatus,
    GateStatus,
    GatewayStatus,
    Heartbeat,
    Metrics,
    TrainerStatus,
    Version,
    mixture,
)
from trinity_mq.observability.diagnosis import HeartbeatWindow, Observation, Room, RunFinding, diagnose
from trinity_mq.observability.report.figures import TRAIN_STEPS, evaluations
from trinity_mq.roles import row_of
from trinity_mq.runtime.processes.supervisor import ProcessEvent

STALENESS = "sample/staleness/max"
TOKENS_PER_SECOND = ("rollout/tokens_per_second", "perf/tokens_per_second")
"""The first metric with a value is used: sampled tokens, else trained tokens."""
RATE_WINDOW = 50
"""Maximum number of recent progress changes from which the remaining time is estimated."""
WAIT_SHOWN = 10.0
"""Minimum seconds of a displayed wait. Shorter waits are normal."""
STILL_SHOWN = 30.0
"""Seconds without any progress after which the reason is shown."""
OVER = ("finished", "gone")
"""States after which no heartbeats are expected."""


@dataclass(frozen=True, slots=True)
class AgentRow:
    """Displayed state of one agent."""

    id: str
    state: str
    """The last reported state, or ``silent`` after its lease expired."""
    waits_for: str | None = None
    waits_seconds: float = 0.0

    @property
    def alive(self) -> bool:
        """True if the agent's lease is valid and the agent has not ended."""
        return self.state not in {"silent", *OVER}


class RunView:
    """Collects messages and events. Displays show its attributes.

    Args:
        run: The run's name.
        total: Number of steps of the run. None: the explorer will report it.
    """

    def __init__(self, run: str, total: int | None) -> None:
        self.run, self.total = run, total
        self.step = 0
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self.results: dict[str, tuple[int, float]] = {}
        """Latest evaluation result of each taskset: (step, accuracy)."""
        self.depths: Mapping[str, int | None] = {}
        """Number of messages in queues, by display name."""
        self._dead = 0
        """Last known number of dead letters. It is kept while the broker is away, so that the same dead letters are not
        news again.
        """
        self._heartbeats: dict[str, tuple[Heartbeat, float]] = {}
        self._passed: collections.deque[tuple[float, int]] = collections.deque(maxlen=RATE_WINDOW)
        self.train_steps: int | None = None
        """Number of train steps that changed the weights, over all starts of the run. None: not reported yet."""
        self.failures: list[FailureStatus] = []
        """The most frequent kinds of slice failures."""
        self._reported_failures: set[str] = set()
        """Failure texts already reported as news."""
        self._empty: EmptyBatchStatus | None = None
        self._sync_trouble = ""
        self._gateways: dict[str, str] = {}
        """Gateway URLs already reported as news, by gateway id."""
        self._news: list[str] = []
        self._reported_left_over = self._reported_dropped = False
        self._watch: HeartbeatWindow | None = None
        """Created at the first heartbeat."""
        self.began = math.inf
        """Time from which heartbeats are expected."""
        self.finding: RunFinding | None = None
        """The reason why nothing progresses. None: something progressed recently."""
        self._reported_culprits: set[str | None] = set()
        """Culprits and remedies already reported since the last progress. It is a set because two runners may alternate
        as the slowest.
        """

    def receive(self, message: object, now: float) -> None:
        """Process a heartbeat or a metrics message. Other messages are ignored."""
        if isinstance(message, Heartbeat):
            if self._watch is None:
                self._watch = HeartbeatWindow(now)
            self._watch.receive(message, now)
            self._receive_heartbeat(message, now)
        elif isinstance(message, Metrics):
            if self._watch is not None:
                self._watch.receive(message, now)
            self.metrics.update(message.values)
            self._receive_train_steps(message.values.get(TRAIN_STEPS))
            for taskset, value in evaluations(message.values).items():
                if self.results.get(taskset) != (message.step, value):
                    self.results[taskset] = (message.step, value)
                    self.add_news(f"evaluation at step {message.step}: {taskset} accuracy {value:.3f}")

    def _receive_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        previous, _ = self._heartbeats.get(heartbeat.id, (None, 0.0))
        if previous and previous.incarnation == heartbeat.incarnation and previous.seq >= heartbeat.seq:
            return
        self._heartbeats[heartbeat.id] = (heartbeat, now)
        if isinstance(heartbeat.detail, ExplorerStatus):
            self._receive_explorer(heartbeat.detail)
        elif isinstance(heartbeat.detail, GatewayStatus):
            self._receive_gateway(heartbeat.id, heartbeat.detail)
        elif isinstance(heartbeat.detail, TrainerStatus):
            trouble = heartbeat.detail.sync.trouble if heartbeat.detail.sync else ""
            if trouble and trouble != self._sync_trouble:
                self.add_news(f"a weight sync was aborted, and will be retried: {trouble}")
            self._sync_trouble = trouble
            self._receive_train_steps(heartbeat.detail.step if heartbeat.detail.generation else None)
            step = heartbeat.detail.progress
            if step is not None and step != self.step:
                if step < self.step:
                    self._passed.clear()  # the trainer returned to its checkpoint
                self.step = step
                self._passed.append((now, step))

    def _receive_gateway(self, name: str, status: GatewayStatus) -> None:
        if status.url and self._gateways.get(name) != status.url:
            self._gateways[name] = status.url
            self.add_news(f"{name} answers at {status.url}: POST {status.url}/sessions")

    def _receive_train_steps(self, steps: float | None) -> None:
        if steps is not None:
            self.train_steps = max(self.train_steps or 0, round(steps))

    def _receive_explorer(self, status: ExplorerStatus) -> None:
        self.total = status.total_batches or self.total
        if status.left_over and not self._reported_left_over and not status.opened:
            self.add_news(
                f"the broker held {status.left_over} messages of an earlier run {self.run!r}: this one ignores them "
                f"(`trinity-mq broker clean {self.run}` deletes them when no run of this name is running)"
            )
            self._reported_left_over = True
        if status.dropped_dead and not self._reported_dropped:
            self.add_news(
                "the queue of dead letters is full and drops the oldest ones; `trinity-mq why` counts them, and "
                "`trinity-mq dead` empties it"
            )
            self._reported_dropped = True
        if status.failures:
            self.failures = status.failures
        for failure in status.failures:
            if failure.text not in self._reported_failures:
                self._reported_failures.add(failure.text)
                self.add_news(failure.line())
        if status.empty is not None and status.empty != self._empty:
            self.add_news(status.empty.line())
        self._empty = status.empty

    def set_depths(self, depths: Mapping[str, int | None]) -> None:
        """Record the depths of queues by display name."""
        dead = depths.get("dead")
        if dead and dead > self._dead:
            self.add_news(f"{dead} dead letter{'s' if dead > 1 else ''}: see `trinity-mq dead list {self.run}`")
        self._dead = self._dead if dead is None else dead
        self.depths = dict(depths)

    def still(self, now: float) -> float:
        """Return the seconds since the last progress, or, before the first heartbeat, the seconds since heartbeats are
        expected.
        """
        return max(0.0, now - (self.began if self._watch is None else self._watch.moved_at))

    def observation(
        self,
        now: float,
        *,
        broker: str = "",
        expected: Mapping[str, int] | None = None,
        limits: Mapping[str, float] | None = None,
        room: frozenset[Room] | None = None,
    ) -> Observation:
        """Return the observation at ``now`` for a diagnosis. The arguments are documented at :class:`Observation`."""
        watch = self._watch or HeartbeatWindow(now)
        return watch.observation(now, depths=self.depths, broker=broker, expected=expected, limits=limits, room=room)

    def diagnose_stall(
        self,
        now: float,
        *,
        broker: str = "",
        expected: Mapping[str, int] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        """Diagnose why nothing progresses, after :data:`STILL_SHOWN` seconds without progress. Each culprit is reported
        as news once.

        Before the first heartbeat agents may still be loading, so only the broker can be the culprit. The arguments are
        documented at :class:`trinity_mq.observability.diagnosis.Observation`.
        """
        self.finding = None
        if self.still(now) < STILL_SHOWN or (self._watch is None and not broker):
            self._reported_culprits.clear()
            return
        finding = diagnose(self.observation(now, broker=broker, expected=expected, limits=limits))
        if finding.state in {"moving", "over"}:
            return
        self.finding = finding
        if not {finding.culprit, finding.lever} & self._reported_culprits:
            self._reported_culprits |= {finding.culprit, finding.lever}
            remedy = f"; what to do: {finding.lever}" if finding.lever else ""
            self.add_news(f"no progress for {self.still(now):.0f} s: {finding.sentence}{remedy}")

    def add_event(self, event: ProcessEvent) -> None:
        """Add news of a process event, if the event is worth a line."""
        if event.what == "restarting":
            restart = f"restarts in {event.delay:g} s (restart {event.restarts})"
            self.add_news(f"{event.name} died and {restart}; see logs/{event.name}.*{_output_suffix(event)}")
        elif event.what == "killed":
            self.add_news(f"{event.name} did not end in time and was killed")
        elif event.what == "failed":
            self.add_news(
                f"{event.name} failed permanently (exit code {event.code}): {event.reason}{_output_suffix(event)}"
            )

    def add_news(self, text: str) -> None:
        """Add a line of news."""
        self._news.append(text)

    def take_news(self) -> list[str]:
        """Return and clear the news since the last call."""
        news, self._news = self._news, []
        return news

    def clear_momentary_metrics(self) -> None:
        """Drop the metrics that hold only for the moment, for example after a restart."""
        for name in (*TOKENS_PER_SECOND, STALENESS):
            self.metrics.pop(name, None)

    def final_state(self, agent: str) -> str | None:
        """Return ``finished`` or ``gone`` for an agent that has ended, else None."""
        heartbeat, _ = self._heartbeats.get(agent, (None, 0.0))
        return heartbeat.state if heartbeat and heartbeat.state in OVER else None

    def heartbeats(self, now: float) -> dict[str, tuple[Heartbeat, float]]:
        """Return (last heartbeat, its age in seconds at ``now``) by agent id."""
        return {name: (heartbeat, max(0.0, now - at)) for name, (heartbeat, at) in self._heartbeats.items()}

    def agents(self, now: float) -> list[AgentRow]:
        """Return the agents at ``now``, a time on the clock of :meth:`receive`."""
        order = sorted(
            self._heartbeats.values(),
            key=lambda item: (row_of(item[0].role).shown, item[0].id),
        )
        return [_row(heartbeat, now - at) for heartbeat, at in order]

    def releases(self, now: float) -> dict[Compatibility, list[str]]:
        """Return the ids of the agents alive at ``now``, by release."""
        living = (beat for beat, at in self._heartbeats.values() if _row(beat, now - at).alive)
        return mixture(living)

    @property
    def version(self) -> str | None:
        """The weight version committed last."""
        return next((version_text(trainer.committed) for trainer in self._trainers() if trainer.committed), None)

    @property
    def gate(self) -> GateStatus:
        """The trainer's report on weight syncs."""
        return next((trainer.sync for trainer in self._trainers() if trainer.sync), GateStatus())

    @property
    def sessions(self) -> GatewayStatus | None:
        """The session counts that the active gateway reports. None: no gateway has reported."""
        details = (heartbeat.detail for heartbeat, _ in self._heartbeats.values() if heartbeat.state not in OVER)
        gateways = [detail for detail in details if isinstance(detail, GatewayStatus) and detail.url]
        return max(gateways, key=lambda gateway: gateway.acting, default=None)

    def _trainers(self) -> list[TrainerStatus]:
        details = (heartbeat.detail for heartbeat, _ in self._heartbeats.values())
        return [detail for detail in details if isinstance(detail, TrainerStatus)]

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last step at the recent pace, or None if it is unknown or overdue."""
        if self.total is None or len(self._passed) < 2:
            return None
        (first, step), (last, now_step) = self._passed[0], self._passed[-1]
        seconds_per_step = (last - first) / (now_step - step)
        remaining_s = (self.total - now_step) * seconds_per_step - (now - last)
        return remaining_s if remaining_s > 0 else 0.0 if now_step >= self.total else None


def _output_suffix(event: ProcessEvent) -> str:
    return f"\n  {event.output}" if event.output else ""


def _row(heartbeat: Heartbeat, age: float) -> AgentRow:
    if heartbeat.state in OVER:
        return AgentRow(heartbeat.id, heartbeat.state)
    if age >= heartbeat.lease:
        return AgentRow(heartbeat.id, "silent", "a heartbeat", age)
    waits = heartbeat.waits_seconds + age if heartbeat.waits_for else 0.0
    return AgentRow(heartbeat.id, heartbeat.state, heartbeat.waits_for, waits)


def version_text(version: Version | None) -> str:
    """Return a weight version for a person, or ``-`` for None."""
    return "-" if version is None else f"{version[0]}.{version[1]}"
