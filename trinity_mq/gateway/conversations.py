"""State of sessions between their calls: the latest turns, the engine that answered, the rate of calls."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trinity_mq.gateway.recorded_call import KEPT_TURNS, Answers, Turn
from trinity_mq.gateway.session import Session

REMEMBERED = 20_000
"""Sessions whose conversation is kept. That of another one is worked out from its events when it calls."""
MINUTE = 60.0


@dataclass(slots=True)
class Conversation:
    """State of one session between its calls."""

    turns: deque[Turn] = field(default_factory=lambda: deque(maxlen=KEPT_TURNS))
    asked: dict[str, str] = field(default_factory=dict)
    """Calls by what was asked."""
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
    return hashlib.sha256(f"{path}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()
