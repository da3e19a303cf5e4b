"""Lookups in an observation, edges from waiting agents to the agents that they wait for, and facts that come from the
run's configuration and machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from trinity_mq.config import Config
from trinity_mq.config.threads import computing_processes
from trinity_mq.messages import (
    AgentStatus,
    EngineStatus,
    ExplorerStatus,
    Heartbeat,
    OperatorStatus,
    RunnerStatus,
    SilentAgent,
    TrainerStatus,
)
from trinity_mq.observability.diagnosis.records import Edge, Observation, Room
from trinity_mq.roles import ROLES
from trinity_mq.runtime.peers import SILENT_AFTER

S = TypeVar("S", bound=AgentStatus)

YOUNG_BEATS = 30
"""Number of heartbeats in an agent's first minute. In this time, other agents of a starting run may still be
missing."""


def duration_text(seconds: float) -> str:
    """Return a duration for a person.

    >>> duration_text(0.03), duration_text(0.25), duration_text(9.4), duration_text(212), duration_text(4000)
    ('30 ms', '0.2 s', '9 s', '212 s', '67 min')
    """
    if not math.isfinite(seconds):
        return "a long time"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def counted(number: int, thing: str, plural: str = "") -> str:
    """Return a count with its noun, in singular or plural."""
    return f"{number} {thing if number == 1 else plural or thing + 's'}"


class ObservationIndex:
    """Lookups in one observation, by role."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        beats = observation.heartbeats
        self.living: list[tuple[Heartbeat, float]] = [
            (beat, age) for beat, age in beats.values() if not beat.has_ended and age < SILENT_AFTER
        ]
        self.silent = self._silent(beats)
        """Silent agents, in the order of blame."""
        self.explorer = self.first("explorer", ExplorerStatus)
        self.trainer = self.first("trainer", TrainerStatus)

    def _silent(self, beats: Mapping[str, tuple[Heartbeat, float]]) -> list[SilentAgent]:
        silent = {
            beat.id: SilentAgent(
                id=beat.id,
                role=beat.role,
                seconds=age,
                slices=beat.detail.slices if isinstance(beat.detail, RunnerStatus) else [],
            )
            for beat, age in beats.values()
            if not beat.has_ended and age >= SILENT_AFTER
        }
        heard = {beat.id for beat, age in beats.values() if age < SILENT_AFTER or beat.has_ended}
        for beat, age in self.living:
            if isinstance(beat.detail, ExplorerStatus):
                for agent in beat.detail.silent:
                    if agent.id not in heard and agent.id not in silent:
                        silent[agent.id] = agent.model_copy(update={"seconds": agent.seconds + age})
        order: dict[str, int] = {role: n for n, role in enumerate(ROLES)}
        return sorted(silent.values(), key=lambda agent: (order.get(agent.role, len(order)), -agent.seconds, agent.id))

    def of_role(self, role: str) -> list[tuple[Heartbeat, float]]:
        """Return the heartbeats of a role's living agents with their ages in seconds. Hosts of engines are not
        engines.
        """
        return [
            (beat, age)
            for beat, age in self.living
            if beat.role == role and not (isinstance(beat.detail, EngineStatus) and beat.detail.id is None)
        ]

    def first(self, role: str, status: type[S]) -> tuple[Heartbeat, S] | None:
        """Return (heartbeat, status) of the role's living agent with the first id among the agents whose status is of
        the type ``status``. None: no such agent lives.
        """
        sorted_beats = sorted(self.of_role(role), key=lambda item: item[0].id)
        return next(((beat, beat.detail) for beat, _ in sorted_beats if isinstance(beat.detail, status)), None)

    def depth(self, queue: str) -> int:
        """Return the number of ready messages of a queue; 0 if unknown."""
        return self.observation.depths.get(queue) or 0

    @property
    def is_starting(self) -> bool:
        """Return whether no batch was opened or trained on yet, and every living agent is in its first minute."""
        explorer = self.explorer[1] if self.explorer else None
        done = explorer is not None and bool(explorer.opened or explorer.closed)
        done = done or bool(self.trainer and self.trainer[1].progress)
        return not done and all(beat.seq < YOUNG_BEATS for beat, _ in self.living)

    @property
    def has_unprocessed_batch(self) -> bool:
        """Return whether a closed batch has not reached the trainer yet: it waits in its queue, or the explorer follows
        it, the trainer does not have it in hand, and no trainer is at work.
        """
        if self.depth("closed"):
            return True
        following = self.explorer[1].following if self.explorer else []
        in_hand = self.trainer[1].in_hand if self.trainer else []
        return bool(set(following) - set(in_hand)) and not (self.trainer and self.trainer[1].doing)

    def edges(self) -> tuple[Edge, ...]:
        """Return the waits of all living agents, longest first."""
        waits = [
            Edge(beat.id, beat.waits_for, max(0.0, beat.waits_seconds) + age, self._target_of(beat))
            for beat, age in self.living
            if beat.waits_for
        ]
        return tuple(sorted(waits, key=lambda edge: (-edge.seconds, edge.waiter)))

    def _target_of(self, beat: Heartbeat) -> str | None:
        """Return the agent or role that a waiting agent waits for; None: outside the run or unknown. The result is
        derived from the agents' statuses, so it does not depend on the wording of ``waits_for``.
        """
        detail = beat.detail
        match beat.role:
            case "runner":
                outside = isinstance(detail, RunnerStatus) and bool(detail.paused)
                return None if outside else self._first_id("explorer")
            case "operator":
                busy = isinstance(detail, OperatorStatus) and detail.ticket is not None
                return self._oldest_holder() if busy else self._source_of_batches()
            case "engine":
                return self._first_id("trainer")
            case "trainer":
                return self._trainer_target(beat)
            case "explorer":
                return self._explorer_target()
            case _:
                return self._first_id("explorer")

    def _trainer_target(self, beat: Heartbeat) -> str | None:
        if beat.state == "starting":
            return None
        syncs = isinstance(beat.detail, TrainerStatus) and bool(beat.detail.doing)
        if syncs or beat.state == "holding":
            return self._first_id("engine")
        return self._first_id("operator") if self.has_unprocessed_batch else self._source_of_batches()

    def _explorer_target(self) -> str | None:
        versions = [beat.detail.version for beat, _ in self.of_role("engine") if isinstance(beat.detail, EngineStatus)]
        if not any(versions):
            return self._first_id("engine")
        if self.trainer is None or self.trainer[1].doing:
            return self._first_id("trainer")
        if self.has_unprocessed_batch:
            return self._first_id("operator")
        return self._oldest_holder() if self.explorer_waits_for_rollouts else None

    def _source_of_batches(self) -> str:
        """Return the source of the next closed batch: the runner with the oldest slice, else the explorer."""
        return self._oldest_holder() if self.explorer_waits_for_rollouts else self._first_id("explorer")

    @property
    def explorer_waits_for_rollouts(self) -> bool:
        """Return whether batches are open."""
        return self.explorer is not None and bool(self.explorer[1].open)

    @property
    def has_lost_slices(self) -> bool:
        """Return whether batches are open, but neither a task queue nor a runner has a slice. This requires that every
        runner reports its slices.
        """
        queues = [self.observation.depths.get(name, 1) for name in ("tasks.train", "tasks.eval")]
        holds = [status.holds for beat, _ in self.of_role("runner") if isinstance(status := beat.detail, RunnerStatus)]
        return (
            self.explorer_waits_for_rollouts and not any(queues) and bool(holds) and all(held == {} for held in holds)
        )

    def _first_id(self, role: str) -> str:
        """Return the first id of a role's living agents, else the name of the role."""
        return min((beat.id for beat, _ in self.of_role(role)), default=role)

    def _oldest_holder(self) -> str:
        """Return the id of the runner with the oldest slice, else the first id of the living runners, else the role."""
        held = [(held_slice[3], beat.id) for beat, _ in self.of_role("runner") for held_slice in slices_of(beat)]
        return max(held)[1] if held else self._first_id("runner")


def slices_of(beat: Heartbeat) -> list[tuple[str, int, int, float]]:
    """Return the oldest slices in flight of a runner; empty for other agents."""
    return beat.detail.slices if isinstance(beat.detail, RunnerStatus) else []


def free_resources(config: Config | None, cores: int, gpus: int) -> frozenset[Room] | None:
    """Return the free resources of a machine that hosts all agents of a run; None without a configuration. A thread
    count of ``auto`` takes all cores.

    Args:
        config: The run's configuration.
        cores: Cores of the machine that the run may use.
        gpus: GPUs of the machine.
    """
    if config is None:
        return None
    computing, trainer = computing_processes(config), config.trainer
    is_on_cpu = config.model.device == "cpu" or not gpus
    threads = [trainer.num_threads] * trainer.nproc
    threads += [config.explorer.rollout_model.num_threads] * (computing - trainer.nproc)
    numbers = [number for number in threads if number != "auto"]
    is_full = len(numbers) < len(threads) or sum(numbers) >= cores if is_on_cpu else computing >= gpus
    small = sum(config.agent_counts.values()) - 1
    resources: set[Room] = set() if is_full else {"devices"}
    if small + (computing if is_on_cpu else 0) < cores:
        resources.add("cores")
    return frozenset(resources)
