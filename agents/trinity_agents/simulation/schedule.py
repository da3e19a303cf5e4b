"""Schedules of faults. One integer seed determines the configuration of a run and all its faults. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Role = Literal["explorer", "runner", "operator", "trainer", "engine", "gateway"]
Style = Literal["fixed", "trainer_driven", "explorer_driven", "fully_async"]

POINTS: dict[Role, int] = {"explorer": 130, "runner": 90, "operator": 70, "trainer": 110, "engine": 40, "gateway": 600}
"""Approximate number of points that the agents of a role pass in a run. A fault drawn beyond the last point does not
happen.
"""
LENGTH = 12.0
"""Seconds from the start of a run within which timed faults begin."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of a simulated run and behaviour of its workflows."""

    style: Style
    interval: int
    offset: int
    """``synchronizer.sync_offset`` for style fixed, else ``synchronizer.pipeline_depth``."""
    max_staleness: int | None
    stale: Literal["drop", "requeue"]
    pause_mode: Literal["wait", "keep", "abort"]
    batches: int
    tasks: int
    """Tasks per batch."""
    repeat: int
    """Rollout runs per task."""
    slice_runs: int
    """Maximum rollout runs per slice."""
    operators: int
    engines: int
    """Number of policy engines. The first two belong to the explorer, a third has its own host."""
    evaluates: bool
    cut_off: Literal["never", "whole tasks", "partial tasks"]
    """Over-rollout: whether a batch is closed without its slowest tasks, and whether partial tasks count."""
    save_interval: int
    concurrency: int
    """Slices in flight per runner."""
    step_seconds: float
    token_seconds: float
    """Seconds per sampled token. A rollout run samples two tokens."""
    delivery_limit: int
    operator_deadline: float
    batch_timeout: float
    standby: bool
    """True if a second explorer waits for the lock of the first."""
    failing: float
    """Fraction of rollout runs whose workflow fails on every attempt."""
    crashing: float
    """Fraction of attempts in a child process that kill the process."""

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the configuration by section."""
        explorer: dict[str, Any] = {
            "max_repeat_times_per_runner": self.slice_runs,
            "operator_deadline": self.operator_deadline,
            "batch_timeout": self.batch_timeout,
            "max_timeout": 60.0,
            "eval_timeout": 400.0,
            "max_consecutive_empty": 1000,
            "eval_interval": 2,
            "eval_on_startup": self.evaluates,
        }
        if self.batch_timeout < SHORT:
            explorer |= {"max_timeout": 1.0, "max_retry_times": 0}
        if self.cut_off != "never":
            partial = self.cut_off == "partial tasks"
            explorer["over_rollout"] = {"ratio": 0.5, "wait_after_min": 0.5, "return_partial_tasks": partial}
        synchronizer = {
            "sync_style": self.style,
            "sync_interval": self.interval,
            "sync_offset" if self.style == "fixed" else "pipeline_depth": self.offset,
            "max_staleness": self.max_staleness,
            "stale": self.stale,
            "pause_mode": self.pause_mode,
            "sync_timeout": 5.0,
        }
        return {
            "algorithm": {"repeat_times": self.repeat},
            "buffer": {"batch_size": self.tasks, "total_steps": self.batches},
            "explorer": explorer,
            "broker": {"delivery_limit": self.delivery_limit},
            "synchronizer": synchronizer,
            "trainer": {"save_interval": self.save_interval},
            "runner": {"concurrency": self.concurrency},
        }


SHORT = 10.0
"""Batch timeout in seconds below which a batch may end before its slices end. Operator deadlines in seconds and
delivery limits below this number may cause a batch to be given up.
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """An agent of a role is killed at a point, as by SIGKILL, and replaced."""

    role: Role
    point: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """An agent of a role is frozen at a point for ``seconds``, as between SIGSTOP and SIGCONT."""

    role: Role
    point: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Drain:
    """An agent of a role is drained after ``at`` seconds of the run, and replaced."""

    role: Role
    at: float


@dataclass(frozen=True, slots=True)
class ConnectionLoss:
    """An agent of a role loses its connection and reconnects after ``seconds``."""

    role: Role
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BrokerRestart:
    """All connections are lost at once. Each is restored after a random time from ``seconds`` to ``seconds + 1``
    seconds.
    """

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BrokerAlarm:
    """The broker blocks publishers for ``seconds``."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LostConfirm:
    """A publish takes effect but its confirm is lost. The publisher repeats it after ``seconds``."""

    role: Role
    point: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Delay:
    """The operation of an agent of a role at a point, or a delivery to it there, is delayed by ``seconds``."""

    role: Role
    point: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Jitter:
    """A fraction of all publishes, declarations and deliveries is late, by ``mean`` seconds on average, so that
    messages of different queues overtake each other.
    """

    share: float
    mean: float


@dataclass(frozen=True, slots=True)
class RepeatedPublishes:
    """A fraction of all publishes loses its confirm and is repeated."""

    share: float


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """An engine's process dies and is back, without weights, after ``seconds``."""

    engine: int
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StaleWeightsFault:
    """An engine that receives new weights for the ``n``-th time keeps its old weights, and its answers show the old
    weights.
    """

    engine: int
    n: int


@dataclass(frozen=True, slots=True)
class BrokenTransfer:
    """The broadcast of the ``n``-th offer of weights breaks after the engines have received a part."""

    n: int


@dataclass(frozen=True, slots=True)
class SandboxOutage:
    """The sandbox of all workflows is unavailable for ``seconds``."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DeadlyBatch:
    """A batch that kills every trainer during its step."""

    batch: int


Fault = (
    Kill
    | Freeze
    | Drain
    | ConnectionLoss
    | BrokerRestart
    | BrokerAlarm
    | LostConfirm
    | Delay
    | Jitter
    | RepeatedPublishes
    | EngineDeath
    | StaleWeightsFault
    | BrokenTransfer
    | SandboxOutage
    | DeadlyBatch
)


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Gateways of a run in mode ``serve``, and the behaviour of their users."""

    gateways: int
    grouped: bool
    """True if sessions are compared with each other, in groups of ``Settings.repeat`` sessions."""
    users: int
    """Number of user programs."""
    sessions: int
    """Number of sessions, or with ``grouped`` of groups of concurrent sessions, that each user has one after another.
    """
    within: float
    """Seconds from the start of the run within which users start."""
    idle_ttl: float
    reward_ttl: float
    record_timeout: float
    max_bytes: int
    """Maximum bytes of the session stream."""
    noise: float
    """Interval in seconds between evaluated sessions that fill the stream. 0: no such sessions."""
    parked: int
    """Number of users whose first session or group is rewarded only after retention has cut the stream."""

    def gateway(self, repeat: int) -> dict[str, Any]:
        """Return the configuration section ``gateway``. ``repeat`` is the size of a group."""
        size = {"group_size": repeat} if self.grouped else {}
        ttl = {"idle_ttl": self.idle_ttl, "reward_ttl": self.reward_ttl, "record_timeout": self.record_timeout}
        return {"port": 0, "batch_wait": 3.0, "not_ready_timeout": 20.0, **ttl, **size}


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """A run's configuration and faults."""

    seed: int
    settings: Settings
    faults: tuple[Fault, ...]
    kept: tuple[int, ...] | None = None
    """Indices of :attr:`faults` among all faults of the seed. None: :attr:`faults` holds all faults of the seed."""
    sessions: SessionLoad | None = None
    """Gateways and users of a run in mode ``serve``. None: the run has a taskset instead."""

    def only(self, places: Collection[int]) -> FaultSchedule:
        """Return the schedule with only the seed's faults at the indices ``places``.

        Raises:
            ValueError: The seed does not have a fault at one of the indices.
        """
        drawn = draw(self.seed, sessions=self.sessions is not None)
        if invalid := sorted(index for index in places if not 0 <= index < len(drawn.faults)):
            raise ValueError(
                f"seed {self.seed} draws faults 0 to {len(drawn.faults) - 1}; there is no fault {invalid[0]}"
            )
        indices = tuple(sorted(set(places)))
        return replace(self, faults=tuple(drawn.faults[index] for index in indices), kept=indices)

    @property
    def places(self) -> tuple[int, ...]:
        """Indices of the faults among all faults of the seed."""
        return tuple(range(len(self.faults))) if self.kept is None else self.kept

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        chosen = "" if self.kept is None else f" --faults {','.join(map(str, self.kept)) or 'none'}"
        kind = "" if self.sessions is None else " --sessions"
        return f"python -m trinity_agents.simulation{kind} --seed {self.seed}{chosen}"

    def of(self, *kinds: type[Fault]) -> list[Fault]:
        """Return the faults of these kinds."""
        return [fault for fault in self.faults if isinstance(fault, kinds)]

    def lines(self) -> list[str]:
        """Return the schedule for a person: the settings, and each fault with its index."""
        shown = [_fields_of(self.settings), *([] if self.sessions is None else [_fields_of(self.sessions)])]
        return [*shown, *(f"{index:>3}  {fault}" for index, fault in zip(self.places, self.faults, strict=True))]


def _fields_of(part: Settings | SessionLoad) -> str:
    return ", ".join(f"{part_field.name}={getattr(part, part_field.name)!r}" for part_field in fields(part))


def draw(seed: int, *, sessions: bool = False) -> FaultSchedule:
    """Return the schedule of a seed. It stays the same as long as this function is not changed.

    Args:
        seed: The seed.
        sessions: True for a run in mode ``serve``. The same seed gives an unrelated schedule without sessions.
    """
    if sessions:
        return _with_sessions(seed)
    dice = random.Random(seed)
    settings = _settings(dice)
    return FaultSchedule(seed, settings, tuple(_faults(dice, settings)))


def _settings(dice: random.Random) -> Settings:
    style: Style = dice.choice(["fixed", "fixed", "trainer_driven", "explorer_driven", "fully_async"])
    interval = dice.choice([1, 1, 1, 2])
    repeat = dice.choice([2, 2, 4])
    short = dice.random() < 0.15
    settings = Settings(
        style=style,
        interval=interval,
        offset=dice.choice([0, 1, 1, 2, 4]),
        max_staleness=None if style == "fixed" else dice.choice([None, None, interval - 1, interval, 8]),
        stale=dice.choice(["drop", "requeue"]),
        pause_mode=dice.choice(["wait", "keep", "abort"]),
        batches=dice.choice([2, 3, 4, 5]),
        tasks=dice.choice([1, 2, 2]),
        repeat=repeat,
        slice_runs=dice.choice([1, 2, 2, 4]) if repeat > 2 else 2,
        operators=dice.choice([1, 2]),
        engines=dice.choice([1, 1, 2, 3]),
        evaluates=dice.random() < 0.5,
        cut_off=dice.choice(["never", "never", "never", "whole tasks", "partial tasks"]),
        save_interval=dice.choice([1, 1, 2, 10]),
        concurrency=dice.choice([1, 2, 8]),
        step_seconds=dice.choice([0.05, 0.5, 2.0]),
        token_seconds=dice.choice([0.01, 0.1, 0.5]),
        delivery_limit=dice.choice([4, 4, 1000]),
        operator_deadline=dice.choice([60.0, 60.0, 5.0]),
        batch_timeout=3.0 if short else 400.0,
        standby=dice.random() < 0.15,
        failing=dice.choice([0.0, 0.0, 0.0, 0.1, 0.4]),
        crashing=0.0,
    )
    dice.choice(range(5))  # the draw of a setting that was removed: all later draws of a seed stay the same
    return replace(settings, crashing=dice.choice([0.0, 0.1, 0.5]))


def _faults(dice: random.Random, settings: Settings) -> list[Fault]:
    """Draw the faults. One run in ten has no faults, to test rules that hold only then."""
    if dice.random() < 0.1:
        return []
    roles: list[Role] = ["explorer", "runner", "operator", "trainer"]
    weights = [3, 4, 3, 2]
    if settings.engines > 2:
        roles, weights = [*roles, "engine"], [*weights, 2]

    def role() -> Role:
        return dice.choices(roles, weights)[0]

    def point(of_role: Role) -> int:
        return dice.randrange(POINTS[of_role])

    def at() -> float:
        return round(dice.uniform(0.0, LENGTH), 2)

    faults: list[Fault] = []
    if dice.random() < 0.5:
        faults.append(Jitter(dice.choice([0.05, 0.2, 0.5]), dice.choice([0.01, 0.1, 0.6])))
    if dice.random() < 0.4:
        faults.append(RepeatedPublishes(dice.choice([0.05, 0.3])))
    faults += [
        Kill(fault_role, point(fault_role))
        for fault_role in (role() for _ in range(dice.choice([0, 0, 1, 1, 2, 3, 5])))
    ]
    faults += [
        Freeze(fault_role, point(fault_role), dice.choice([0.5, 4.0, 15.0, 45.0]))
        for fault_role in (role() for _ in range(dice.choice([0, 0, 0, 1, 2])))
    ]
    faults += [
        LostConfirm(fault_role, point(fault_role), dice.choice([0.0, 0.1, 3.0]))
        for fault_role in (role() for _ in range(3))
    ]
    faults += [
        Delay(fault_role, point(fault_role), dice.choice([0.2, 2.0, 8.0]))
        for fault_role in (role() for _ in range(dice.randrange(4)))
    ]
    faults += [Drain(role(), at()) for _ in range(dice.choice([0, 0, 0, 1, 2]))]
    faults += [
        ConnectionLoss(role(), at(), dice.choice([0.3, 3.0, 15.0, 70.0])) for _ in range(dice.choice([0, 0, 1, 2]))
    ]
    faults += [BrokerRestart(at(), dice.choice([0.5, 2.0, 12.0])) for _ in range(dice.choice([0, 0, 0, 1]))]
    faults += [BrokerAlarm(at(), dice.choice([0.5, 5.0, 40.0])) for _ in range(dice.choice([0, 0, 0, 1]))]
    return [*faults, *_rare(dice, settings)]


def _rare(dice: random.Random, settings: Settings) -> list[Fault]:
    """Draw faults of engines, transfers, sandboxes and batches."""

    def at() -> float:
        return round(dice.uniform(0.0, LENGTH), 2)

    faults: list[Fault] = []
    engine = dice.randrange(settings.engines)
    if dice.random() < 0.2:
        faults.append(EngineDeath(engine, at(), dice.choice([0.5, 5.0, 20.0])))
    if dice.random() < 0.15:
        faults.append(StaleWeightsFault(dice.randrange(settings.engines), dice.randrange(1, 5)))
    if dice.random() < 0.15:
        faults.append(BrokenTransfer(dice.randrange(1, 5)))
    if dice.random() < 0.1:
        faults.append(SandboxOutage(at(), dice.choice([1.0, 10.0, 40.0])))
    if dice.random() < 0.05:
        faults.append(DeadlyBatch(dice.randrange(1, settings.batches + 1)))
    return faults


SESSIONS_LENGTH = 60.0
"""Seconds from the start of a run with sessions within which timed faults begin."""
UNKEPT = 1 << 28
"""Maximum stream size in bytes that no run reaches, so that retention cuts nothing."""
CUT = 384 * 1024
"""Maximum stream size in bytes that runs exceed, so that retention cuts the beginning. A quarter of the stream covers a
longer time than most absences of a gateway.
"""


def _with_sessions(seed: int) -> FaultSchedule:
    dice = random.Random(f"{seed}/sessions")
    drawn, cut = _settings(dice), dice.random() < 0.4
    grouped = dice.random() < 0.4
    settings = replace(
        drawn,
        max_staleness=None,
        cut_off="never",
        failing=0.0,
        crashing=0.0,
        batch_timeout=400.0,
        operator_deadline=60.0,
        batches=dice.choice([8, 10, 14]) if cut else dice.choice([3, 4, 6, 8]),
        tasks=dice.choice([1, 2, 3]),
        repeat=dice.choice([2, 2, 3]) if grouped else 1,
        slice_runs=dice.choice([1, 2, 4]),
    )
    sessions = SessionLoad(
        gateways=dice.choice([1, 2, 2]),
        grouped=grouped,
        users=dice.randrange(3, 5) if cut else dice.randrange(3, 9),
        sessions=dice.choice([1, 2]) if cut else dice.choice([1, 2, 3]),
        within=dice.choice([5.0, 30.0, 60.0]),
        idle_ttl=dice.choice([15.0, 60.0]),
        reward_ttl=260.0 if cut else dice.choice([20.0, 90.0]),
        record_timeout=dice.choice([0.2, 2.0]),
        max_bytes=CUT if cut else UNKEPT,
        noise=3.0 if cut else 0.0,
        parked=dice.choice([1, 2]) if cut else 0,
    )
    return FaultSchedule(seed, settings, tuple(_session_faults(dice, sessions)), sessions=sessions)


def _session_faults(dice: random.Random, sessions: SessionLoad) -> list[Fault]:
    if dice.random() < 0.1:
        return []
    roles: list[Role] = ["gateway", "explorer", "runner", "operator", "trainer"]

    def role() -> Role:
        return dice.choices(roles, [10, 3, 1, 1, 2])[0]

    def point(of_role: Role) -> int:
        return dice.randrange(POINTS[of_role] * (2 if sessions.noise and of_role == "gateway" else 1))

    def at() -> float:
        return round(dice.uniform(0.0, SESSIONS_LENGTH * (3 if sessions.noise else 1)), 2)

    def some(*counts: int) -> list[Role]:
        return [role() for _ in range(dice.choice(counts))]

    faults: list[Fault] = []
    if dice.random() < 0.4:
        faults.append(Jitter(dice.choice([0.05, 0.2]), dice.choice([0.01, 0.1])))
    if dice.random() < 0.4:
        faults.append(RepeatedPublishes(dice.choice([0.05, 0.3])))
    faults += [Kill(fault_role, point(fault_role)) for fault_role in some(0, 1, 1, 2, 3, 5)]
    faults += [
        Freeze(fault_role, point(fault_role), dice.choice([0.5, 4.0, 15.0, 45.0])) for fault_role in some(0, 0, 1, 2)
    ]
    faults += [LostConfirm(fault_role, point(fault_role), dice.choice([0.0, 0.1, 3.0])) for fault_role in some(3)]
    faults += [Delay(fault_role, point(fault_role), dice.choice([0.2, 2.0, 8.0])) for fault_role in some(0, 1, 3, 6)]
    faults += [Drain(role(), at()) for _ in range(dice.choice([0, 0, 0, 1]))]
    faults += [
        ConnectionLoss(role(), at(), dice.choice([0.3, 3.0, 15.0, 40.0])) for _ in range(dice.choice([0, 1, 1, 2]))
    ]
    if sessions.noise and dice.random() < 0.5:
        faults.append(ConnectionLoss("gateway", at(), 170.0))  # longer than the stream retains any message
    faults += [BrokerRestart(at(), dice.choice([0.5, 2.0, 12.0])) for _ in range(dice.choice([0, 0, 1]))]
    faults += [BrokerAlarm(at(), dice.choice([0.5, 5.0, 20.0])) for _ in range(dice.choice([0, 0, 0, 1]))]
    return faults
