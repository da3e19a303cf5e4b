"""The gate's machines, model-checked: every order of events within bounds, and the same with a rule broken on purpose.

``python -m tests.unit.sync.test_gate_model`` explores larger bounds and says how many states there were.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.sync.gate_parts import Bounds, EngineMember, Trainer, Violation
from tests.unit.sync.gate_world import Action, World
from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.member import MemberStage, Resume

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
