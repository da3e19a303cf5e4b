"""Catch-up fetches: members that joined between two versions or lost their weights fetch the committed version alone.

    prepare{pull} ──▶ applied, and the canary passes ──▶ commit, to this member
       └────────────── anything else ──────────────────▶ retry, with a backoff

A catch-up fetch has no barrier, and no other member waits for it. Pure code, like the coordinator that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_mq.bus.retry import exponential_pause
from trinity_mq.messages import SyncEvent
from trinity_mq.sync.gate.records import key_of

FIRST_PAUSE = 1.0
"""Seconds until the first retry of a failed fetch; doubled with each failure in a row."""
LONGEST_PAUSE = 60.0


@dataclass(slots=True)
class CatchUp:
    """Fetch of one member."""

    prepare: SyncEvent
    deadline: float
    resend: float


@dataclass(slots=True)
class CatchUpFetches:
    """Current catch-up fetches, and the earliest retry times of failed fetches. Times are in seconds of one monotonic
    clock.
    """

    timeout: float
    resend_interval: float
    under_way: dict[str, CatchUp] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def begin(self, member: str, prepare: SyncEvent, now: float) -> SyncEvent:
        """Start a member's fetch; return the event to send to it."""
        self.under_way[member] = CatchUp(prepare, now + self.timeout, now + self.resend_interval)
        return prepare

    def may_begin(self, member: str, now: float) -> bool:
        return member not in self.under_way and self._not_before.get(member, now) <= now

    def of(self, event: SyncEvent) -> CatchUp | None:
        """Return the fetch that an answer belongs to."""
        pull = self.under_way.get(event.sender)
        return pull if pull is not None and key_of(event) == key_of(pull.prepare) else None

    def broke(self, member: str, now: float) -> None:
        """Record a failed fetch; a retry may begin after a backoff."""
        self.under_way.pop(member, None)
        failures = self._failures[member] = self._failures.get(member, 0) + 1
        self._not_before[member] = now + exponential_pause(FIRST_PAUSE, LONGEST_PAUSE, failures)

    def supersede(self, members: tuple[str, ...] | None = None) -> None:
        """Drop the current fetches of ``members`` (None: of all members), because a newer version is on its way to
        them.
        """
        for member in list(self.under_way) if members is None else members:
            self.under_way.pop(member, None)

    def forget(self, member: str) -> None:
        """Forget a member that has left, was restarted, or holds the fetched version."""
        for mapping in (self.under_way, self._failures, self._not_before):
            mapping.pop(member, None)

    def tick(self, now: float) -> list[SyncEvent]:
        """Expire late fetches; return the prepare events to repeat."""
        for member in [name for name, pull in self.under_way.items() if pull.deadline <= now]:
            self.broke(member, now)
        due = [pull for pull in self.under_way.values() if pull.resend <= now]
        for pull in due:
            pull.resend = now + self.resend_interval
        return [pull.prepare for pull in due]

    def next_deadline(self, now: float) -> float:
        """Return the earliest time at which :meth:`tick` or :meth:`may_begin` may have a new result."""
        times = [min(pull.deadline, pull.resend) for pull in self.under_way.values()]
        times += [time for member, time in self._not_before.items() if member not in self.under_way and time > now]
        return min(times, default=float("inf"))
