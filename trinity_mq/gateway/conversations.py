"""State of sessions between their calls: the latest turns, the engine that answered, the rate of calls."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.gateway.recorded_call import KEPT_TURNS, Answers, Turn
from trinity_mq.gateway.session import Session
from trinity_mq.messages import SessionCall

REMEMBERED = 20_000
"""Sessions whose conversation is kept. That of another one is worked out from its events when it calls."""
MINUTE = 60.0


REMEMBERED_TRIES = 64
"""Failed requests of a session that a repeat may be of."""


@dataclass(slots=True, eq=False)
class Try:
    """One request to the model. A client that gives it up may repeat it."""

    call: str
    digest: str
    """The same text for the same request."""
    retry: int
    """Number of times that the client sent the request before, as the client says."""
    began: float
    """Arrival in seconds since the epoch."""
    siblings: set[str] = field(default_factory=set)
    """Calls that asked the same while it was under way: none of them is what it repeats."""
    is_recorded: bool = False
    """Its answer was handed to the book, and may be kept."""
    unknown_tries: int = field(init=False)
    """Number of the client's tries before it of which this gateway does not know what became of them."""

    def __post_init__(self) -> None:
        self.unknown_tries = self.retry


@dataclass(slots=True)
class Conversation:
    """State of one session between its calls."""

    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=KEPT_TURNS))
    under_way: dict[str, Try] = field(default_factory=dict)
    """Requests without an answer, by call."""
    failed: deque[Try] = field(default_factory=lambda: deque(maxlen=REMEMBERED_TRIES))
    """Requests whose client got no answer, as far as this gateway knows, and which nothing has repeated yet."""
    engine: str = ""
    """Id of the engine that answered last."""
    calls: int = 0
    times: deque[float] = field(default_factory=deque)
    """Loop times of the calls within a minute."""

    def seconds_until_allowed(self, now: float, per_minute: int) -> float:
        """Return the seconds until a further call is allowed, 0 for now."""
        while self.times and now - self.times[0] > MINUTE:
            self.times.popleft()
        return 0.0 if len(self.times) < per_minute else MINUTE - (now - self.times[0])

    @contextlib.contextmanager
    def trying(self, call: str, digest: str, *, retry: int, began: float) -> Iterator[Try]:
        """Note a request while it is under way, and that it failed where an error or its client ends it."""
        mine = Try(call, digest, retry, began)
        for other in self.under_way.values():
            if other.digest == digest:
                other.siblings.add(call)
                mine.siblings.add(other.call)
        self.under_way[call] = mine
        try:
            yield mine
        except BaseException:
            self.failed.append(mine)
            raise
        finally:
            del self.under_way[call]

    def repeated_by(self, mine: Try, calls: Collection[SessionCall]) -> str:
        """Return the call whose answer a request replaces, empty where there is none, and note that it is repeated.

        A request that failed here is what an equal one repeats, the recorded first. Where the client numbers its tries,
        that is the try before this one, and in place of a try without an answer the one before that. A try that did
        not fail here may have been answered, here or by another gateway: the latest answer to the same request is
        replaced. An answer to a request that was under way at the same time is another's.

        Args:
            mine: The request.
            calls: The recorded calls of the session.
        """
        if not mine.retry:
            return self._take_failed(mine.digest) or ""
        while mine.unknown_tries:
            failed = self._take_failed(mine.digest, mine.unknown_tries - 1)
            if failed is None:
                break
            if failed:
                mine.unknown_tries = 0
                return failed
            mine.unknown_tries -= 1
        for earlier in self.failed:
            if earlier.digest == mine.digest and earlier.retry < mine.unknown_tries:
                mine.siblings |= earlier.siblings  # what ran beside an earlier try is no try of this client
        replaced = {call.supersedes for call in calls} | mine.siblings
        equal = [
            call.call
            for call in calls
            if call.digest == mine.digest and call.retry < mine.unknown_tries and call.call not in replaced
        ]
        return equal[-1] if equal else ""

    def _take_failed(self, digest: str, retry: int | None = None) -> str | None:
        """Forget one try that failed, of this number if one is given; return its call, empty without an answer that was
        recorded, or None if there is no such try.
        """
        failed = [one for one in self.failed if one.digest == digest and retry in {None, one.retry}]
        if not failed:
            return None
        taken = max(failed, key=lambda one: one.is_recorded)
        self.failed.remove(taken)
        return taken.call if taken.is_recorded else ""


class Conversations:
    """The conversations of the sessions that called last."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def of(self, session: Session) -> Conversation:
        """Return a session's conversation."""
        found = self._known.get(session.id)
        if found is None:
            found = self._known[session.id] = _from_events(session)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(session.id)
        return found

    def forget(self, session: str) -> None:
        """Forget a session that is over."""
        self._known.pop(session, None)


def _from_events(session: Session) -> Conversation:
    found, answers = Conversation(calls=session.asked), Answers(list(session.calls.values()))
    for call in list(session.calls.values())[-KEPT_TURNS:]:
        try:
            prompt = answers.prompt(call)
        except ValueError:  # what it continues was not kept: nothing continues it either
            continue
        tokens = [[*prompt, *choice.ids] for choice in call.choices]
        texts = [call.prompt_text + choice.text for choice in call.choices] if call.prompt_text else []
        found.turns.append(Turn(call.call, tokens, texts, call.temperature, call.request.get("messages") or ()))
    return found


def digest_of(path: str, body: Mapping[str, Any]) -> str:
    """Return the same text for the same request."""
    return hashlib.sha256(f"{path}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()[:32]
