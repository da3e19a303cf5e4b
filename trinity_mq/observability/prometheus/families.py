"""The state of a run as metric families. Dashboards and alerts depend on the names, help texts and labels."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trinity_mq.messages import (
    EngineStatus,
    ExplorerStatus,
    GateStatus,
    GatewayStatus,
    RunnerStatus,
    TrainerStatus,
)
from trinity_mq.observability.run_state import AgentRow, RunState

Family = CounterMetricFamily | GaugeMetricFamily
STATES = ("starting", "working", "idle", "holding", "paused", "draining", "silent", "finished", "gone")
MOST_METRICS = 400
"""Maximum number of run metrics exported by name. The limit prevents a workflow from creating one series per task."""
SMOOTHED = 6
"""Number of recent values over which the maximum of the wanted runners is taken. A queue that is empty between two
batches must not end runners.
"""


class MonotonicCounters:
    """Counters that never decrease. When a restarted process counts from zero, its count is added to the earlier
    total.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], float] = {}
        self._totals: dict[tuple[str, ...], float] = {}

    def at(self, key: tuple[str, ...], value: float) -> float:
        """Return the total of ``key`` after its process reported ``value``."""
        last = self._last.get(key, 0.0)
        self._last[key] = value
        self._totals[key] = self._totals.get(key, 0.0) + (value - last if value >= last else 0.0)
        return self._totals[key]


def wanted_runners(waiting: int, in_work: int, slots: int) -> int:
    """Return the number of runners with ``slots`` slots each that would leave no slice waiting.

    Args:
        waiting: Slices in queues.
        in_work: Slices in progress on runners.
        slots: Slices that a runner processes concurrently. 0 means unknown and counts as 1.
    """
    return math.ceil((waiting + in_work) / max(1, slots))


class RunCollector(Collector):
    """Collects the families of one run.

    Args:
        state: The run's state.
        clock: Returns the current time, in seconds, on the clock of ``state``.
        slots: Training slices that a runner processes concurrently, used for the wanted runners. None: use the mean of
            the slots that runners report, evaluation slots included. Without runners, one slot per runner is assumed.
    """

    def __init__(self, state: RunState, clock: Callable[[], float], slots: int | None = None) -> None:
        self._state, self._clock, self._slots = state, clock, slots
        self._rising = MonotonicCounters()
        self._wanted_history: deque[int] = deque(maxlen=SMOOTHED)

    def describe(self) -> Iterable[Family]:
        """Return no families: their names are known only at collection."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield all families with their current values."""
        agents = self._state.agents(self._clock())
        yield from self._agents(agents)
        yield from self._queues()
        yield from self._progress()
        yield from self._runners(agents)
        yield from self._engines()
        yield from self._sync(self._state.gate)
        if (sessions := self._state.sessions) is not None:
            yield from self._sessions(sessions)
        yield from self._learning()

    # -- agents and queues

    def _agents(self, agents: Sequence[AgentRow]) -> Iterator[Family]:
        up = self._gauge("agent_up", "1 if heartbeats of the agent arrive, else 0", "role", "agent")
        state = self._gauge("agent_state", "1 for the state that the agent is in", "role", "agent", "state")
        waits = self._gauge("agent_waiting_seconds", "Time for which the agent has waited for others", "role", "agent")
        for row in agents:
            labels = self._labels(row.beat.role, row.id)
            up.add_metric(labels, float(row.alive))
            waits.add_metric(labels, row.waits_seconds)
            for name in {*STATES, row.state}:
                state.add_metric([*labels, name], float(name == row.state))
        yield from (up, state, waits)

    def _queues(self) -> Iterator[Family]:
        queues = self._gauge("queue_messages", "Messages that are ready in a queue", "queue")
        for name, depth in self._state.depths.items():
            if depth is not None:
                queues.add_metric(self._labels(name), depth)
        yield queues

    # -- progress

    def _progress(self) -> Iterator[Family]:
        explorers = self._state.statuses(ExplorerStatus).values()
        trainers = self._state.statuses(TrainerStatus).values()
        opened = max((status.opened for status in explorers), default=0)
        closed = max((status.closed for status in explorers), default=0)
        trained = max((status.progress or 0 for status in trainers), default=0)
        steps = max((status.step for status in trainers), default=0)
        yield self._counter("batches_opened", "Training batches that the explorer opened", opened)
        yield self._counter("batches_closed", "Training batches that were closed", closed)
        yield self._counter("batches_consumed", "Closed batches that the trainer consumed", trained)
        yield self._counter("train_steps", "Steps that changed the weights", steps)
        if self._state.total is not None:
            yield self._single("batches_wanted", "Training batches of the whole run", self._state.total)
        failed = sum(failure.failed for status in explorers for failure in status.failures)
        yield self._counter("slices_failed", "Slices that failed, of the most frequent kinds of failures", failed)

    def _runners(self, agents: Sequence[AgentRow]) -> Iterator[Family]:
        living = {row.id for row in agents if row.alive}
        runners = {name: status for name, status in self._state.statuses(RunnerStatus).items() if name in living}
        running = sum(status.running for status in runners.values())
        slots = sum(status.slots for status in runners.values())
        family = self._gauge("runner_slots", "Slots of all runners for slices", "state")
        family.add_metric(self._labels("busy"), running)
        family.add_metric(self._labels("free"), max(0, slots - running))
        yield family
        done = self._counters("slices_done", "Slices whose result a runner published", "agent")
        for name, status in runners.items():
            done.add_metric(self._labels(name), self._rising.at(("slices_done", name), status.done))
        yield done
        waiting = sum(self._state.depths.get(queue) or 0 for queue in ("tasks.train", "tasks.eval"))
        slots_per_runner = self._slots or (round(slots / len(runners)) if runners else 0)
        self._wanted_history.append(wanted_runners(waiting, running, slots_per_runner))
        yield self._single(
            "wanted_runners",
            "Number of runners with which no slice would wait, for autoscalers",
            max(self._wanted_history),
        )

    def _engines(self) -> Iterator[Family]:
        load = self._gauge("engine_load", "Sequences that an engine generates or that wait there", "agent")
        tokens = self._counters("engine_tokens", "Tokens that an engine sampled", "agent")
        restarts = self._counters("engine_restarts", "Starts of an engine's process after its first", "agent")
        used = self._gauge("engine_cache_used", "Fraction of an engine's KV cache in use", "agent")
        batch = self._gauge(
            "engine_batch", "Sequences in an engine's batch, or waiting for room in it", "agent", "state"
        )
        prompts = self._counters("engine_prompt_tokens", "Prompt tokens that an engine read", "agent", "source")
        lost = self._counters("engine_preemptions", "Sequences that an engine computed again for lack of room", "agent")
        for name, status in self._state.statuses(EngineStatus).items():
            if use := status.use:
                used.add_metric(self._labels(name), use.cache_used)
                for state in ("running", "waiting"):
                    batch.add_metric(self._labels(name, state), getattr(use, state))
                read = {"cache": use.cached_prompt_tokens, "computed": use.prompt_tokens - use.cached_prompt_tokens}
                for source, count in read.items():
                    rising = self._rising.at(("engine_prompt_tokens", source, name), count)
                    prompts.add_metric(self._labels(name, source), rising)
                lost.add_metric(self._labels(name), self._rising.at(("engine_preemptions", name), use.preemptions))
            if status.id is not None:
                load.add_metric(self._labels(name), status.load)
                tokens.add_metric(self._labels(name), self._rising.at(("engine_tokens", name), status.tokens))
                restarts.add_metric(self._labels(name), self._rising.at(("engine_restarts", name), status.restarts))
        yield from (load, tokens, restarts, used, batch, prompts, lost)

    def _sync(self, gate: GateStatus) -> Iterator[Family]:
        if gate.version is not None:
            yield self._single(
                "policy_generation", "Number of the trainer start that made the current weights", gate.version[0]
            )
            yield self._single("policy_step", "Train step of the weights committed last", gate.version[1])
        phases = self._gauge("sync_phase_seconds", "Duration of a phase of the last weight sync", "phase")
        for name, milliseconds in gate.phases.items():
            phases.add_metric(self._labels(name), milliseconds / 1000)
        yield phases
        yield self._counter("syncs", "Weight syncs that were committed", gate.syncs)
        yield self._counter("sync_aborts", "Attempts at a weight sync that were aborted", gate.aborts)
        yield self._counter("canary_failures", "Engines whose logprobs did not fit their weights", gate.canary_failures)
        yield self._single("engines_quarantined", "Engines that are quarantined", gate.quarantined)

    def _sessions(self, status: GatewayStatus) -> Iterator[Family]:
        sessions = self._gauge("sessions", "Sessions of agents that know only a base URL, by state", "state")
        for state in ("open", "parked", "waiting"):
            sessions.add_metric(self._labels(state), getattr(status, state))
        yield sessions
        for name, help_text in (
            ("calls", "Requests that the gateway answered"),
            ("unrecorded", "Answers that the broker had not confirmed in time"),
            ("trained", "Sessions that were trained on"),
            ("dropped", "Sessions that were dropped"),
        ):
            yield self._counter(f"sessions_{name}", help_text, getattr(status, name))

    # -- learning

    def _learning(self) -> Iterator[Family]:
        accuracy = self._gauge("eval_result", "Accuracy, else reward, of the last evaluation", "taskset")
        for taskset, (_, value) in self._state.results.items():
            accuracy.add_metric(self._labels(taskset), value)
        yield accuracy
        metric = self._gauge("metric", "The latest value of a metric of the run, by its name", "name")
        for name in sorted(self._state.metrics)[:MOST_METRICS]:
            value = self._state.metrics[name]
            if isinstance(value, int | float):
                metric.add_metric(self._labels(name), value)
        yield metric

    # -- families

    def _labels(self, *values: str) -> list[str]:
        return [self._state.run, *values]

    def _gauge(self, name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"tmq_{name}", f"{help_text}.", labels=["run", *labels])

    def _counters(self, name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"tmq_{name}", f"{help_text}.", labels=["run", *labels])

    def _single(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = self._gauge(name, help_text)
        family.add_metric(self._labels(), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = self._counters(name, help_text)
        family.add_metric(self._labels(), self._rising.at((name,), value))
        return family
