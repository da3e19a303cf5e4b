from __future__ import annotations

import asyncio

import pytest

from trinity_mq.engines.state import EngineState, StateError


async def applied(state: EngineState) -> None:
    state.pause(60.0)
    state.touch()
    state.applied = True


async def test_from_empty_to_current() -> None:
    state = EngineState()
    assert state.label == "empty"
    problem = state.problem(None)
    assert problem is not None
    assert (problem.status, problem.code, problem.retry_after) == (503, "engine_not_current", 1.0)
    await applied(state)
    assert state.label == "paused"
    assert state.problem(None) is None, "a pause passes: requests wait"
    state.commit((1, 0), 3)
    assert (state.label, state.version, state.progress) == ("current", (1, 0), 3)
    assert state.problem(None) is None


async def test_commit_needs_received_weights_unless_the_version_is_held_already() -> None:
    state = EngineState()
    with pytest.raises(StateError, match="no weights were received"):
        state.commit((1, 0), 0)
    await applied(state)
    state.commit((1, 0), 1)
    state.commit((1, 0), 4)
    assert state.progress == 4
    with pytest.raises(StateError, match=r"holds \(1, 0\)"):
        state.commit((1, 1), 5)
    state.pause(60.0)
    state.touch()
    with pytest.raises(StateError, match="is dirty"):
        state.commit((1, 1), 5)


async def test_weights_are_committed_as_the_version_that_they_came_as():
    state = EngineState()
    state.pause(60.0)
    state.touch((2, 2))
    state.applied = True
    with pytest.raises(StateError, match=r"received weights belong to \(2, 2\)"):
        state.commit((2, 0), 0)
    assert (state.label, state.version) == ("paused", None), "its own host can still commit it"
    state.commit((2, 2), 3)
    assert (state.label, state.version, state.progress) == ("current", (2, 2), 3)


async def test_resume_serves_the_old_version_if_untouched_else_nothing() -> None:
    state = EngineState()
    await applied(state)
    state.commit((1, 0), 1)
    state.pause(60.0)
    state.resume()
    assert (state.label, state.version) == ("current", (1, 0))
    await applied(state)
    state.resume()
    assert (state.label, state.version) == ("dirty", None)
    problem = state.problem(None)
    assert problem is not None
    assert problem.code == "engine_not_current"
    with pytest.raises(StateError):
        state.commit((1, 1), 2)


async def test_pins() -> None:
    state = EngineState()
    await applied(state)
    state.commit((1, 5), 1)
    assert state.problem((1, 5)) is None
    problem = state.problem((1, 4))
    assert problem is not None
    assert (problem.status, problem.code) == (409, "version_mismatch")
    assert problem.extra == {"wanted": [1, 4], "held": [1, 5]}


async def test_a_pause_lease_stands_still_while_weights_arrive() -> None:
    state = EngineState()
    await applied(state)
    state.commit((1, 0), 1)
    state.pause(0.03)
    state.receiving = True
    await asyncio.sleep(0.1)
    assert state.paused
    state.receiving = False
    async with asyncio.timeout(1.0):
        await state.running.wait()
    assert state.label == "current"


async def test_draining_refuses_everything() -> None:
    state = EngineState()
    await applied(state)
    state.commit((1, 0), 1)
    state.draining = True
    problem = state.problem(None)
    assert problem is not None
    assert (problem.status, problem.code) == (503, "engine_stopping")
