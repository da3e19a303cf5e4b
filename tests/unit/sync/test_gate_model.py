"""The gate's machines, model-checked: every order of events within bounds, and the same with a rule
broken on purpose.

The gate is a world of states: one coordinator, some members with their engines, and a network that loses, repeats and
reorders at will. The network is the set of all that was ever said: each of it may arrive at any time, again, late, or
never. Time is not counted: a deadline, a lease or a pause may run out whenever there is one.

``python -m tests.unit.sync.test_gate_model`` explores larger bounds and says how many states there were.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import pytest

from trinity_mq.messages import SyncEvent, Version
from trinity_mq.sync.gate.coordinator import CatchUpFetches, Coordinator
from trinity_mq.sync.gate.member import Commit, Member, MemberStage, Pause, Receive, Rejoin, Resume
from trinity_mq.sync.gate.records import AbandonCollective, AttemptTimes, Committed, Phase, StartCollective

Event = tuple[Any, ...]


class Violation(AssertionError):
    """A rule was broken."""


T = TypeVar("T")


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
        other = copy.copy(self)
        other.separate()
        return other

    def separate(self) -> None:
        """Share no state that changes with the coordinator that this is a copy of, and forget failed fetches."""
        self.members = {name: copy.copy(member) for name, member in self.members.items()}
        self._ready, self._applied, self.phases = set(self._ready), set(self._applied), AttemptTimes()
        pulls = {name: copy.copy(pull) for name, pull in self._catch_ups.under_way.items()}
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


LONG_AFTER = 100.0
"""A time at which no join can still speak of the time before a commit."""
Action = tuple[Any, ...]


class World:
    """One state. :meth:`actions` says what may happen next, :meth:`after` what comes of it."""

    trainer_type: type[Trainer] = Trainer
    member_type: type[EngineMember] = EngineMember

    def __init__(self, bounds: Bounds) -> None:
        self.left = bounds
        self.generation = 1
        self.trainer = self.trainer_type.started()
        self.step = 0
        """Of the version that is to be committed next."""
        self.collective: tuple[Any, ...] | None = None
        """``(epoch, attempt, version, members, full)`` of the trainer's side."""
        self.group: tuple[int, int] | None = None
        self.network: frozenset[Event] = frozenset()
        self.beats: frozenset[Event] = frozenset()
        """What beats have ever said: ``(member, version, epoch, attempt)``."""
        self.committed: tuple[Version, ...] = ()
        self.lost: frozenset[Event] = frozenset()
        """In a fair world: what does not arrive any more."""
        self.hosts = {f"m{n}": Host(self.member_type(f"m{n}", life="0")) for n in range(bounds.members)}
        self.network = frozenset(said(joining(host.machine)) for host in self.hosts.values())

    # -- as a value

    def key(self) -> Event:
        """Return what tells this state from others."""
        left = tuple(vars(self.left).values())
        here = (self.generation, self.step, self.collective, self.group, self.network, self.beats, left)
        return (self.trainer.key(), here, tuple(host.key() for host in self.hosts.values()))

    def copied(self) -> World:
        other = copy.copy(self)
        other.trainer = self.trainer.copied()
        other.hosts = {name: Host(copy.copy(h.machine), copied(h.engine), h.work) for name, h in self.hosts.items()}
        return other

    # -- what may happen

    def actions(self) -> Iterator[Action]:
        """Yield all that may happen now."""
        left, t = self.left, self.trainer
        if left.tries and t.phase is Phase.IDLE and t.members and self.step < left.versions:
            yield ("start",)
        if left.tries:
            yield from (("pull", name) for name in t.due_catch_ups(0.0))
        for event in self.network:
            if event[0] in {"prepare", "go", "commit", "abort"}:
                yield from (("deliver", event, name) for name in self.hosts)
            else:
                yield ("deliver", event, "t")
        if self.collective is not None:
            yield from ((name,) for name in ("sent",) if self.collective[4])
        if left.breaks:
            if t.phase is not Phase.IDLE:
                yield ("deadline",)
            if self.collective is not None:
                yield ("cut",)
            yield from (("pull deadline", name) for name in t.pulling())
            yield from (("lease", name) for name in t.members)
        if left.trainer_deaths:
            yield ("trainer dies",)
        for name, host in self.hosts.items():
            yield from ((action[0], name, *action[1:]) for action in self._of_host(host))

    def _of_host(self, host: Host) -> Iterator[Action]:
        left, machine, engine, work = self.left, host.machine, host.engine, host.work
        if work is not None:
            if work[0] == "pause" or work[3] or work[4]:
                yield ("works",)
                if work[0] == "receive" and not work[5]:
                    yield ("half",)
                if left.lies and work[0] == "receive":
                    yield ("lies",)
            if left.breaks:
                yield ("breaks",)
        if machine.stage is MemberStage.APPLIED:
            yield from (("hears beat", beat[1:]) for beat in self.beats if beat[0] == machine.name)
        if left.breaks and machine.key is not None:
            yield ("gives up",)
        if left.breaks and engine.paused and (work is None or work[0] == "pause"):
            yield ("pause runs out",)
        if machine.stage is MemberStage.IDLE and self._seen(host) != machine.version:
            yield ("looks",)
        if left.engine_deaths:
            yield ("engine dies",)
        if left.host_deaths:
            yield ("host dies",)

    # -- what comes of it

    def after(self, action: Action) -> World:
        """Return the state after an action.

        Raises:
            Violation: It breaks a rule.
        """
        world = self.copied()
        name = action[0].replace(" ", "_")
        getattr(world, f"do_{name}")(*action[1:])
        world.fill_barrier()
        # it may say so at any time, and whatever is said may be lost
        world.network |= {said(joining(host.machine)) for host in world.hosts.values()}
        world.check()
        return world

    def spend(self, what: str) -> None:
        """Take one of the things that may happen so often only."""
        self.left = replace(self.left, **{what: getattr(self.left, what) - 1})

    def do_start(self) -> None:
        self.spend("tries")
        prepare = SyncEvent(verb="prepare", sender="t", rendezvous={"generation": self.generation})
        self._trainer_does(self.trainer.start((self.generation, self.step), self.step, prepare, 0.0))

    def do_pull(self, name: str) -> None:
        self.spend("tries")
        prepare = SyncEvent(verb="prepare", sender="t", rendezvous={"generation": self.generation})
        self._trainer_does(self.trainer.pull(name, prepare, 0.0))

    def do_deliver(self, key: Event, to: str, now: float = LONG_AFTER) -> None:
        event, t = KNOWN[key], self.trainer
        if to != "t":
            machine = self.hosts[to].machine
            if event.verb in {"commit", "abort"}:
                commands = machine.commit(event) if event.verb == "commit" else machine.abort(event)
            else:
                commands = machine.prepare(event, 0.0) if event.verb == "prepare" else machine.go(event, 0.0)
            self.host_does(to, commands)
        elif event.verb == "join":
            self._trainer_does(t.join(event.sender, event.version, now, lease=NEVER, life=event.life))
        elif event.verb == "leave":
            self._trainer_does(t.leave(event.sender, 0.0, life=event.life))
        elif event.verb == "applied":
            self._trainer_does(t.applied(event, None if event.canary["good"] else "differs", 0.0))
        else:
            receive = {"ready": t.ready, "failed": t.failed}[event.verb]
            self._trainer_does(receive(event, 0.0))

    def do_deadline(self) -> None:
        self.spend("breaks")
        self._trainer_does(self.trainer.tick(TIMEOUT))

    def do_pull_deadline(self, name: str) -> None:
        self.spend("breaks")
        self.trainer.pull_runs_out(name)

    def do_lease(self, name: str) -> None:
        self.spend("breaks")
        self.trainer.members[name].lease_ends = 0.0
        self._trainer_does(self.trainer.tick(0.0))

    def do_sent(self) -> None:
        assert self.collective is not None
        epoch, attempt, *_ = self.collective
        self.collective, self.group = None, (self.generation, epoch)
        self._trainer_does(self.trainer.collective_done(epoch, attempt, 0.0))

    def do_cut(self) -> None:
        assert self.collective is not None
        self.spend("breaks")
        epoch, attempt, *_ = self.collective
        self.collective = self.group = None
        self._trainer_does(self.trainer.collective_failed(epoch, attempt, "cut"))

    def do_trainer_dies(self) -> None:
        self.spend("trainer_deaths")
        self.generation, self.step, self.collective, self.group = self.generation + 1, 0, None, None
        self.trainer = self.trainer_type.started()

    def do_works(self, name: str, *, lies: bool = False) -> None:
        host = self.hosts[name]
        work, host.work = host.work, None
        assert work is not None
        if work[0] == "pause":
            self.host_does(name, host.machine.paused(work[1]))
            return
        engine, (version, epoch, _) = host.engine, work[1]
        if not lies:
            engine.weights = version
        engine.phase, engine.version, engine.applied = "dirty", None, True
        if not work[3]:
            engine.group = (work[2], epoch)
        self.host_does(name, host.machine.received(work[1], {"good": engine.weights == version}))

    def do_half(self, name: str) -> None:
        host = self.hosts[name]
        assert host.work is not None
        host.work = (*host.work[:5], True)
        host.engine.phase, host.engine.version, host.engine.weights, host.engine.applied = "dirty", None, None, False

    def do_lies(self, name: str) -> None:
        self.spend("lies")
        self.do_works(name, lies=True)

    def do_breaks(self, name: str) -> None:
        self.spend("breaks")
        host = self.hosts[name]
        work, host.work = host.work, None
        assert work is not None
        if work[0] == "pause":
            host.engine.paused = False
        self.host_does(name, host.machine.broke(work[1], "broke", touched=work[0] == "receive" and work[5]))

    def do_hears_beat(self, name: str, given: Event) -> None:
        self.host_does(name, self.hosts[name].machine.tick(0.0, given))

    def do_gives_up(self, name: str) -> None:
        self.spend("breaks")
        self.host_does(name, self.hosts[name].machine.tick(NEVER, None))

    def do_pause_runs_out(self, name: str) -> None:
        self.spend("breaks")
        engine = self.hosts[name].engine
        engine.paused = engine.applied = False

    def do_looks(self, name: str) -> None:
        host = self.hosts[name]
        host.machine.version = self._seen(host)

    def do_engine_dies(self, name: str) -> None:
        self.spend("engine_deaths")
        host = self.hosts[name]
        host.work, host.engine = None, Engine(host.engine.life + 1)
        self.host_does(name, host.machine.lost_engine())
        host.machine.life = f"{host.machine.life}e"

    def do_host_dies(self, name: str) -> None:
        self.spend("host_deaths")
        host = self.hosts[name]
        host.work = None
        host.machine = self.member_type(name, life=f"{host.machine.life}h", version=self._seen(host))

    # -- inside

    @staticmethod
    def _seen(host: Host) -> Version | None:
        """Return what the engine says it holds."""
        return host.engine.version if host.engine.phase == "current" else None

    def _say(self, event: SyncEvent) -> None:
        self.network |= {said(event)}

    def _trainer_does(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, SyncEvent):
                self._say(command)
            elif isinstance(command, StartCollective):
                key = (command.version, command.epoch, command.attempt)
                self.collective = (command.epoch, command.attempt, command.version, command.members, False)
                received = {event[1] for event in self.network if event[0] == "ready" and event[3:6] == key}
                rule(received == set(command.members), f"go without ready of all: {received}, {command.members}")
            elif isinstance(command, AbandonCollective):
                self.collective = self.group = None
            elif isinstance(command, Committed) and not command.pulled:
                last = max(self.committed, default=(0, 0))
                rule(command.version > last, f"{command.version} is committed after {last}")
                self.committed += (command.version,)
                self.step += 1
        members = self.trainer.members.items()
        self.beats |= {(n, m.version, *m.given) for n, m in members if m.version and m.given != (0, 0)}

    def host_does(self, name: str, commands: list[Any]) -> None:
        host = self.hosts[name]
        engine = host.engine
        for command in commands:
            if isinstance(command, SyncEvent):
                self._say(command)
            elif isinstance(command, Pause):
                engine.paused, host.work = True, ("pause", command.key)
            elif isinstance(command, Receive):
                where = command.prepare.rendezvous["generation"]
                host.work = ("receive", command.key, where, command.prepare.pull, False, False)
            elif isinstance(command, Commit):
                if engine.applied or (engine.phase == "current" and engine.version == command.version):
                    engine.phase, engine.version = "current", command.version
                    engine.paused = engine.applied = False
                else:
                    host.machine.version = None
            elif isinstance(command, Resume):
                host.work, engine.paused, engine.applied = None, False, False
            else:
                assert isinstance(command, Rejoin)

    def fill_barrier(self) -> None:
        """Open the barrier if everybody is there."""
        if self.collective is None or self.collective[4]:
            return
        epoch, attempt, version, members, _ = self.collective
        here = (version, epoch, attempt)
        inside = [self.hosts[name] for name in members]
        if any(h.work is None or h.work[:3] != ("receive", here, self.generation) for h in inside):
            return
        keep = {host.engine.group == (self.generation, epoch) for host in inside}
        keep.add(self.group == (self.generation, epoch))
        rule(len(keep) == 1, f"some would use the group of epoch {epoch} again, some have never been in it")
        self.collective = (epoch, attempt, version, members, True)
        for host in inside:
            assert host.work is not None
            host.work = (*host.work[:4], True, False)

    def check(self) -> None:
        """Raise if something is so that never may be."""
        for name, host in self.hosts.items():
            engine = host.engine
            if engine.phase == "current" and not engine.paused:
                rule(engine.version == engine.weights, f"{name} serves {engine.weights} as {engine.version}")
                rule(engine.version in self.committed, f"{name} serves {engine.version}, which was never committed")

    # -- the way out

    @property
    def good(self) -> bool:
        """Everybody serves the committed version, nothing is under way."""
        t = self.trainer
        rest = t.phase is Phase.IDLE and t.committed is not None and set(t.members) == set(self.hosts)
        return rest and not t.stale_members() and all(h.engine.version == t.committed for h in self.hosts.values())

    def fair(self) -> World:
        """Return this state in a world where nothing goes wrong any more, and everything said before is lost."""
        world = self.copied()
        world.left = Bounds(len(world.hosts), 99, 99, 0, 0, 0, 0, 99)
        world.lost = world.network
        return world

    def fair_round(self) -> World:
        """Return what comes next: all that is new arrives, all work ends well; where nothing moves, time runs out."""
        world, before = self, self.key()
        for name in self.hosts:
            world = world.fairly(("looks", name), ("works", name))
            join = said(joining(world.hosts[name].machine))
            world = world.carry(("deliver", join, "t"))
        for event in sorted(world.network - world.lost, key=str):
            if event[0] in {"prepare", "go", "commit", "abort"}:
                for name in self.hosts:
                    world = world.carry(("deliver", event, name))
            else:
                world = world.carry(("deliver", event, "t"))
        world.lost = world.lost | self.network
        world = world.fairly(("sent",), *(("pull", name) for name in world.trainer.due_catch_ups(0.0)))
        t = world.trainer
        if t.phase is Phase.IDLE and t.members and t.committed is None:
            world = world.carry(("start",))
        if world.key()[0] != before[0] or world.key()[2] != before[2]:
            return world
        world = world.fairly(("cut",), ("deadline",), *(("pull deadline", name) for name in t.pulling()))
        for name in world.hosts:
            world = world.fairly(("breaks", name), ("gives up", name), ("pause runs out", name))
        return world

    def fairly(self, *actions: Action) -> World:
        world = self
        for action in actions:
            if action in list(world.actions()):
                world = world.carry(action)
        return world

    def carry(self, action: Action) -> World:
        world = self.after(action)
        world.lost = self.lost
        return world


pytestmark = pytest.mark.timeout(300)

ROUNDS = 60
"""Rounds in which a fair world gets out of any state."""


def explore(first: World, limit: int | None = None, way_out_of: int = 1) -> int:
    """Visit every state that a world may come to, or ``limit`` of them; returns how many. Out of every
    ``way_out_of``-th, look for a way.

    Raises:
        Violation: A rule is broken; says by which actions it came to that.
    """
    seen = {first.key(): 0}
    todo = deque([(first, 0)])
    came_by: list[tuple[int, Action]] = [(0, ())]
    while todo and (limit is None or len(seen) < limit):
        world, number = todo.popleft()
        if number % way_out_of == 0:
            _finds_a_way_out(world, lambda number=number: _path(came_by, number))
        for action in list(world.actions()):
            try:
                after = world.after(action)
            except Violation as broken:
                raise Violation(f"{broken}, after {_path(came_by, number)} and {action}") from None
            key = after.key()
            if key not in seen:
                seen[key] = len(came_by)
                todo.append((after, len(came_by)))
                came_by.append((number, action))
    return len(seen)


def _path(came_by: list[tuple[int, Action]], number: int) -> str:
    steps = []
    while number:
        number, action = came_by[number]
        steps.append(str(action))
    return "\n".join(reversed(steps))


def _finds_a_way_out(world: World, path: Callable[[], str]) -> None:
    """From here on nothing is lost and nobody dies: the gate must come to a commit at everybody, and to rest."""
    world = world.fair()
    for _ in range(ROUNDS):
        if world.good:
            return
        world = world.fair_round()
    raise Violation(f"no way out of {world.key()}, after {path()}")


COMPLETE = {
    "two versions": Bounds(versions=2, tries=3, breaks=0),
    "something breaks": Bounds(versions=2, tries=2, breaks=1),
    "one that lies": Bounds(versions=2, tries=3, breaks=0, lies=1),
    "its engine dies": Bounds(versions=1, tries=2, breaks=0, engine_deaths=1),
    "its host dies": Bounds(versions=1, tries=2, breaks=0, host_deaths=1),
    "the trainer dies": Bounds(versions=1, tries=3, breaks=0, trainer_deaths=1),
    "two members": Bounds(members=2, versions=1, tries=2, breaks=0),
}
LARGE = {
    "two versions, much breaks": Bounds(versions=2, tries=3, breaks=2),
    "two members, something breaks": Bounds(members=2, versions=1, tries=1, breaks=1),
    "two members, one lies": Bounds(members=2, versions=2, tries=3, breaks=0, lies=1),
    "three members": Bounds(members=3, versions=1, tries=1, breaks=0),
}
"""By hand, or as far as there is time."""


@pytest.mark.parametrize("bounds", COMPLETE.values(), ids=list(COMPLETE))
def test_every_order_of_events_keeps_the_rules_and_leaves_a_way_out(bounds: Bounds) -> None:
    assert explore(World(bounds), way_out_of=10) > 300


@pytest.mark.parametrize("bounds", LARGE.values(), ids=list(LARGE))
def test_the_nearest_states_of_larger_worlds_keep_them_too(bounds: Bounds) -> None:
    assert explore(World(bounds), limit=1000, way_out_of=20) > 300


# -- a rule broken on purpose


class AnswersToAnyTryCount(Trainer):
    def _is_ours(self, event: SyncEvent) -> bool:
        return event.sender in self._taking_part


class AFailedGroupIsKept(Trainer):
    def collective_failed(self, epoch: int, attempt: int, reason: str) -> list[Any]:
        grouped = self._grouped
        commands = super().collective_failed(epoch, attempt, reason)
        self._grouped = grouped
        return commands


class LivesAreNotToldApart(Trainer):
    def _is_restarted(self, event: SyncEvent) -> bool:
        return False


class TheCanaryIsNotLookedAt(Trainer):
    def applied(self, event: SyncEvent, canary_error: str | None, now: float) -> list[Any]:
        return super().applied(event, None, now)


class NothingHasADeadline(Trainer):
    def tick(self, now: float) -> list[Any]:
        return []


class ACommitOfAnotherTryCounts(EngineMember):
    def commit(self, event: SyncEvent) -> list[Any]:
        if self.stage is MemberStage.APPLIED and self._prepare is not None and event.version == self._prepare.version:
            return self._committed(self._prepare.version, 0)
        return []


class ALatePrepareIsTakenUpAgain(EngineMember):
    """Found by the checker in an earlier form of the gate."""

    def prepare(self, event: SyncEvent, now: float) -> list[Any]:
        self._latest = (0, 0)
        return super().prepare(event, now)


class GenerationsDoNotRise(World):
    def do_trainer_dies(self) -> None:
        super().do_trainer_dies()
        self.generation = 1


class AnUntouchedMemberIsNotToldFromADirtyOne(World):
    def host_does(self, name: str, commands: list[Any]) -> None:
        super().host_does(name, commands)
        engine = self.hosts[name].engine
        if engine.phase == "dirty" and any(isinstance(command, Resume) for command in commands):
            engine.phase, engine.version = "current", max(self.committed, default=None)


BROKEN: dict[type[Any], tuple[Bounds, str]] = {
    AnswersToAnyTryCount: (Bounds(versions=1, tries=2, breaks=1), "go without ready of all"),
    AFailedGroupIsKept: (Bounds(versions=2, tries=3, breaks=1), "some have never been in it"),
    LivesAreNotToldApart: (Bounds(versions=2, tries=2, breaks=0, engine_deaths=1), "some have never been in it"),
    TheCanaryIsNotLookedAt: (Bounds(versions=1, tries=1, breaks=0, lies=1), "m0 serves"),
    ACommitOfAnotherTryCounts: (Bounds(members=2, versions=1, tries=2, breaks=0, lies=1), "serves"),
    GenerationsDoNotRise: (Bounds(versions=1, tries=2, breaks=0, trainer_deaths=1), "is committed after"),
    NothingHasADeadline: (Bounds(versions=1, tries=1, breaks=0), "no way out"),
    ALatePrepareIsTakenUpAgain: (Bounds(versions=1, tries=2, breaks=0, lies=1), "m0 serves"),
    AnUntouchedMemberIsNotToldFromADirtyOne: (Bounds(versions=1, tries=1, breaks=1), "m0 serves"),
}


def world_with(broken: type[Any]) -> type[World]:
    """Return a world in which one of the classes is replaced by ``broken``."""
    if issubclass(broken, World):
        return broken
    kind = "trainer_type" if issubclass(broken, Trainer) else "member_type"
    return type(broken.__name__, (World,), {kind: broken})


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_found(broken: type[Any]) -> None:
    bounds, message = BROKEN[broken]
    with pytest.raises(Violation, match=message):
        explore(world_with(broken)(bounds), way_out_of=5)


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, bounds in {**COMPLETE, **LARGE}.items():
        began = time.monotonic()
        found = explore(World(bounds), most, way_out_of=10)
        sys.stdout.write(f"{name}: {found} states in {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
