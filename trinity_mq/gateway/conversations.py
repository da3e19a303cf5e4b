"""State of sessions between their calls: lineages, stored responses, the engine of the last call, the call rate."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.gateway.lineages import SEQUENCE_BYTES, Lineages
from trinity_mq.gateway.session import Session
from trinity_mq.messages import SessionCall
from trinity_mq.messages.sessions import StoredResponse

MOST_BYTES = 64 * 1024**2
"""Estimated bytes of all conversations above which conversations without recent calls are removed. They are rebuilt
from the session's events at the next call."""
CONVERSATION_BYTES = 2048
"""Estimated bytes of a conversation without calls."""
MINUTE = 60.0


REMEMBERED_TRIES = 64
"""Maximum number of failed requests per session that a retry can match."""


@dataclass(slots=True, eq=False)
class Try:
    """A single request to the model. A client that gave up on the answer may send the request again."""

    call: str
    digest: str
    """Digest of the request. Equal requests have equal digests."""
    retry: int
    """Number of earlier attempts of the request, as stated by the client."""
    began: float
    """Arrival time in seconds since the epoch."""
    siblings: set[str] = field(default_factory=set)
    """Call ids of identical requests that ran at the same time. This request is not a retry of any of them."""
    is_recorded: bool = False
    """True once the answer was passed to the store. The store may still fail to keep it."""
    unknown_tries: int = field(init=False)
    """Number of the client's earlier attempts whose outcome this gateway does not know."""

    def __post_init__(self) -> None:
        self.unknown_tries = self.retry


class StoredResponses:
    """Responses of one session to which later requests refer by their ids (``previous_response_id``).

    A response is stored with the messages that were new in its request, and names the response before it. It is part of
    the session's record, so that it is known after a restart and at every gateway. Responses of sessions without a
    record are known only to the gateway that answered.
    """

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
        """Count the responses that the session's record holds now, and drop local copies of them.

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


@dataclass(slots=True)
class Conversation:
    """State of a session between its calls."""

    lineages: Lineages = field(default_factory=Lineages)
    responses: StoredResponses = field(default_factory=StoredResponses)
    under_way: dict[str, Try] = field(default_factory=dict)
    """Unanswered requests by call id."""
    failed: deque[Try] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TRIES))
    """Requests whose client got no answer, as far as this gateway knows, and that have no retry yet."""
    engine: str = ""
    """Id of the engine that answered the last call."""
    calls: int = 0
    times: deque[float] = field(default_factory=deque)
    """Loop times in seconds of the calls of the last minute."""
    counted_bytes: int = 0
    """Bytes of the conversation in the total of all conversations."""

    @property
    def bytes(self) -> int:
        """Estimated bytes of the conversation."""
        return CONVERSATION_BYTES + SEQUENCE_BYTES * self.lineages.count + self.responses.local_bytes

    def seconds_until_allowed(self, now: float, per_minute: int) -> float:
        """Return the seconds until the next call is allowed. Zero: it is allowed now."""
        while self.times and now - self.times[0] > MINUTE:
            self.times.popleft()
        return 0.0 if len(self.times) < per_minute else MINUTE - (now - self.times[0])

    @contextlib.contextmanager
    def trying(self, call: str, digest: str, *, retry: int, began: float) -> Iterator[Try]:
        """Register a request while it is in progress. Register it as failed if an error or its client ends it."""
        attempt = Try(call, digest, retry, began)
        for parallel in self.under_way.values():
            if parallel.digest == digest:
                parallel.siblings.add(call)
                attempt.siblings.add(parallel.call)
        self.under_way[call] = attempt
        try:
            yield attempt
        except BaseException:
            self.failed.append(attempt)
            raise
        finally:
            del self.under_way[call]

    def repeated_by(self, attempt: Try, calls: Collection[SessionCall]) -> str:
        """Return the id of the call whose answer this request supersedes, because the request is a retry of that call.
        Mark the call as retried. Empty: the request supersedes no answer.

        A retry matches an equal request that failed here; recorded requests come first. If the client numbers its
        attempts, the match is the previous attempt. If the previous attempt has no recorded answer, the match is the
        attempt before it. An attempt that did not fail here may have been answered by this or another gateway: then the
        latest answer to the same request is superseded. Answers to identical requests that ran at the same time belong
        to other callers and never match.

        Args:
            attempt: The current request.
            calls: Recorded calls of the session.
        """
        if not attempt.retry:
            return self._take_failed(attempt.digest) or ""
        while attempt.unknown_tries:
            failed = self._take_failed(attempt.digest, attempt.unknown_tries - 1)
            if failed is None:
                break
            if failed:
                attempt.unknown_tries = 0
                return failed
            attempt.unknown_tries -= 1
        for earlier in self.failed:
            if earlier.digest == attempt.digest and earlier.retry < attempt.unknown_tries:
                # requests parallel to an earlier attempt are not attempts of this client
                attempt.siblings |= earlier.siblings
        replaced = {call.supersedes for call in calls} | attempt.siblings
        equal = [
            call.call
            for call in calls
            if call.digest == attempt.digest and call.retry < attempt.unknown_tries and call.call not in replaced
        ]
        return equal[-1] if equal else ""

    def _take_failed(self, digest: str, retry: int | None = None) -> str | None:
        """Remove a failed attempt with this digest and, unless None, this retry number. Return its call id, an empty
        string if its answer was not recorded, or None if no attempt matches.
        """
        failed = [attempt for attempt in self.failed if attempt.digest == digest and retry in {None, attempt.retry}]
        if not failed:
            return None
        retried = max(failed, key=lambda attempt: attempt.is_recorded)
        self.failed.remove(retried)
        return retried.call if retried.is_recorded else ""


class Conversations:
    """Conversations of the sessions with the most recent calls.

    Args:
        most_bytes: Estimated bytes above which the conversations that were longest without a call are removed.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._most_bytes = most_bytes
        self.bytes = 0
        """Estimated bytes of all conversations."""

    def of(self, session: Session) -> Conversation:
        """Return the conversation of a session, with all calls of its record."""
        conversation = self._known.get(session.id)
        if conversation is None:
            conversation = self._known[session.id] = Conversation(calls=session.asked)
        self._known.move_to_end(session.id)
        conversation.lineages.catch_up(session.calls)
        conversation.responses.catch_up(session.calls)
        self.weigh(conversation)
        return conversation

    def weigh(self, conversation: Conversation) -> None:
        """Count the size of a conversation that has changed, and remove other conversations if all together take too
        many bytes.
        """
        size = conversation.bytes
        self.bytes += size - conversation.counted_bytes
        conversation.counted_bytes = size
        if self.bytes <= self._most_bytes:
            return
        for name, oldest in list(self._known.items()):
            if self.bytes <= self._most_bytes:
                break
            if oldest is not conversation and not oldest.under_way:
                self.forget(name)

    def forget(self, session: str) -> None:
        """Remove the conversation of a session."""
        conversation = self._known.pop(session, None)
        if conversation is not None:
            self.bytes -= conversation.counted_bytes
            conversation.counted_bytes = 0


def digest_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the digest of a request: equal requests have equal digests."""
    return hashlib.sha256(f"{path}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()[:32]
