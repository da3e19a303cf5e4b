"""State of a session: a pure function of its events in the order of their first publication."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Literal

from trinity_mq.gateway.lineages import SessionLineage, lineages_of, superseded_calls
from trinity_mq.gateway.rules import bounded_reward, merge_metrics
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
"""States that no further event changes. Exception: a train step that is repeated."""
TRAINED = "trained"
"""Outcome of a batch that updated the weights."""

Body = SessionOpened | SessionCall | SessionReward | SessionEnd | SessionsDecided


@dataclass(slots=True)
class Event:
    """An event of a session, as stored on the stream."""

    origin: int
    """Stream offset of its first publication. Events are ordered by it."""
    position: int
    """Bytes on the stream before its newest copy, as far as the reader has seen the stream."""
    message_id: str
    at: float
    """Time in seconds since the epoch. The gateway of a training run subtracts the seconds for which time limits were
    paused.
    """
    body: Body
    size: int
    """Size of the message in bytes."""
    outside: bool = False
    """True if a program that is not a gateway published the event and chose its message id."""

    def is_copy_of(self, other: Event) -> bool:
        """Return whether both are the same event. A message id chosen by an outside program never matches a gateway's
        message id.
        """
        same_id = self.message_id == other.message_id and self.outside == other.outside
        return same_id or self.origin == other.origin


def _origin_of(event: Event) -> int:
    return event.origin


@dataclass(slots=True)
class Session:
    """State of a session, as far as its events have been read."""

    id: str
    opened: SessionOpened | None = None
    """Opened event of the session. None: it has not been read yet."""
    events: list[Event] = field(default_factory=list)
    """Events ordered by ``origin``. Empty once the session is settled."""
    calls: dict[str, SessionCall] = field(default_factory=dict)
    """Calls by call id, in the order of their answers. Empty once the session is settled."""
    reward: float | None = None
    """Reward of the whole session."""
    call_rewards: dict[tuple[str, int | None], float] = field(default_factory=dict)
    """Rewards by (call id, choice index). Index None covers every choice of the call."""
    lineage_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of lineages, by the id that each lineage had when it was rewarded: the id of its first call."""
    metrics: dict[str, float] = field(default_factory=dict)
    end: SessionEnd | None = None
    ended_at: float = 0.0
    group: str = ""
    committed: bool = False
    """True if the session no longer waits for further members of its group."""
    ripe_at: float = math.inf
    """Time, as :attr:`Event.at`, from which on the session had both ended and got a reward."""
    last_at: float = 0.0
    """Time of the latest event, as :attr:`Event.at`."""
    decided: SessionsDecided | None = None
    batch: SubmissionOutcome | None = None
    """Outcome of its task in a batch."""
    trained: SessionsTrained | None = None
    counts: tuple[int, int] = (0, 0)
    """Numbers of calls and sampled tokens, stored when the events are removed."""
    lost: bool = False
    """True if the outcome is unknown: the session was settled while this gateway did not read the stream, and retention
    removed the events that settled it.
    """
    _ids: set[tuple[str, bool]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Message id and :attr:`Event.outside` of each of its events. A settled session keeps only entries from outside."""
    _lineages: list[SessionLineage] | None = field(default=None, init=False, repr=False, compare=False)
    """Lineages of the calls. None: the calls have changed since they were built."""

    @property
    def state(self) -> State:
        """Current state of the session."""
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
        """Reason for the state in one line. Empty if the state needs no explanation."""
        if self.lost:
            return "settled while this gateway was not reading; retention has removed the details"
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
        """True if the session needs no further action."""
        return self.lost or self.state in SETTLED

    @property
    def has_reward(self) -> bool:
        """True if the session, one of its lineages or one of its calls has a reward."""
        return self.reward is not None or bool(self.call_rewards or self.lineage_rewards)

    @property
    def lineages(self) -> list[SessionLineage]:
        """Lineages in the order of their first calls. Empty once the session is settled."""
        if self._lineages is None:
            calls = list(self.calls.values())
            self._lineages = lineages_of(calls, superseded_calls(calls))
        return self._lineages

    def reward_of(self, lineage: SessionLineage) -> float | None:
        """Return the reward of a lineage. None: the lineage itself was not rewarded. All its calls are looked up, since
        a repeated request may have changed its first call.
        """
        rewards = [self.lineage_rewards[call] for call in lineage.calls if call in self.lineage_rewards]
        return rewards[-1] if rewards else None

    @property
    def replay(self) -> SessionReplay | None:
        """Replay that replaces the recorded calls. None: the session has no replay."""
        return None if self.end is None else self.end.replay

    @property
    def traceparent(self) -> str:
        """Trace header of the first call that has a trace header. Empty: no call has a trace header."""
        return next((call.traceparent for call in self.calls.values() if call.traceparent), "")

    @property
    def size(self) -> int:
        """Total bytes of its events."""
        return sum(event.size for event in self.events)

    @property
    def first_position(self) -> float:
        """Minimum of the positions of its events. Infinity if it has no events."""
        return min((event.position for event in self.events), default=math.inf)

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens in all answers."""
        if not self.events:
            return self.counts[1]
        return sum(len(choice.ids) for call in self.calls.values() for choice in call.choices)

    @property
    def asked(self) -> int:
        """Number of calls."""
        return len(self.calls) if self.events else self.counts[0]

    @property
    def decision(self) -> Event | None:
        """Latest decision event of the session. None: it is undecided, or settled."""
        return next((event for event in reversed(self.events) if isinstance(event.body, SessionsDecided)), None)

    def has(self, event: Event) -> bool:
        """Return whether the session already has this event."""
        if (event.message_id, event.outside) in self._ids:
            return True
        place = bisect.bisect_left(self.events, event.origin, key=_origin_of)
        return place < len(self.events) and self.events[place].origin == event.origin

    def refusal_reason(self, body: Body) -> str | None:
        """Return the reason why the session does not accept an event. Return None if it accepts the event."""
        if self.lost:
            return f"session {self.id} is {self.why}: further events change nothing"
        if isinstance(body, SessionCall | SessionReward | SessionEnd) and self.decided is not None:
            where = f" in train step {self.trained.step}" if self.state == "trained" and self.trained else ""
            return f"session {self.id} is {self.state}{where}: further events change nothing"
        if isinstance(body, SessionEnd) and self.end is not None and body.outcome == self.end.outcome == "done":
            return None if body.reward is not None and self.reward is None else f"session {self.id} has ended already"
        if isinstance(body, SessionEnd) and self.end is not None and body.outcome != "discard":
            return f"session {self.id} has ended already, as {self.end.outcome}"
        return self._reward_problem(body) if isinstance(body, SessionReward) else None

    def _reward_problem(self, body: SessionReward) -> str | None:
        call_ids = ", ".join(self.calls) or "none"
        if body.lineage is not None and (body.call not in (None, body.lineage) or body.choice is not None):
            return "the reward names a lineage and a call or a choice, wanted one of them"
        if body.lineage is not None and body.lineage not in self.calls:
            return f"session {self.id} has no lineage with call {body.lineage!r}; it has calls {call_ids[:400]}"
        if body.call is not None and self.call_of(body.call) is None:
            return f"session {self.id} has no call {body.call!r}; it has {call_ids[:400]}, or a number from 0"
        return None

    def call_of(self, name: str | int) -> SessionCall | None:
        """Return the call with this id, or at this index from 0; a negative index counts from the end. Return None if
        no call matches.
        """
        if isinstance(name, str):
            return self.calls.get(name)
        calls = list(self.calls.values())
        return calls[name] if -len(calls) <= name < len(calls) else None

    def add(self, event: Event) -> None:
        """Add an event that :meth:`refusal_reason` accepts. If the event was published before other known events, the
        state is rebuilt from all events.
        """
        in_order = not self.events or event.origin > self.events[-1].origin
        self._insert(event)
        if in_order:
            self._then(event)
        else:
            self._begin_again()

    def replace(self, later_copy: Event, event: Event) -> None:
        """Replace a later copy of an event by an earlier copy."""
        self._remove(later_copy)
        self._insert(event)
        self._begin_again()

    def withdraw(self, event: Event) -> None:
        """Remove an event and its effects."""
        self._remove(event)
        self._begin_again()

    def _insert(self, event: Event) -> None:
        bisect.insort(self.events, event, key=_origin_of)
        self._ids.add((event.message_id, event.outside))

    def _remove(self, event: Event) -> None:
        self.events.remove(event)
        self._ids.discard((event.message_id, event.outside))

    def _begin_again(self) -> None:
        self.calls, self.call_rewards, self.lineage_rewards, self.metrics, self._lineages = {}, {}, {}, {}, None
        self.reward, self.end, self.decided, self.last_at, self.ripe_at = None, None, None, 0.0, math.inf
        self.group = ""
        for event in self.events:
            if self.refusal_reason(event.body) is None:
                self._then(event)

    def forget_events(self) -> None:
        """Remove the events of a settled session, and keep the values that users query."""
        self.counts = (self.asked, self.sampled_tokens)
        self._ids = {(message_id, outside) for message_id, outside in self._ids if outside}
        self.events, self.calls, self._lineages = [], {}, None

    def _then(self, event: Event) -> None:
        body = event.body
        self.last_at = max(self.last_at, event.at)
        if isinstance(body, SessionOpened):
            self.opened, self.group = body, self.group or body.group
        elif isinstance(body, SessionCall):
            self.calls.setdefault(body.call, body)
            self._lineages = None
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

        def worth(earlier: float | None) -> float:
            return bounded_reward(body.reward + ((earlier or 0.0) if added else 0.0))

        if body.lineage is not None:
            [name] = [lineage.calls[0] for lineage in self.lineages if body.lineage in lineage.calls]
            self.lineage_rewards[name] = worth(self.lineage_rewards.get(name))
        elif body.call is not None:
            call = self.call_of(body.call)
            assert call is not None  # otherwise refusal_reason refused the event
            key = call.call, body.choice
            self.call_rewards[key] = worth(self.call_rewards.get(key))
        else:
            self.reward = worth(self.reward)
