"""What the world of ``gate_world`` is made of: engines and their hosts, events as values, and how much may happen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from trinity_mq.messages import SyncEvent, Version
from trinity_mq.sync.gate.coordinator import CatchUpFetches, Coordinator
from trinity_mq.sync.gate.member import Member
from trinity_mq.sync.gate.records import AttemptTimes

Event = tuple[Any, ...]


class Violation(AssertionError):
    """A rule was broken."""


T = TypeVar("T")


@functools.cache
def slots_of(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ()))


def slots_copied(one: T) -> T:
    """Return a shallow copy of an object with slots."""
    other = object.__new__(type(one))
    for name in slots_of(type(one)):
        setattr(other, name, getattr(one, name))
    return other


def copied(one: T) -> T:
    """Return a shallow copy of an object without slots."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__)
    return other


TIMEOUT = 5.0
NEVER = float("inf")


class Trainer(Coordinator):
    """A coordinator as a value, whose deadlines run out when a test says so."""

    __slots__ = ()

    @classmethod
    def started(cls) -> Self:
        return cls(name="t", timeout=TIMEOUT, lease=NEVER)

    def key(self) -> Event:
        """Return the state without times."""
        roster = tuple((n, m.version, m.life, m.quarantined, m.given) for n, m in sorted(self.members.items()))
        pulls = tuple((n, said(pull.prepare)) for n, pull in sorted(self._catch_ups.under_way.items()))
        return (
            *(self.phase, self.epoch, self.attempt, self._tries, self.committed, self._version, self._taking_part),
            *(self._grouped, frozenset(self._ready), frozenset(self._applied), roster, pulls),
        )

    def copied(self) -> Self:
        other = slots_copied(self)
        other.separate()
        return other

    def separate(self) -> None:
        """Share no state that changes with the coordinator that this is a copy of, and forget failed fetches."""
        self.members = {name: slots_copied(member) for name, member in self.members.items()}
        self._ready, self._applied, self.phases = set(self._ready), set(self._applied), AttemptTimes()
        pulls = {name: slots_copied(pull) for name, pull in self._catch_ups.under_way.items()}
        self._catch_ups = CatchUpFetches(2 * TIMEOUT, 1.0, pulls)

    def pulling(self) -> tuple[str, ...]:
        """Return the members that fetch alone."""
        return tuple(self._catch_ups.under_way)

    def pull_runs_out(self, member: str) -> None:
        self._catch_ups.broke(member, 0.0)


class EngineMember(Member):
    """A member as a value."""

    __slots__ = ()

    def state(self) -> Event:
        prepare = None if self._prepare is None else said(self._prepare)
        return (self.life, self.version, self.stage, prepare, self._touched, self._latest)


@dataclass
class Engine:
    """What the engine process does, as ``EngineState`` and ``Receiver`` do it."""

    life: int = 0
    phase: str = "empty"
    version: Version | None = None
    """The version it would answer with."""
    weights: Version | None = None
    """The version whose weights it holds entire; None: none, or parts of several."""
    paused: bool = False
    applied: bool = False
    group: tuple[int, int] | None = None
    """The group it keeps: the trainer's generation and the epoch."""

    def key(self) -> Event:
        return (self.life, self.phase, self.version, self.weights, self.paused, self.applied, self.group)


@dataclass
class Host:
    """One engine's host."""

    machine: EngineMember
    engine: Engine = field(default_factory=Engine)
    work: tuple[Any, ...] | None = None
    """What the engine is at: ``("pause", key)`` or ``("receive", key, generation, pull, full, half)``."""

    def key(self) -> Event:
        return (self.machine.state(), self.engine.key(), self.work)


@dataclass
class Bounds:
    """How much may happen."""

    members: int = 1
    versions: int = 2
    tries: int = 2
    """Tries and pulls together."""
    engine_deaths: int = 0
    host_deaths: int = 0
    trainer_deaths: int = 0
    lies: int = 0
    """Engines that keep their old weights and say that they have the new ones."""
    breaks: int = 1
    """Pauses and transfers that fail, deadlines and leases that run out."""


KNOWN: dict[Event, SyncEvent] = {}
"""Events by their keys."""


def said(event: SyncEvent) -> Event:
    """Return the key of an event, and know the event by it from now on."""
    good = event.canary.get("good", True)
    where = event.rendezvous.get("generation")
    key = (event.verb, event.sender, event.life, event.version, event.epoch, event.attempt, tuple(event.members))
    key += (event.pull, good, where)
    KNOWN.setdefault(key, event)
    return key


def joining(machine: Member) -> SyncEvent:
    """Return what a member says of itself."""
    return _join(machine.name, machine.life, machine.version)


@functools.cache
def _join(name: str, life: str, version: Version | None) -> SyncEvent:
    return SyncEvent(verb="join", sender=name, life=life, version=version)


def rule(holds: bool, otherwise: str) -> None:
    """Raise where a rule does not hold."""
    if not holds:
        raise Violation(otherwise)
