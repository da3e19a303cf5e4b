"""Responses of a session to which later requests refer by their ids (``previous_response_id``).

A response is stored with the messages that were new in its request, and names the response before it. It is part of the
session's record, so that it is known after a restart and at every gateway. Responses of sessions without a record are
known only to the gateway that answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trinity_mq.messages import SessionCall
from trinity_mq.messages.sessions import StoredResponse


class StoredResponses:
    """Stored responses of one session."""

    def __init__(self) -> None:
        self.local_bytes = 0
        """Bytes of the responses that the session's record does not hold."""
        self._recorded_bytes = 0
        self._local: dict[str, StoredResponse] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of each response in the session's record that was counted."""

    @property
    def bytes(self) -> int:
        """Bytes of all responses."""
        return self.local_bytes + self._recorded_bytes

    def catch_up(self, calls: Mapping[str, SessionCall]) -> None:
        """Count the responses of the session's record.

        Args:
            calls: Calls of the session by id.
        """
        if len(self._sizes) == len(calls):
            return
        for name, call in calls.items():
            if name not in self._sizes:
                size = self._sizes[name] = 0 if call.stored is None else _size(call.stored)
                self._recorded_bytes += size
                if self._local.pop(name, None) is not None:
                    self.local_bytes -= size

    def add(self, call: str, response: StoredResponse, limit: int) -> bool:
        """Store a response. Return False if the session's responses would take more than ``limit`` bytes."""
        size = _size(response)
        if self.bytes + size > limit:
            return False
        self._local[call] = response
        self.local_bytes += size
        return True

    def of(self, call: str, calls: Mapping[str, SessionCall]) -> StoredResponse | None:
        """Return a stored response. None: it is not stored."""
        recorded = calls.get(call)
        return self._local.get(call) if recorded is None else recorded.stored

    def messages(self, call: str, calls: Mapping[str, SessionCall]) -> list[dict[str, Any]] | None:
        """Return the messages of a stored response's conversation, its answer included. None: they are not stored."""
        parts: list[list[dict[str, Any]]] = []
        seen: set[str] = set()
        while call:
            if call in seen or (response := self.of(call, calls)) is None:
                return None
            seen.add(call)
            parts.append([*response.messages, response.answer])
            call = response.follows
        return [message for part in reversed(parts) for message in part]


def _size(response: StoredResponse) -> int:
    return len(json.dumps([response.messages, response.answer]))
