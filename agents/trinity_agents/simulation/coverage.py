"""States of the protocol's state machines that simulated runs reach, and the transitions into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args
from unittest import mock

from trinity_agents.runner.circuit import CircuitBreaker
from trinity_mq.messages import BatchClosed, BatchReady, Message, Progress, SyncEvent, TaskResult, TaskSlice, TaskSlices
from trinity_mq.messages.batches import BatchState
from trinity_mq.runtime.agent import Agent
from trinity_mq.sync.gate.coordinator import Coordinator
from trinity_mq.sync.gate.member import Member, MemberStage
from trinity_mq.sync.gate.records import MemberRecord as CoordinatedMember
from trinity_mq.sync.gate.records import Phase
from trinity_mq.telemetry.durations import WorkUnderWay

Transition = tuple[str, str, str]
"""(machine, state before, state after). The state before is empty at the start."""

ENDS = ("gone", "finished", "killed", "frozen", "thawed", "failed")
"""States at the end or at an interruption of an agent's life, for all roles."""
STATES: Mapping[str, tuple[str, ...]] = {
    "gate: coordinator": tuple(phase.value for phase in Phase),
    "gate: member": tuple(stage.value for stage in MemberStage),
    "gate: trust in an engine": ("trusted", "quarantined"),
    "gate: catch-up fetch": ("fetching", "fetched", "broken off"),
    "ticket": (
        *("opened", "opened again", "closed", "closed, cut off", "closed again"),
        *("ready", "empty", "failed", "gone", "decided again"),
        *("consumed: trained", "consumed: empty", "consumed: failed", "consumed: gone", "consumed: dropped"),
        *("consumed: skipped", "consumed again"),
    ),
    "slice": (
        *("published", "published again", "finished", "partial", "failed", "cancelled", "poisoned", "late"),
        "done again",
    ),
    "lane of a runner": ("closed", "open", "half-open"),
    "explorer": ("starting", "idle", "holding", "working", "draining", *ENDS),
    "runner": ("starting", "idle", "holding", "working", "draining", *ENDS),
    "operator": ("starting", "idle", "working", *ENDS),
    "trainer": ("starting", "idle", "holding", "working", *ENDS),
    "engine": ("starting", "holding", "working", *ENDS),
    "work of trainer and operator": ("none", "batch", "step", "sync", "save", "final"),
}
"""The states of each machine. An agent's states are its heartbeat states and the ends of its lives."""
SESSION_STATES: Mapping[str, tuple[str, ...]] = {
    "gateway": ("starting", "holding", "working", *ENDS),
    "session": ("open", "parked", "queued", "batched", "trained", "evaluated", "dropped"),
    "users": (
        *("asked again", "asked again elsewhere", "equal requests at once", "one call, and feedback"),
        *("rewarded late", "rewarded behind the cut", "rewarded twice", "an answer rewarded", "rewarded over AMQP"),
        *("rewarded after the end", "rewarded wrongly", "vanishes", "discarded", "failed"),
    ),
    "events of sessions": (
        *("published again", "refused", "cut by retention", "answer superseded", "call not received"),
        *("decided twice", "acted after another"),
    ),
}
"""The states that only runs with sessions have."""
ALL_STATES: Mapping[str, tuple[str, ...]] = {**STATES, **SESSION_STATES}


@dataclass
class Coverage:
    """Counts, for each transition, the seeds that reached it."""

    states: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: STATES)
    """The states to reach, by machine."""
    seeds: int = 0
    """Number of seeds played."""
    seen: Counter[Transition] = field(default_factory=Counter)
    """Number of seeds that reached each transition."""

    def add(self, transitions: Iterable[Transition]) -> None:
        """Count the transitions of one seed."""
        self.seeds += 1
        self.seen.update(set(transitions))

    def merge(self, other: Coverage) -> None:
        """Add the counts of other seeds."""
        self.seeds += other.seeds
        self.seen += other.seen

    def reached(self, machine: str) -> set[str]:
        """Return the reached states of a machine."""
        return {after for name, _, after in self.seen if name == machine}

    def missing(self) -> list[str]:
        """Return the states that no seed reached, as ``machine: state``."""
        return [
            f"{machine}: {state}"
            for machine, states in self.states.items()
            for state in states
            if state not in self.reached(machine)
        ]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield (machine, state, origins) for each state in :attr:`states` and each other reached state. The origins
        list the preceding states with their seed counts.
        """
        for machine, states in self.states.items():
            for state in (*states, *sorted(self.reached(machine) - set(states))):
                before = Counter({b or "begins": n for (m, b, a), n in self.seen.items() if (m, a) == (machine, state)})
                origins = ", ".join(f"{origin} {count}" for origin, count in before.most_common())
                yield machine, state, origins or "never"

    def table(self) -> str:
        """Return all rows as a Markdown table, followed by the states that were never reached."""
        lines = ["| machine | state | reached from, in so many seeds |", "|---|---|---|"]
        lines += [f"| {machine} | {state} | {origins} |" for machine, state, origins in self.rows()]
        missing = self.missing()
        lines += ["", f"{self.seeds} seeds. Never reached: {'; '.join(missing) if missing else 'none'}."]
        return "\n".join(lines)


class Observer:
    """Records the transitions of one run."""

    def __init__(self) -> None:
        self.transitions: set[Transition] = set()

    def note(self, machine: str, before: str, after: str) -> None:
        """Record a transition. A transition to the same state is ignored."""
        if before != after:
            self.transitions.add((machine, before, after))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record all state changes of the watched machines during the ``with`` block."""
        with ExitStack() as stack:
            for watched, name, machine, state_of in (
                (Coordinator, "phase", "gate: coordinator", lambda coordinator: coordinator.phase.value),
                (Member, "stage", "gate: member", lambda member: member.stage.value),
                (CoordinatedMember, "quarantined", "gate: trust in an engine", _trust),
                (Agent, "state", None, lambda agent: agent.state),
                (WorkUnderWay, "_kind", "work of trainer and operator", lambda work: vars(work)["_kind"] or "none"),
                (CircuitBreaker, "_until", "lane of a runner", _circuit_state),
                (CircuitBreaker, "_probe", "lane of a runner", _circuit_state),
            ):
                attribute = _Watched(watched, name, machine, state_of, self)
                stack.enter_context(mock.patch.object(watched, name, attribute, create=True))
            yield

    def read(self, messages: Iterable[Message]) -> None:
        """Record the transitions of tickets, slices and catch-up fetches from the messages of a run, given in order."""
        reader = _Reader(self.note)
        for message in messages:
            reader.read(message)


class _Reader:
    """Follows tickets, slices and catch-up fetches through the messages of a run.

    Args:
        note: Called with each transition as (machine, state before, state after).
    """

    def __init__(self, note: Callable[[str, str, str], None]) -> None:
        self._note = note
        self._states: dict[tuple[str, object], str] = {}
        """Current state by (machine, key)."""
        self._fetches: dict[str, int] = {}
        """Latest fetch attempt by member."""

    def read(self, message: Message) -> None:
        if isinstance(message, TaskSlice | TaskSlices):
            for task_slice in [message] if isinstance(message, TaskSlice) else message.slices:
                self._published(task_slice)
        elif isinstance(message, TaskResult):
            key = (message.ticket, message.task_id, message.run_base)
            is_repeated = self._state("slice", key) not in {"", "published", "published again"}
            self._enter("slice", key, "done again" if is_repeated else message.outcome)
        elif isinstance(message, BatchClosed):
            is_repeated = self._state("ticket", message.ticket).startswith("closed")
            cut_off = ", cut off" if message.outcomes.get("cancelled") else ""
            self._enter("ticket", message.ticket, "closed again" if is_repeated else f"closed{cut_off}")
        elif isinstance(message, BatchReady):
            is_repeated = self._state("ticket", message.ticket) in {*get_args(BatchState), "decided again"}
            self._enter("ticket", message.ticket, "decided again" if is_repeated else message.state)
        elif isinstance(message, Progress):
            is_repeated = self._state("ticket", message.ticket).startswith("consumed")
            self._enter("ticket", message.ticket, "consumed again" if is_repeated else f"consumed: {message.outcome}")
        elif isinstance(message, SyncEvent) and not message.epoch:
            self._fetch(message)

    def _published(self, task_slice: TaskSlice) -> None:
        key = (task_slice.ticket, task_slice.task_id, task_slice.run_base)
        is_repeated = bool(self._state("slice", key))
        if is_repeated or not self._state("ticket", task_slice.ticket):
            self._enter("ticket", task_slice.ticket, "opened again" if is_repeated else "opened")
        self._enter("slice", key, "published again" if is_repeated else "published")

    def _fetch(self, event: SyncEvent) -> None:
        """Track the catch-up fetches, by which members get the committed version. Their events have epoch 0."""
        after = {"prepare": "fetching", "commit": "fetched", "abort": "broken off"}.get(event.verb)
        for member in event.members if after is not None else ():
            if event.verb == "prepare":
                self._fetches[member] = event.attempt
            if self._fetches.get(member) == event.attempt:
                self._enter("gate: catch-up fetch", member, str(after))

    def _state(self, machine: str, key: object) -> str:
        return self._states.get((machine, key), "")

    def _enter(self, machine: str, key: object, state: str) -> None:
        self._note(machine, self._state(machine, key), state)
        self._states[machine, key] = state


def _trust(member: CoordinatedMember) -> str:
    return "quarantined" if member.quarantined else "trusted"


def _circuit_state(circuit: CircuitBreaker) -> str:
    attributes = vars(circuit)
    if attributes.get("_until") is None:
        return "closed"
    return "open" if attributes.get("_probe") is None else "half-open"


class _Watched:
    """Descriptor that replaces an attribute: stores its value and records each change of the object's state.

    Args:
        owner: The class with the attribute.
        name: Name of the attribute.
        machine: Name of the state machine. None: the role of the agent.
        state_of: Returns the state of an object.
        observer: Records the changes.
    """

    def __init__(
        self, owner: type, name: str, machine: str | None, state_of: Callable[[Any], str], observer: Observer
    ) -> None:
        self._slot, self._name = vars(owner).get(name), name
        self._machine, self._state_of, self._observer = machine, state_of, observer

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if self._slot is not None:
            return self._slot.__get__(instance, owner)
        try:
            return vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        before = self._state_of(instance) if hasattr(instance, self._name) else ""
        if self._slot is not None:
            self._slot.__set__(instance, value)
        else:
            vars(instance)[self._name] = value
        self._observer.note(self._machine or instance.role, before, self._state_of(instance))
