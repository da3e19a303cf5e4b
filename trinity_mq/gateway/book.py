"""Storage of a gateway's sessions: in memory for those of a workflow's run, on a stream for those of a training run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Protocol

from trinity_mq.gateway.ledger import Applied, Ledger
from trinity_mq.gateway.session import Event, Session
from trinity_mq.messages import (
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReward,
    SessionsCommitted,
)

Said = SessionReward | SessionEnd | SessionsCommitted
"""Events that come from outside."""


class BookUnavailable(Exception):
    """An event cannot be kept now. Sending it again later may succeed."""


class EventTooLarge(Exception):
    """An event does not fit into a message. Sending it again does not help."""


class Book(Protocol):
    """Keeps the events of sessions."""

    ledger: Ledger

    async def open(self, opened: SessionOpened, *, at_once: bool = False) -> None:
        """Begin a session.

        Args:
            opened: Its beginning.
            at_once: Do not wait for storage that is known to be away.

        Raises:
            BookUnavailable: It cannot be kept now.
            EventTooLarge: It is too large.
            ContentError: It holds a value that cannot travel.
        """

    async def find(self, session: str) -> Session | None:
        """Return a session, after a short wait where it is not known yet: another gateway may have begun it."""

    async def find_key(self, key_hash: str) -> Session | None:
        """Return the live session whose key has this hash, after the same wait."""

    async def record(self, call: SessionCall) -> bool:
        """Keep an answer; return whether it is sure to be kept by now."""

    async def say(self, event: Said, message_id: str) -> Applied:
        """Keep an event from outside, once by its id, and return its effect.

        Raises:
            BookUnavailable: It cannot be kept now.
            EventTooLarge: It is too large.
            ContentError: It holds a value that cannot travel.
        """

    def is_ready(self) -> bool:
        """Return whether all earlier events are known."""


class MemoryBook:
    """Sessions that end with this process.

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

    async def record(self, call: SessionCall) -> bool:
        return self._apply(call, call.message_id).taken == "new"

    async def say(self, event: Said, message_id: str) -> Applied:
        if isinstance(event, SessionsCommitted):
            self.ledger.apply_committed()
            return Applied("new")
        return self._apply(event, message_id)

    def is_ready(self) -> bool:
        return True

    def _apply(self, body: SessionOpened | SessionCall | SessionReward | SessionEnd, message_id: str) -> Applied:
        offset = next(self._offsets)
        return self.ledger.apply(Event(offset, 0, message_id, self._clock(), body, 0))
