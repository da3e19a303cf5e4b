"""Locks of a run: taken by one agent at a time, which acts only while it holds its lock."""

from __future__ import annotations

from collections.abc import Callable

from trinity_mq.bus import Bus, Lock, LockHeld
from trinity_mq.runtime.agent import Agent
from trinity_mq.runtime.errors import RestartMe

RETRY = 2.0
"""Seconds between two tries to take a lock that another agent holds."""


async def acquire(agent: Agent, name: str, state: str, waits_for: str, *, until: Callable[[], bool]) -> Lock | None:
    """Return the run's lock ``name`` once it is free; None if ``until`` holds before.

    Meanwhile the agent's heartbeats say ``state`` and ``waits_for``.
    """
    while not until():
        try:
            return await agent.bus.lock(agent.topology.lock(name))
        except LockHeld:
            agent.set_state(state, waits_for)
            await agent.woken.wait(RETRY)
    return None


async def restart_when_lost(lock: Lock, reason: str) -> None:
    """Wait until the lock is lost.

    Raises:
        RestartMe: With ``reason``.
    """
    await lock.wait_lost()
    raise RestartMe(reason)


async def ensure_held(bus: Bus, lock: Lock | None) -> None:
    """Return while ``lock`` is held, waiting through a lost connection; None means that no lock is needed.

    Raises:
        RestartMe: Another agent took it meanwhile, which alone may write now.
    """
    if lock is None or lock.held:
        return
    await bus.wait_usable()
    if not lock.held:
        raise RestartMe("another agent of this role has taken over while we were disconnected")
