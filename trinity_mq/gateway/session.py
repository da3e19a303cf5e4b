"""A session as its events make it: a pure function of them in the order in which they were first published."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Literal

from trinity_mq.gateway.rules.reported import bounded_reward, merge_metrics
from trinity_mq.messages import (
    SessionCall,
    SessionEnd,
    SessionOpened,
    SessionReplay,
    SessionReward,
    SessionsDecided,
    SessionsTrained,
    SubmissionOutcome,
)

State = Literal["open", "parked", "queued", "batched", "trained", "evaluated", "dropped"]
SETTLED: frozenset[State] = frozenset({"trained", "evaluated", "dropped"})
"""States that no event changes any more, but for a train step that is done again."""
TRAINED = "trained"
"""Outcome of a batch that changed the weights."""

Body = SessionOpened | SessionCall | SessionReward | SessionEnd | SessionsDecided


@dataclass(slots=True)
class Event:
    """An event of a session as it lies on the stream."""

    origin: int
    """Offset at which it was first published: the order of events."""
    position: int
    """Bytes that were on the stream before its newest copy, as far as its reader has seen it."""
    message_id: str
    at: float
    """Seconds since the epoch."""
    body: Body
    size: int
    """Bytes of the message."""
    outside: bool = False
    """Another program than a gateway published it, and chose its message id."""

    def is_copy_of(self, other: Event) -> bool:
        """Return whether both are the same event. An id that an outsider chose never equals an id of a gateway."""
        same_id = self.message_id == other.message_id and self.outside == other.outside
        return same_id or self.origin == other.origin


@dataclass(slots=True)
class Session:
    """State of one session, as the stream has told it so far."""

    id: str
    opened: SessionOpened | None = None
    """None: its beginning has not been read."""
    events: list[Event] = field(default_factory=list)
    """By ``origin``; empty once it is settled."""
    calls: dict[str, SessionCall] = field(default_factory=dict)
    """By id, in the order of their answers."""
    reward: float | None = None
    """Reward of the whole session."""
    call_rewards: dict[tuple[str, int | None], float] = field(default_factory=dict)
    """By call and choice; None: all its choices."""
    metrics: dict[str, float] = field(default_factory=dict)
    end: SessionEnd | None = None
    ended_at: float = 0.0
    group: str = ""
    committed: bool = False
    """It waits no longer for others of its group."""
    ripe_at: float = math.inf
    """Time at which it was over and had a reward."""
    last_at: float = 0.0
    """Time of the latest event."""
    decided: SessionsDecided | None = None
    batch: SubmissionOutcome | None = None
    """Outcome of its task in a batch."""
    trained: SessionsTrained | None = None
    counts: tuple[int, int] = (0, 0)
    """Calls and sampled tokens, kept when the events are not."""
    lost: bool = False
    """What became of it is not known: it was settled while nobody here read the stream, and retention has cut how."""
    taken_outside: frozenset[str] = frozenset()
    """Message ids of the events that outsiders published, kept when the events are not."""

    @property
    def state(self) -> State:
        """The one state that it is in."""
        if self.trained is not None and self.trained.outcome == TRAINED:
            return "trained"
        if self.decided is not None and not self.decided.submission:
            return "evaluated" if self.decided.dropped == "evaluation" else "dropped"
        if self.trained is not None or (self.batch is not None and self.batch.completed_runs == 0):
            return "dropped"
        if self.decided is not None:
            return "queued" if self.batch is None else "batched"
        return "parked" if self.end is not None else "open"

    @property
    def why(self) -> str:
        """The reason of its state in one line; empty where the state says all."""
        if self.lost:
            return "settled since then, while this gateway read nothing; retention has cut how"
        if self.state == "dropped" and self.decided is not None and not self.decided.submission:
            return self.decided.reason or str(self.decided.dropped)
        if self.trained is not None and self.state == "dropped":
            return self.trained.reason or f"its batch was {self.trained.outcome}"
        if self.batch is not None and self.state == "dropped":
            return self.batch.message or f"its task was {self.batch.outcome}"
        if self.state == "parked":
            if not self.has_reward:
                return "waits for a reward"
            return f"waits for the others of group {self.group}" if self.group else "is about to become a task"
        return ""

    @property
    def is_settled(self) -> bool:
        """Nothing is to be done about it any more."""
        return self.lost or self.state in SETTLED

    @property
    def has_reward(self) -> bool:
        """It, or one of its calls, has one."""
        return self.reward is not None or bool(self.call_rewards)

    @property
    def replay(self) -> SessionReplay | None:
        """The replay that takes its place."""
        return None if self.end is None else self.end.replay

    @property
    def traceparent(self) -> str:
        """Header of the first of its requests that had one; empty: none had."""
        return next((call.traceparent for call in self.calls.values() if call.traceparent), "")

    @property
    def size(self) -> int:
        """Bytes of its events."""
        return sum(event.size for event in self.events)

    @property
    def first_position(self) -> float:
        """The least position of an event's newest copy."""
        return min((event.position for event in self.events), default=math.inf)

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all its answers."""
        if not self.events:
            return self.counts[1]
        return sum(len(choice.ids) for call in self.calls.values() for choice in call.choices)

    @property
    def asked(self) -> int:
        """Number of its calls."""
        return len(self.calls) if self.events else self.counts[0]

    @property
    def decision(self) -> Event | None:
        """The event that decided about it; None: there is none, or it is settled."""
        return next((event for event in reversed(self.events) if isinstance(event.body, SessionsDecided)), None)

    def has(self, event: Event) -> bool:
        """Return whether it has this event already."""
        if event.outside and event.message_id in self.taken_outside:
            return True
        return any(known.is_copy_of(event) for known in self.events)

    def too_late(self, body: Body) -> str | None:
        """Return why it takes an event no more, None while it does."""
        if self.lost:
            return f"session {self.id} is {self.why}: what comes now changes nothing"
        if isinstance(body, SessionCall | SessionReward | SessionEnd) and self.decided is not None:
            where = f" in train step {self.trained.step}" if self.state == "trained" and self.trained else ""
            return f"session {self.id} is {self.state}{where}: what comes now changes nothing"
        if isinstance(body, SessionEnd) and self.end is not None and body.outcome == self.end.outcome == "done":
            return None if body.reward is not None and self.reward is None else f"session {self.id} has ended already"
        if isinstance(body, SessionEnd) and self.end is not None and body.outcome != "discard":
            return f"session {self.id} has ended already, as {self.end.outcome}"
        if isinstance(body, SessionReward) and body.call is not None and self.call_of(body.call) is None:
            known = ", ".join(self.calls) or "none"
            return f"session {self.id} has no call {body.call!r}; it has {known[:400]}, or a number from 0"
        return None

    def call_of(self, name: str | int) -> SessionCall | None:
        """Return the call with this id, or in this place from 0; None if there is none."""
        if isinstance(name, str):
            return self.calls.get(name)
        calls = list(self.calls.values())
        return calls[name] if -len(calls) <= name < len(calls) else None

    def add(self, event: Event) -> None:
        """Take in an event that :meth:`too_late` does not refuse. One that was published before others that are known
        changes what follows from these.
        """
        in_order = not self.events or event.origin > self.events[-1].origin
        bisect.insort(self.events, event, key=lambda one: one.origin)
        if in_order:
            self._then(event)
        else:
            self._begin_again()

    def replace(self, known: Event, event: Event) -> None:
        """Take an earlier copy of an event in place of a later one."""
        self.events.remove(known)
        bisect.insort(self.events, event, key=lambda one: one.origin)
        self._begin_again()

    def withdraw(self, known: Event) -> None:
        """Forget an event, and what followed from it."""
        self.events.remove(known)
        self._begin_again()

    def _begin_again(self) -> None:
        self.calls, self.call_rewards, self.metrics = {}, {}, {}
        self.reward, self.end, self.decided, self.last_at, self.ripe_at = None, None, None, 0.0, math.inf
        self.group = ""
        for one in self.events:
            if self.too_late(one.body) is None:
                self._then(one)

    def forget_events(self) -> None:
        """Keep what people ask for and nothing else: it is settled."""
        self.counts = (self.asked, self.sampled_tokens)
        self.taken_outside |= frozenset(event.message_id for event in self.events if event.outside)
        self.events, self.calls = [], {}

    def _then(self, event: Event) -> None:
        body = event.body
        self.last_at = max(self.last_at, event.at)
        if isinstance(body, SessionOpened):
            self.opened, self.group = body, self.group or body.group
        elif isinstance(body, SessionCall):
            self.calls.setdefault(body.call, body)
            if self.opened is not None and self.opened.ended and self.end is None:
                self._end(SessionEnd(session=self.id), event.at)
        elif isinstance(body, SessionReward):
            self._rewarded(body)
            if body.final and self.end is None:
                self._end(SessionEnd(session=self.id), event.at)
        elif isinstance(body, SessionEnd):
            if body.reward is not None:
                self.reward = bounded_reward(body.reward)
            merge_metrics(self.metrics, body.metrics)
            if self.end is None or body.outcome == "discard":
                self._end(body, event.at)
        else:
            self.decided = body
        if self.end is not None and self.has_reward:
            self.ripe_at = min(self.ripe_at, event.at)

    def _end(self, end: SessionEnd, at: float) -> None:
        self.end, self.ended_at = end, at

    def _rewarded(self, body: SessionReward) -> None:
        merge_metrics(self.metrics, body.metrics)
        self.group = self.group or body.group
        added = body.how == "add"
        if body.call is None:
            self.reward = bounded_reward(body.reward + (self.reward or 0.0) if added else body.reward)
            return
        call = self.call_of(body.call)
        assert call is not None  # else it would be too late
        key = call.call, body.choice
        self.call_rewards[key] = bounded_reward(body.reward + (self.call_rewards.get(key, 0.0) if added else 0.0))
