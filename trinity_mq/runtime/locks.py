"""Acting only while the run's lock is ours."""

from __future__ import annotations

from trinity_mq.bus import Bus, Lock
from trinity_mq.runtime.errors import RestartMe


async def ensure_held(bus: Bus, lock: Lock | None) -> None:
    """Return while ``lock`` is ours, waiting through a lost connection; None is no lock at all.

    Raises:
        RestartMe: Another took it meanwhile: what we were about to write is no longer ours to write.
    """
    if lock is None or lock.held:
        return
    await bus.wait_usable()
    if not lock.held:
        raise RestartMe("another agent of this role has taken over while we were disconnected")
