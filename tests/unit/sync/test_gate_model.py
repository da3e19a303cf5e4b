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

from tests.unit.sync.gate_parts import Bounds, Violation
from tests.unit.sync.gate_world import Action, World
from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.coordinator import Coordinator
from trinity_mq.sync.gate.member import Member, MemberStage, Resume

pytestmark = pytest.mark.timeout(300)

ROUNDS = 60
"""Rounds in which a fair world gets out of any state."""


def explore(bounds: Bounds, limit: int | None = None, way_out_of: int = 1) -> int:
    """Visit every state within bounds, or ``limit`` of them; returns how many. Out of every ``way_out_of``-th, look for
    a way.

    Raises:
        Violation: A rule is broken; says by which actions it came to that.
    """
    first = World(bounds)
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
    assert explore(bounds, way_out_of=10) > 300


@pytest.mark.parametrize("bounds", LARGE.values(), ids=list(LARGE))
def test_the_nearest_states_of_larger_worlds_keep_them_too(bounds: Bounds) -> None:
    assert explore(bounds, limit=1000, way_out_of=20) > 300


# -- a rule broken on purpose


def answers_to_any_try_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_is_ours", lambda self, event: event.sender in self._taking_part)


def a_failed_group_is_kept(patch: pytest.MonkeyPatch) -> None:
    fail = Coordinator._fail

    def keeping(self: Coordinator, reason: str, lost: tuple[str, ...]) -> Any:
        grouped = self._grouped
        commands = fail(self, reason, lost)
        self._grouped = grouped
        return commands

    patch.setattr(Coordinator, "_fail", keeping)


def lives_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_is_restarted", lambda self, event: False)


def the_canary_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    applied = Coordinator.applied
    patch.setattr(Coordinator, "applied", lambda self, event, error, now: applied(self, event, None, now))


def a_commit_of_another_try_counts(patch: pytest.MonkeyPatch) -> None:
    def careless(self: Member, event: SyncEvent) -> Any:
        if self.stage is MemberStage.APPLIED and self._prepare is not None and event.version == self._prepare.version:
            return self._committed(self._prepare.version, 0)
        return []

    patch.setattr(Member, "commit", careless)


def generations_do_not_rise(patch: pytest.MonkeyPatch) -> None:
    dies = World._do_trainer_dies

    def again(self: World) -> None:
        dies(self)
        self.generation = 1

    patch.setattr(World, "_do_trainer_dies", again)


def nothing_has_a_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "tick", lambda self, now: [])


def an_untouched_member_is_not_told_from_a_dirty_one(patch: pytest.MonkeyPatch) -> None:
    commit = World._host_does

    def careless(self: World, name: str, commands: list[Any]) -> None:
        commit(self, name, commands)
        engine = self.hosts[name].engine
        if engine.phase == "dirty" and any(isinstance(command, Resume) for command in commands):
            engine.phase, engine.version = "current", max(self.committed, default=None)

    patch.setattr(World, "_host_does", careless)


def a_late_prepare_is_taken_up_again(patch: pytest.MonkeyPatch) -> None:
    """Found by the checker in an earlier form of the gate."""
    prepare = Member.prepare

    def forgetful(self: Member, event: SyncEvent, now: float) -> Any:
        self._latest = (0, 0)
        return prepare(self, event, now)

    patch.setattr(Member, "prepare", forgetful)


BROKEN = {
    answers_to_any_try_count: (Bounds(versions=1, tries=2, breaks=1), "go without ready of all"),
    a_failed_group_is_kept: (Bounds(versions=2, tries=3, breaks=1), "some have never been in it"),
    lives_are_not_told_apart: (Bounds(versions=2, tries=2, breaks=0, engine_deaths=1), "some have never been in it"),
    the_canary_is_not_looked_at: (Bounds(versions=1, tries=1, breaks=0, lies=1), "m0 serves"),
    a_commit_of_another_try_counts: (Bounds(members=2, versions=1, tries=2, breaks=0, lies=1), "serves"),
    generations_do_not_rise: (Bounds(versions=1, tries=2, breaks=0, trainer_deaths=1), "is committed after"),
    nothing_has_a_deadline: (Bounds(versions=1, tries=1, breaks=0), "no way out"),
    a_late_prepare_is_taken_up_again: (Bounds(versions=1, tries=2, breaks=0, lies=1), "m0 serves"),
    an_untouched_member_is_not_told_from_a_dirty_one: (Bounds(versions=1, tries=1, breaks=1), "m0 serves"),
}


@pytest.mark.parametrize("break_rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_broken_rule_is_found(break_rule: Callable[[pytest.MonkeyPatch], None]) -> None:
    bounds, said_so = BROKEN[break_rule]
    with pytest.MonkeyPatch.context() as patch:
        break_rule(patch)
        with pytest.raises(Violation, match=said_so):
            explore(bounds, way_out_of=5)


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, bounds in {**COMPLETE, **LARGE}.items():
        began = time.monotonic()
        found = explore(bounds, most, way_out_of=10)
        sys.stdout.write(f"{name}: {found} states in {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
