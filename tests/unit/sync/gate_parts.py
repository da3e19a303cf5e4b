"""What the world of ``gate_world`` is made of: engines and their hosts, events as values, and how much may happen."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_mq.messages import SyncEvent, Version
from trinity_mq.sync.gate.member import Member

Event = tuple[Any, ...]


class Violation(AssertionError):
    """A rule was broken."""


T = TypeVar("T")


def slots_copied(one: T) -> T:
    """Return a shallow copy of an object with slots."""
    other = object.__new__(type(one))
    for name in one.__slots__:  # type: ignore[attr-defined]
        setattr(other, name, getattr(one, name))
    return other


def copied(one: T) -> T:
    """Return a shallow copy of an object without slots."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__)
    return other


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

    machine: Member
    engine: Engine = field(default_factory=Engine)
    work: tuple[Any, ...] | None = None
    """What the engine is at: ``("pause", key)`` or ``("receive", key, generation, pull, full, half)``."""

    def key(self) -> Event:
        m = self.machine
        prepare = None if m._prepare is None else said(m._prepare)
        inside = (m.life, m.version, m.stage, prepare, m._touched, m._latest)
        return (inside, self.engine.key(), self.work)


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
