"""The state of a run: the only model of its agents, progress, rates, waits and news.

It is made from heartbeats, metrics, queue depths and process events. The display, the page, the exporter, the diagnosis
and the observer of ``trinity-mq chaos`` are views of it. It does no I/O. Each time is an argument, in seconds of any
clock that the caller uses throughout. :class:`Trends` keeps values over time: progress, busy shares of stages, and
rates of counters.
"""

from __future__ import annotations

import collections
import math
import socket
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_mq.config import Config
from trinity_mq.messages import (
    AgentStatus,
    Compatibility,
    EngineStatus,
    ExplorerStatus,
    FailureStatus,
    GateStatus,
    GatewayStatus,
    Heartbeat,
    Metrics,
    OperatorStatus,
    RunnerStatus,
    TrainerStatus,
    Version,
    mixture,
)
from trinity_mq.observability.diagnosis import Observation, Room, RunFinding, diagnose
from trinity_mq.observability.report.figures import TRAIN_STEPS, evaluations
from trinity_mq.roles import row_of
from trinity_mq.runtime.processes.supervisor import ProcessEvent

S = TypeVar("S", bound=AgentStatus)

STALENESS = "sample/staleness/max"
TOKENS_PER_SECOND = ("rollout/tokens_per_second", "perf/tokens_per_second")
"""Metrics of the token rate. The first metric with a value is used: rate of sampled tokens, else of trained tokens."""
PACE_STEPS = 50
"""Maximum number of recent progress changes from which the remaining time is estimated."""
WAIT_SHOWN = 10.0
"""Minimum seconds of a displayed wait. Shorter waits are normal."""
STILL_SHOWN = 30.0
"""Seconds without any progress after which the reason is shown."""
MOST_NEWS = 200

K = TypeVar("K", bound=Hashable)
Samples = collections.deque[tuple[float, float]]
"""Pairs of a time and a value, oldest first."""
STAGE_METRICS = frozenset({"trainer/idle_frac", "time/batch", "time/sync"})
"""Metrics that measure how busy a stage is. They are averaged, because values of a single step vary."""
WINDOW = 60.0
"""Seconds over which busy shares and the metrics of stages are averaged, and for which counters are kept."""
MIN_SAMPLES = 5
"""Minimum number of heartbeats of a stage within :data:`WINDOW`; with fewer, its busy share is unknown."""
RATE_SECONDS = 20.0
"""Seconds over which the rates of counters are measured."""


@dataclass(frozen=True, slots=True)
class AgentRow:
    """State of one agent at one moment."""

    beat: Heartbeat
    """The agent's last heartbeat."""
    state: str
    """The last reported state, or ``silent`` after its lease expired."""
    waits_for: str | None = None
    waits_seconds: float = 0.0

    @property
    def id(self) -> str:
        """Id of the agent."""
        return self.beat.id

    @property
    def alive(self) -> bool:
        """True if the agent's lease is valid and the agent has not ended."""
        return self.state != "silent" and not self.beat.has_ended


class RunState:
    """The state of one run.

    Args:
        run: The run's name.
        total: Number of training batches of the run. None: from ``config``. The explorer's report replaces it.
        config: Configuration of the run. None: unknown.
        room: Free resources of this machine. They are used only if the run works on this machine.
    """

    def __init__(
        self,
        run: str,
        total: int | None = None,
        *,
        config: Config | None = None,
        room: frozenset[Room] | None = None,
    ) -> None:
        self.run = run
        self.total = config.buffer.total_steps if total is None and config is not None else total
        self._config, self._room = config, room
        self.connection = ""
        """Description of a connection problem with the broker. Empty: connected, or no connection is needed."""
        self.broker_trouble = ""
        """Reason why the broker does not accept messages, such as an alarm. Empty: it accepts messages."""
        self.is_live = False
        """True while a ``BrokerSource`` is connected to the run's broker. Other users of this class do not set it."""
        self.run_id: str | None = None
        """Id of the run, reported by its explorer."""
        self.finished = False
        """True if the explorer has reported that the run is over."""
        self.step = 0
        """Number of batches that the trainer has consumed, from its last heartbeat."""
        self.metrics_step = 0
        """Number of batches that the trainer has consumed, from its last metrics."""
        self.train_steps: int | None = None
        """Number of train steps that changed the weights, over all starts of the run. None: not reported yet."""
        self.metrics: dict[str, float] = {}
        """The latest value of each metric."""
        self.results: dict[str, tuple[int, float]] = {}
        """Latest evaluation result of each taskset: (step, accuracy, or the reward if no accuracy is reported)."""
        self.depths: Mapping[str, int | None] = {}
        """Number of messages in queues, by display name."""
        self.failures: list[FailureStatus] = []
        """The most frequent kinds of slice failures."""
        self.reviews = 0
        """Number of rollouts that wait for a person's verdict."""
        self.news: collections.deque[tuple[float | None, str]] = collections.deque(maxlen=MOST_NEWS)
        """News lines, each with the time of its event. None: the time is unknown."""
        self.problems: collections.deque[str] = collections.deque(maxlen=20)
        """Messages about data that could not be read."""
        self.finding: RunFinding | None = None
        """The reason why nothing progresses, from the last :meth:`diagnose_stall`. None: something progressed recently,
        the run is over, or no reason is known.
        """
        self.began = math.inf
        """Time from which heartbeats are expected. Infinite: not set."""
        self.trends = Trends()
        self._heartbeats: dict[str, tuple[Heartbeat, float]] = {}
        self._last_seq: dict[tuple[str, str], int] = {}
        """Number of the last heartbeat by (agent id, incarnation)."""
        self._pace: collections.deque[tuple[float, int]] = collections.deque(maxlen=PACE_STEPS)
        self._dead = 0
        """Last known number of dead letters. It is kept while the broker is away, so that the same dead letters are not
        news again.
        """
        self._gateway_urls: dict[str, str] = {}
        """Gateway URLs already reported as news, by gateway id."""
        self._reported: set[Hashable] = set()
        """Keys of the news that are reported only once."""
        self._reported_culprits: set[str] = set()
        """Culprits and remedies already reported since the last progress. It is a set because two runners may alternate
        as the slowest.
        """

    # -- input

    def receive(self, message: object, now: float) -> bool:
        """Process a heartbeat or a metrics message. Return False if it was ignored: it is another message, or a
        heartbeat that is not newer than the last heartbeat of its process.
        """
        if isinstance(message, Heartbeat):
            return self._receive_heartbeat(message, now)
        if isinstance(message, Metrics):
            self._receive_metrics(message, now)
            return True
        return False

    def _receive_metrics(self, message: Metrics, now: float) -> None:
        self.trends.add_metrics(message.values, now)
        self.metrics.update(message.values)
        if message.role == "trainer":
            self.metrics_step = message.step
        self._receive_train_steps(message.values.get(TRAIN_STEPS))
        for taskset, value in evaluations(message.values).items():
            if self.results.get(taskset) != (message.step, value):
                self.results[taskset] = (message.step, value)
                self.add_news(f"evaluation at step {message.step}: {taskset} accuracy {value:.3f}", now)

    def _receive_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        process = (beat.id, beat.incarnation)
        if beat.seq <= self._last_seq.get(process, -1):
            return False  # a repeated publish that arrived late
        self._last_seq[process] = beat.seq
        previous, _ = self._heartbeats.get(beat.id, (None, 0.0))
        self._heartbeats[beat.id] = (beat, now)
        self.trends.add_heartbeat(beat, now)
        # the first heartbeat received from a running agent also reports earlier events, whose times are unknown
        at = None if previous is None and beat.seq > 1 else now
        before = None if previous is None else previous.detail
        match beat.detail:
            case ExplorerStatus() as status:
                self._receive_explorer(status, before, at)
            case GatewayStatus(url=url) if url and url != self._gateway_urls.get(beat.id):
                self._gateway_urls[beat.id] = url
                self.add_news(f"{beat.id} answers at {url}: POST {url}/sessions", at)
            case TrainerStatus() as status:
                self._receive_trainer(status, before, now, at)
        return True

    def _receive_explorer(self, status: ExplorerStatus, before: AgentStatus | None, at: float | None) -> None:
        self.total = status.total_batches or self.total
        self.run_id = status.run_id or self.run_id
        self.finished = self.finished or status.finished
        if status.left_over and not status.opened:
            self._add_once(
                "left_over",
                f"the broker held {status.left_over} messages of an earlier run {self.run!r}: this one ignores them "
                f"(`trinity-mq broker clean {self.run}` deletes them when no run of this name is running)",
                at,
            )
        if status.dropped_dead:
            self._add_once(
                "dropped_dead",
                "the queue of dead letters is full and drops the oldest ones; `trinity-mq why` counts them, and "
                "`trinity-mq dead` empties it",
                at,
            )
        self.failures = status.failures or self.failures
        for failure in status.failures:
            self._add_once(("failure", failure.text), failure.line(), at)
        if status.empty is not None and not (isinstance(before, ExplorerStatus) and before.empty == status.empty):
            self.add_news(status.empty.line(), at)

    def _receive_trainer(self, status: TrainerStatus, before: AgentStatus | None, now: float, at: float | None) -> None:
        trouble = _sync_trouble(status)
        if trouble and trouble != _sync_trouble(before):
            self.add_news(f"a weight sync was aborted, and will be retried: {trouble}", at)
        self._receive_train_steps(status.step if status.generation else None)
        step = status.progress
        if step is not None and step != self.step:
            if step < self.step:
                self._pace.clear()  # the trainer returned to its checkpoint
            self.step = step
            self._pace.append((now, step))

    def _receive_train_steps(self, steps: float | None) -> None:
        if steps is not None:
            self.train_steps = max(self.train_steps or 0, round(steps))

    def set_depths(self, depths: Mapping[str, int | None], now: float | None = None) -> None:
        """Record the depths of queues by display name, and report new dead letters as news. ``now`` is the time of
        these news; None: unknown.
        """
        dead = depths.get("dead")
        if dead and dead > self._dead:
            at = now if self.depths else None  # the dead letters may be older than the first depths
            self.add_news(f"{dead} dead letter{'s' if dead > 1 else ''}: see `trinity-mq dead list {self.run}`", at)
        self._dead = self._dead if dead is None else dead
        self.depths = dict(depths)

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

    def add_news(self, text: str, at: float | None = None) -> None:
        """Add a line of news about an event at the time ``at``."""
        self.news.append((at, text))

    def _add_once(self, key: Hashable, text: str, at: float | None) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self.add_news(text, at)

    def take_news(self) -> list[str]:
        """Return and clear the news."""
        news = [text for _, text in self.news]
        self.news.clear()
        return news

    def clear_momentary_metrics(self) -> None:
        """Drop the metrics that hold only for the moment, for example after a restart."""
        for name in (*TOKENS_PER_SECOND, STALENESS):
            self.metrics.pop(name, None)

    # -- diagnosis

    def still(self, now: float) -> float:
        """Return the seconds since the last progress, or, before the first heartbeat, the seconds since heartbeats are
        expected.
        """
        return max(0.0, now - (self.began if self.trends.moved_at == math.inf else self.trends.moved_at))

    def observation(self, now: float) -> Observation:
        """Return the observation at ``now`` for a diagnosis."""
        config = self._config
        return Observation(
            heartbeats={name: (beat, now - at) for name, (beat, at) in self._heartbeats.items()},
            depths=self.depths,
            broker=self.connection or self.broker_trouble,
            still=self.still(now),
            listened=max(0.0, now - self.trends.began),
            expected={} if config is None else config.agent_counts,
            limits={} if config is None else {"explorer.max_timeout": config.explorer.max_timeout},
            busy=self.trends.busy(now),
            metrics=self.trends.metrics(),
            room=self._room if self._is_here else None,
        )

    @property
    def _is_here(self) -> bool:
        """True if explorer and trainer report that they run on this machine."""
        places = [status.place for status in self.statuses(ExplorerStatus).values()]
        places += [status.place for status in self.statuses(TrainerStatus).values()]
        return bool(places) and all(place.startswith(f"{socket.gethostname()}:") for place in places)

    def diagnose_stall(self, now: float) -> None:
        """Diagnose why nothing progresses, after :data:`STILL_SHOWN` seconds without progress, and store the reason in
        :attr:`finding`. Until something progresses again, each culprit and each remedy, or the state of a finding that
        has neither, is reported as news only once.
        Before the first heartbeat agents may still be loading, so only the broker can be the culprit.
        """
        self.finding = None
        if self.still(now) < STILL_SHOWN or not (self._heartbeats or self.broker_trouble):
            self._reported_culprits.clear()
            return
        finding = diagnose(self.observation(now))
        if finding.state in {"moving", "over"}:
            return
        self.finding = finding
        subjects = {subject for subject in (finding.culprit, finding.lever) if subject} or {finding.state}
        if not subjects & self._reported_culprits:
            self._reported_culprits |= subjects
            remedy = f"; what to do: {finding.lever}" if finding.lever else ""
            self.add_news(f"no progress for {self.still(now):.0f} s: {finding.sentence}{remedy}", now)

    # -- output

    def agents(self, now: float) -> list[AgentRow]:
        """Return the states at ``now`` of all agents that have sent a heartbeat, ordered by role and id."""
        order = sorted(self._heartbeats.values(), key=lambda item: (row_of(item[0].role).shown, item[0].id))
        return [_row(beat, now - at) for beat, at in order]

    def statuses(self, kind: type[S]) -> dict[str, S]:
        """Return the last status of each agent that sends statuses of this type, by agent id. The agents may have
        ended.
        """
        details = {name: beat.detail for name, (beat, _) in self._heartbeats.items()}
        return {name: detail for name, detail in details.items() if isinstance(detail, kind)}

    def releases(self, now: float) -> dict[Compatibility, list[str]]:
        """Return the ids of the agents alive at ``now``, by release."""
        return mixture(row.beat for row in self.agents(now) if row.alive)

    def final_state(self, agent: str) -> str | None:
        """Return ``finished`` or ``gone`` for an agent that has ended, else None."""
        beat, _ = self._heartbeats.get(agent, (None, 0.0))
        return beat.state if beat and beat.has_ended else None

    @property
    def version(self) -> str | None:
        """The weight version committed last, as text. None: no version is committed."""
        trainers = self.statuses(TrainerStatus).values()
        return next((version_text(trainer.committed) for trainer in trainers if trainer.committed), None)

    @property
    def gate(self) -> GateStatus:
        """The trainer's report on weight syncs, with initial values before the first report."""
        return next((trainer.sync for trainer in self.statuses(TrainerStatus).values() if trainer.sync), GateStatus())

    @property
    def sessions(self) -> GatewayStatus | None:
        """The session counts that the active gateway reports. None: no gateway serves, as far as is known."""
        gateways = self.statuses(GatewayStatus).items()
        serving = [gateway for name, gateway in gateways if gateway.url and self.final_state(name) is None]
        return max(serving, key=lambda gateway: gateway.acting, default=None)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the trainer has consumed the last batch, at the recent pace, or None if
        it is unknown or overdue.
        """
        if self.total is None or len(self._pace) < 2:
            return None
        (first, step), (last, now_step) = self._pace[0], self._pace[-1]
        seconds_per_step = (last - first) / (now_step - step)
        remaining_s = (self.total - now_step) * seconds_per_step - (now - last)
        return remaining_s if remaining_s > 0 else 0.0 if now_step >= self.total else None


def _sync_trouble(status: AgentStatus | None) -> str:
    """Return why the last weight sync of a trainer was aborted. Empty: it was not aborted."""
    return status.sync.trouble if isinstance(status, TrainerStatus) and status.sync else ""


def _output_suffix(event: ProcessEvent) -> str:
    return f"\n  {event.output}" if event.output else ""


def _row(beat: Heartbeat, age: float) -> AgentRow:
    if beat.has_ended:
        return AgentRow(beat, beat.state)
    if age >= beat.lease:
        return AgentRow(beat, "silent", "a heartbeat", age)
    return AgentRow(beat, beat.state, beat.waits_for, beat.waits_seconds + age if beat.waits_for else 0.0)


def version_text(version: Version | None) -> str:
    """Return a weight version for a person, or ``-`` for None."""
    return "-" if version is None else f"{version[0]}.{version[1]}"


@dataclass(frozen=True, slots=True)
class _Measures:
    """Values in one heartbeat that are followed over time."""

    progress: tuple[Any, ...] = ()
    """Values that change when the agent makes progress."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Counters that rise until the process restarts, by name."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Busy share, 0 to 1, of each stage that the heartbeat describes, at the time of the heartbeat."""


class Trends:
    """Collects values of one run over time: progress, busy shares, metrics of stages, counters. Each time is an
    argument, in seconds of any clock.
    """

    def __init__(self) -> None:
        self.began = self.moved_at = math.inf
        """``began`` is the time from which heartbeats are received, ``moved_at`` the time of the last progress. Both
        are infinite before the first heartbeat, unless :meth:`begin` was called.
        """
        self.moves = 0
        """Number of progress changes seen."""
        self._progress: dict[str, tuple[Any, ...]] = {}
        self._busy: dict[str, Samples] = {}
        self._metrics: dict[str, Samples] = {}
        self._counters: dict[tuple[str, str], Samples] = {}
        """Values of each counter by (agent id, counter name)."""

    def begin(self, now: float) -> None:
        """Measure listening and standstill from ``now``. The first heartbeat does the same."""
        self.began = self.moved_at = now

    def add_metrics(self, values: Mapping[str, float], now: float) -> None:
        """Add those metrics of a step that are in :data:`STAGE_METRICS`. Metrics before the beginning are ignored."""
        for name in STAGE_METRICS & values.keys() if self.began < math.inf else ():
            _add_sample(self._metrics, name, values[name], now)

    def add_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Add a heartbeat that is newer than the earlier heartbeats of its agent."""
        if self.began == math.inf:
            self.begin(now)
        measures = _measure(beat)
        if self._progress.get(beat.id, measures.progress) != measures.progress:
            self.moved_at, self.moves = now, self.moves + 1
        self._progress[beat.id] = measures.progress
        for name, value in measures.counters.items():
            values = self._counters.get((beat.id, name))
            if values and value < values[-1][1]:
                values.clear()  # a restarted process counts from zero
            _add_sample(self._counters, (beat.id, name), value, now)
        if not beat.has_ended:
            for stage, share in measures.busy.items():
                _add_sample(self._busy, stage, share, now)

    def busy(self, now: float) -> dict[str, float]:
        """Return the busy share, 0 to 1, of each stage over the last minute. Stages with fewer than
        :data:`MIN_SAMPLES` heartbeats in this time are missing.
        """
        recent = {
            stage: [share for at, share in samples if at >= now - WINDOW] for stage, samples in self._busy.items()
        }
        return {stage: sum(shares) / len(shares) for stage, shares in recent.items() if len(shares) >= MIN_SAMPLES}

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric in :data:`STAGE_METRICS` over the minute that ends with its latest value."""
        return {name: sum(value for _, value in samples) / len(samples) for name, samples in self._metrics.items()}

    def rate(self, name: str, now: float) -> float:
        """Return a counter's increase per second in the last :data:`RATE_SECONDS`, summed over all agents. Agents with
        fewer than two values in this time are skipped.
        """
        total = 0.0
        for (_, counter), samples in self._counters.items():
            recent = [(at, value) for at, value in samples if at >= now - RATE_SECONDS]
            if counter == name and len(recent) > 1 and recent[-1][0] > recent[0][0]:
                total += (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        return total


def _add_sample(samples_by_key: dict[K, Samples], key: K, value: float, now: float) -> None:
    """Add a sample to the samples of ``key``, and remove its samples that are older than :data:`WINDOW`."""
    samples = samples_by_key.setdefault(key, collections.deque())
    samples.append((now, value))
    while samples[0][0] < now - WINDOW:
        samples.popleft()


def _measure(beat: Heartbeat) -> _Measures:
    """Return the values of a heartbeat that are followed over time."""
    works = beat.state == "working"
    progress: tuple[Any, ...]
    match beat.detail:
        case ExplorerStatus() as status:
            progress = beat.incarnation, status.opened, status.closed, status.evaluating, status.finished
            return _Measures(progress, {"closed": status.closed}, {"explorer": works})
        case RunnerStatus() as status:
            busy = {"runner": min(1.0, status.running / status.slots)} if status.slots else {}
            return _Measures((status.done,), {"slices": status.done}, busy)
        case TrainerStatus() as status:
            syncs = "sync" in status.doing
            progress = beat.incarnation, status.progress, status.step, status.committed, status.finished
            counters = {} if status.progress is None else {"progress": status.progress}
            return _Measures(progress, counters, {"trainer": bool(status.doing) and not syncs, "sync": syncs})
        case EngineStatus() as status:
            rollout = status.url is not None and status.role == "rollout"
            busy = {"engine": status.load > 0} if rollout else {}
            return _Measures((status.tokens, status.version), {"tokens": status.tokens}, busy)
        case GatewayStatus() as status:
            progress = status.calls, status.trained, status.open, status.parked
            return _Measures(progress, busy={"gateway": works and beat.waits_for is None})
        case OperatorStatus() as status:
            return _Measures((status.ticket,), busy={"operator": status.ticket is not None})
        case _:
            return _Measures()
