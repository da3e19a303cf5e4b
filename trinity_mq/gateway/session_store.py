"""Interface of the storage of sessions, and the storage in memory for a single run of a workflow. The gateway of a
training run stores its sessions on a stream instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

from trinity_mq.gateway.ledger import Ledger
from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import (
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReward,
    SessionsCommitted,
)
from trinity_mq.transport.event_log import EventEffect

OutsideEvent = SessionReward | SessionEnd | SessionsCommitted
"""Events that agents, rewarders and operators send."""


class SessionsUnavailable(Exception):
    """An event cannot be stored now. Sending it again later may succeed."""


class EventTooLarge(Exception):
    """An event exceeds the size limit of a message. Sending it again does not help."""


class SessionStore(Protocol):
    """Stores the events of sessions."""

    ledger: Ledger

    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        """Create a session.

        Args:
            opened: The opened event of the session.
            at_once: Fail immediately if the storage is known to be unreachable.

        Raises:
            SessionsUnavailable: The event cannot be stored now.
            EventTooLarge: The event is too large.
            ContentError: The event holds a value that no message can carry.
        """

    async def find(self, session: str) -> Session | None:
        """Return a session by id, None if it is unknown. Wait briefly for an unknown session: another gateway may have
        just created it.
        """

    async def find_key(self, key_hash: str) -> Session | None:
        """Return the unsettled session with this key hash, or None. Wait briefly for an unknown key, as :meth:`find`
        does.
        """

    async def find_call(self, session: str, call: str) -> SessionCall | None:
        """Return a call of an unsettled session, or None. Wait briefly for an unknown call, as :meth:`find` does."""

    async def record(self, call: SessionCall) -> bool:
        """Store an answer and return whether it is certainly stored by now."""

    async def report(self, event: OutsideEvent, message_id: str) -> EventEffect:
        """Store an outside event, at most once per message id, and return its effect.

        Raises:
            SessionsUnavailable: The event cannot be stored now.
            EventTooLarge: The event is too large.
            ContentError: The event holds a value that no message can carry.
        """

    def is_ready(self) -> bool:
        """Return whether all earlier events have been read."""


class MemorySessionStore:
    """Stores sessions in memory. They end with this process.

    Args:
        clock: Returns seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.ledger = Ledger()
        self._clock = clock
        self._offsets = itertools.count()

    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        self._apply(opened, f"opened-{opened.session}")

    async def find(self, session: str) -> Session | None:
        return self.ledger.get(session)

    async def find_key(self, key_hash: str) -> Session | None:
        return self.ledger.of_key(key_hash)

    async def find_call(self, session: str, call: str) -> SessionCall | None:
        return self.ledger.call(session, call)

    async def record(self, call: SessionCall) -> bool:
        return self._apply(call, call.message_id).taken == "new"

    async def report(self, event: OutsideEvent, message_id: str) -> EventEffect:
        if isinstance(event, SessionsCommitted):
            self.ledger.apply_committed()
            return EventEffect("new")
        return self._apply(event, message_id)

    def is_ready(self) -> bool:
        return True

    def _apply(self, body: SessionOpened | SessionCall | SessionReward | SessionEnd, message_id: str) -> EventEffect:
        offset = next(self._offsets)
        return self.ledger.apply(Event(offset, 0, message_id, self._clock(), body, 0))
