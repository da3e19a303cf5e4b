"""The gate's machines, model-checked: every order of events within bounds.

``python -m tests.unit.sync.test_gate_model`` explores larger bounds and says how many states there were.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

import pytest

from tests.unit.sync.gate_world import Action, Bounds, Violation, World

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


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, bounds in {**COMPLETE, **LARGE}.items():
        began = time.monotonic()
        found = explore(World(bounds), most, way_out_of=10)
        sys.stdout.write(f"{name}: {found} states in {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()
