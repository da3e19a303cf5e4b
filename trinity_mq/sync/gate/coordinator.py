"""The coordinator's side of the weight-sync gate: a pure state machine without a clock. Events are its input, commands
its output.

    prepare ──▶ all ready ──▶ go ──▶ collective ──▶ all applied ──▶ commit
       └────────────┴───────── anything else ────────────┴────────▶ abort, and the next attempt has a new epoch

A version counts only after its commit. A member that fails or does not answer makes this attempt fail, and is excluded
from the next attempt until it joins again. A member that fails the canary is quarantined: it is excluded until it has
fetched the committed version alone and the canary passes. If all members are quarantined, or such a fetch is not
possible, quarantined members take part again. Every wait has a deadline.

Members that joined between two versions or lost their weights fetch the committed version alone. Such a fetch has no
barrier, and no other member waits for it.

    prepare{pull} ──▶ applied, and the canary passes ──▶ commit, to this member
       └────────────── anything else ──────────────────▶ retry, with a backoff
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity_mq.bus.retry import exponential_pause
from trinity_mq.messages import SyncEvent, Version
from trinity_mq.sync.channels.base import manifest_bytes, source_copies, transfer_seconds
from trinity_mq.sync.gate.records import (
    AbandonCollective,
    AttemptTimes,
    Command,
    Committed,
    Failed,
    MemberRecord,
    Phase,
    StartCollective,
    key_of,
    world_size,
)

FIRST_PAUSE = 1.0
"""Seconds until the first retry of a failed fetch; doubled with each failure in a row."""
LONGEST_PAUSE = 60.0


@dataclass(slots=True)
class CatchUp:
    """Catch-up fetch of one member: its ``prepare`` event, the time at which the fetch counts as failed, and the time
    at which the event is sent again.
    """

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
        """Start a member's fetch; return the event to send to it. Pause and fetch may each take ``prepare.seconds``."""
        limit = max(self.timeout, 2 * (prepare.seconds or 0.0))
        self.under_way[member] = CatchUp(prepare, now + limit, now + self.resend_interval)
        return prepare

    def may_begin(self, member: str, now: float) -> bool:
        return member not in self.under_way and self._not_before.get(member, now) <= now

    def of(self, event: SyncEvent) -> CatchUp | None:
        """Return the current fetch that an answer belongs to; None if it belongs to no current fetch."""
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


COMMIT_TRAVEL = 3.0
"""Seconds after a commit during which the older version in a member's join is ignored: the member may have sent the
join before it received the commit. Heartbeats repeat a lost commit."""
RESEND_INTERVAL = 1.0
"""Seconds after which the messages ``prepare`` and ``go`` are sent again to members that have not answered."""


@dataclass(slots=True)
class Coordinator:
    """The gate of one trainer.

    Call the methods below with the current time in seconds of one monotonic clock, and execute the returned commands in
    order. Call :meth:`tick` at :meth:`next_deadline`.
    """

    name: str
    timeout: float
    """Maximum duration in seconds of each phase that moves no weights. See :attr:`transfer_timeout` for the others."""
    lease: float
    """Seconds without a join after which a member counts as gone."""
    members: dict[str, MemberRecord] = field(default_factory=dict)
    phase: Phase = Phase.IDLE
    epoch: int = 0
    attempt: int = 0
    committed: Version | None = None
    committed_progress: int = 0
    canary_failures: int = 0
    pulled: int = 0
    """Number of catch-up fetches that succeeded."""
    phases: AttemptTimes = field(default_factory=AttemptTimes)
    """Durations of the latest attempt."""
    _catch_ups: CatchUpFetches = field(init=False)
    _tries: int = 0
    """Number of attempts, including catch-up fetches."""
    num_bytes: int = 0
    """Bytes of the weights of the current or last attempt."""
    method: str = ""
    """Channel of the weights of the current or last attempt."""
    _version: Version = (0, 0)
    _progress: int = 0
    _prepare: SyncEvent | None = None
    _taking_part: tuple[str, ...] = ()
    _grouped: tuple[str, ...] = ()
    _ready: set[str] = field(default_factory=set)
    _applied: set[str] = field(default_factory=set)
    _committed_at: float = float("-inf")
    _deadline: float = 0.0
    _resend: float = 0.0

    @property
    def transfer_timeout(self) -> float:
        """Maximum duration in seconds of the transfer, and of the phase after it. Members that fetch by themselves
        receive the weights during that phase.
        """
        receivers = len(self._taking_part) if self._prepare is None else world_size(self._prepare) - 1
        return transfer_seconds(self.timeout, self.num_bytes, source_copies(self.method, receivers))

    def __post_init__(self) -> None:
        self._catch_ups = CatchUpFetches(2 * self.timeout, RESEND_INTERVAL)

    # -- members

    def join(
        self,
        member: str,
        version: Version | None,
        now: float,
        *,
        lease: float | None = None,
        life: str = "",
        ranks: int = 1,
    ) -> list[Command]:
        """Handle join: a member is alive and reports its version. ``lease``: seconds until it counts as gone (default:
        the coordinator's lease); ``life``: id of its engine process; ``ranks``: number of its ranks in a broadcast.
        """
        previous = self.members.get(member)
        reborn = previous is not None and previous.life != life
        if not reborn and version != self.committed and self._has_just_committed(member, now):
            version = self.committed  # the member sent this before it received our commit
        if (version is None or reborn) and self.phase is Phase.IDLE and member in self._grouped:
            self._grouped = ()  # possibly a restarted process, which has never been in this group
        entry = self.members[member] = MemberRecord(now + (lease or self.lease), version, life, ranks)
        if previous is not None and not reborn:
            entry.quarantined, entry.given = previous.quarantined, previous.given
        if not reborn:
            return []
        self._catch_ups.forget(member)
        if self.phase is Phase.IDLE or member not in self._taking_part:
            return []
        return self._fail(f"{member} was restarted", ())

    def leave(self, member: str, now: float, reason: str = "left", life: str = "") -> list[Command]:
        """Handle leave: a member leaves or is known to be gone. ``life`` is the id of its process, if known."""
        if life and member in self.members and self.members[member].life != life:
            return []  # its successor has already joined
        removed = self.members.pop(member, None)
        self._catch_ups.forget(member)
        if self.phase is Phase.IDLE and member in self._grouped:
            self._grouped = ()
        if removed is None or self.phase is Phase.IDLE or member not in self._taking_part:
            return []
        return self._fail(f"{member} {reason}", (member,))

    def stale_members(self) -> tuple[str, ...]:
        """Return the members that do not hold the committed version."""
        members = sorted(self.members.items())
        return tuple(name for name, member in members if member.version is None or member.version != self.committed)

    def quarantined(self) -> tuple[str, ...]:
        """Return the members whose canary showed other weights than they were sent."""
        return tuple(sorted(name for name, member in self.members.items() if member.quarantined))

    def release_quarantined(self) -> None:
        """Release all quarantined members, because no catch-up fetch is possible."""
        for member in self.members.values():
            member.quarantined = False

    def state_of(self, member: str) -> str:
        """Return a member's state: current, behind, pulling or quarantined."""
        if self.members[member].quarantined:
            return "quarantined"
        if member in self._catch_ups.under_way:
            return "pulling"
        return "behind" if member in self.stale_members() else "current"

    # -- catch-up of a single member

    def due_catch_ups(self, now: float) -> tuple[str, ...]:
        """Return the members that may fetch the committed version now: they are behind, take part in no current attempt
        or fetch, and do not pause after a failed fetch. Before the first commit the result is empty.
        """
        if self.committed is None:
            return ()
        busy = () if self.phase is Phase.IDLE else self._taking_part
        return tuple(name for name in self.stale_members() if name not in busy and self._catch_ups.may_begin(name, now))

    def pull(self, member: str, prepare: SyncEvent, now: float) -> list[Command]:
        """Make a member fetch the committed version alone, if :meth:`due_catch_ups` names the member. ``prepare``
        carries the version's manifest, rendezvous and canary.
        """
        if self.committed is None or member not in self.due_catch_ups(now):
            return []
        self._tries += 1
        stamp = self._stamp("prepare") | {
            "version": self.committed,
            "progress": self.committed_progress,
            "epoch": 0,
            "attempt": self._tries,
            "members": [member],
            "pull": True,
            "seconds": transfer_seconds(
                self.timeout, manifest_bytes(prepare.manifest), len(self._catch_ups.under_way) + 1
            ),
        }
        return [self._catch_ups.begin(member, prepare.model_copy(update=stamp), now)]

    def _caught_up(self, event: SyncEvent, canary_error: str | None, now: float) -> list[Command]:
        pull, member, committed = self._catch_ups.of(event), self.members.get(event.sender), self.committed
        if pull is None or member is None or committed is None or event.version != committed:
            return []
        if canary_error is not None:
            self.canary_failures += 1
            member.quarantined = True
            return self._catch_up_failed(event, f"failed the canary: {canary_error}", now)
        self._catch_ups.forget(event.sender)
        self.pulled += 1
        member.hold(committed, (0, event.attempt))
        commit = _follow_up(pull.prepare, "commit", progress=self.committed_progress)
        return [commit, Committed(committed, self.committed_progress, (event.sender,), pulled=True)]

    def _catch_up_failed(self, event: SyncEvent, reason: str, now: float) -> list[Command]:
        pull = self._catch_ups.of(event)
        if pull is None:
            return []
        self._catch_ups.broke(event.sender, now)
        return [_follow_up(pull.prepare, "abort", reason=f"{event.sender} {reason}")]

    # -- sync of a version

    def start(
        self, version: Version, progress: int, prepare: SyncEvent, now: float, *, held: float = 0.0
    ) -> list[Command]:
        """Begin an attempt with the present members that are not quarantined, or with all if all are quarantined.
        ``prepare`` carries manifest, rendezvous and canary; its other fields are set here. ``held``: seconds for which
        the attempt was already delayed.

        Raises:
            RuntimeError: An attempt is in progress, or the gate has no members.
        """
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"an attempt for version {self._version} is in progress")
        if not self.members:
            raise RuntimeError("no members to send weights to")
        healthy = tuple(sorted(name for name, member in self.members.items() if not member.quarantined))
        self._taking_part = healthy or tuple(sorted(self.members))  # if all are quarantined, none delays others
        self._catch_ups.supersede(self._taking_part)
        if self._taking_part != self._grouped:
            self.epoch += 1
            self._grouped = self._taking_part
        self._tries += 1
        self.attempt = self._tries
        self._version, self._progress = version, progress
        self._ready.clear()
        self._applied.clear()
        self.phase = Phase.PREPARING
        self.phases = AttemptTimes(started=now, held=held)
        self.num_bytes, self.method = manifest_bytes(prepare.manifest), str(prepare.rendezvous.get("method", ""))
        self._deadline, self._resend = now + self.timeout, now + RESEND_INTERVAL
        ranks = {name: self.members[name].ranks for name in self._taking_part if self.members[name].ranks > 1}
        fields = self._stamp("prepare") | {"members": list(self._taking_part), "ranks": ranks}
        self._prepare = prepare.model_copy(update=fields)
        return [self._prepare]

    def commit_progress(self, progress: int) -> list[Command]:
        """Commit a new progress, the number of batches that the trainer has consumed, without a transfer, because the
        weights have not changed since the last commit.

        Raises:
            RuntimeError: No version is committed, or an attempt is in progress.
        """
        if self.committed is None or self.phase is not Phase.IDLE:
            raise RuntimeError("only a committed version can be committed again, and only between attempts")
        self.committed_progress = progress
        return [self._commit_event(self.committed, progress), Committed(self.committed, progress, ())]

    def ready(self, event: SyncEvent, now: float) -> list[Command]:
        """Handle ready: a member has paused and waits for go."""
        if self.phase is not Phase.PREPARING or not self._is_ours(event):
            return []
        if self._is_restarted(event):
            return self._fail(f"{event.sender} was restarted", ())
        self._ready.add(event.sender)
        self.phases.paused(event)
        if self._ready != set(self._taking_part):
            return []
        self.phase = Phase.ENTERING
        self.phases.ready = now
        self._deadline, self._resend = now + self.transfer_timeout, now + RESEND_INTERVAL
        assert self._prepare is not None  # an attempt always has a prepare event
        world = world_size(self._prepare)
        return [self._go(), StartCollective(self._version, self.epoch, self.attempt, self._taking_part, world)]

    def collective_done(self, epoch: int, attempt: int, now: float) -> list[Command]:
        """Handle the end of our side of the broadcast."""
        if self.phase is not Phase.ENTERING or (epoch, attempt) != (self.epoch, self.attempt):
            return []
        self.phase = Phase.APPLYING
        self.phases.transferred = now
        self._deadline = now + self.transfer_timeout
        return self._try_commit(now)

    def collective_failed(self, epoch: int, attempt: int, reason: str) -> list[Command]:
        """Handle a barrier that did not fill or a broken broadcast. No member is excluded; all running members join
        again.
        """
        if self.phase is not Phase.ENTERING or (epoch, attempt) != (self.epoch, self.attempt):
            return []
        return self._fail(f"collective: {reason}", ())

    def applied(self, event: SyncEvent, canary_error: str | None, now: float) -> list[Command]:
        """Handle applied: a member holds the new weights. ``canary_error`` says why its logprobs do not match them."""
        if not event.epoch:
            return self._caught_up(event, canary_error, now)
        if not self.expects(event):
            return []
        if canary_error is not None:
            self.canary_failures += 1
            if event.sender in self.members:
                member = self.members[event.sender]
                member.version, member.quarantined = None, True
            return self._fail(f"{event.sender} failed the canary: {canary_error}", ())
        self._applied.add(event.sender)
        return self._try_commit(now)

    def expects(self, applied: SyncEvent) -> bool:
        """Return whether the answer belongs to the current attempt or to a catch-up fetch."""
        if not applied.epoch:
            return self._catch_ups.of(applied) is not None
        return self.phase in {Phase.ENTERING, Phase.APPLYING} and self._is_ours(applied)

    def failed(self, event: SyncEvent, now: float) -> list[Command]:
        """Handle failed: a member could not do its part."""
        if not event.epoch:
            return self._catch_up_failed(event, event.reason or "failed", now)
        if self.phase is Phase.IDLE or not self._is_ours(event):
            return []
        return self._fail(f"{event.sender}: {event.reason or 'failed'}", (event.sender,))

    def cancel(self, reason: str) -> list[Command]:
        """Cancel the current attempt without excluding a member."""
        return [] if self.phase is Phase.IDLE else self._fail(reason, ())

    def tick(self, now: float) -> list[Command]:
        """Handle the passage of time."""
        expired = [name for name, member in self.members.items() if member.lease_ends <= now]
        again: list[Command] = [*self._catch_ups.tick(now)]
        lost = [name for name in expired if self.phase is not Phase.IDLE and name in self._taking_part]
        for name in expired:
            if name not in lost:
                self.leave(name, now)
        if self.phase is Phase.IDLE:
            return again
        if lost:
            return [*again, *self._fail(f"the lease of {', '.join(lost)} ended", tuple(lost))]
        if now >= self._deadline:
            missing = self._missing()
            late_members = ", ".join(missing) or "the collective"
            reason = f"{self.phase.value}: no answer from {late_members} in {self._limit()}"
            return [*again, *self._fail(reason, missing)]
        if now >= self._resend and self.phase in {Phase.PREPARING, Phase.ENTERING} and self._prepare is not None:
            self._resend = now + RESEND_INTERVAL
            again.append(self._prepare if self.phase is Phase.PREPARING else self._go())
        return again

    def next_deadline(self, now: float) -> float:
        leases = min((member.lease_ends for member in self.members.values()), default=float("inf"))
        leases = min(leases, self._catch_ups.next_deadline(now))
        if self.phase is Phase.IDLE:
            return leases
        resend = self._resend if self.phase in {Phase.PREPARING, Phase.ENTERING} else float("inf")
        return min(leases, self._deadline, resend)

    # -- private methods

    def _stamp(self, verb: str) -> dict[str, object]:
        return {
            "verb": verb,
            "sender": self.name,
            "version": self._version,
            "progress": self._progress,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "seconds": self.timeout,
        }

    def _go(self) -> SyncEvent:
        assert self._prepare is not None
        return _follow_up(self._prepare, "go", seconds=self.transfer_timeout)

    def _limit(self) -> str:
        """Return the deadline of the current phase as text."""
        if self.phase is Phase.PREPARING or not self.num_bytes:
            return f"{self.timeout:g} s"
        return f"{self.transfer_timeout:.0f} s, the limit for {self.num_bytes / 1e6:,.0f} MB by {self.method}"

    def _is_ours(self, event: SyncEvent) -> bool:
        # the version contains the trainer's generation, so answers to an earlier process of this trainer do not match
        return key_of(event) == (self._version, self.epoch, self.attempt) and event.sender in self._taking_part

    def _is_restarted(self, event: SyncEvent) -> bool:
        member = self.members.get(event.sender)
        return member is not None and member.life != event.life

    def _has_just_committed(self, member: str, now: float) -> bool:
        return member in self._grouped and now - self._committed_at < COMMIT_TRAVEL

    def _missing(self) -> tuple[str, ...]:
        answered = self._ready if self.phase is Phase.PREPARING else self._applied
        return tuple(name for name in self._taking_part if name not in answered)

    def _try_commit(self, now: float) -> list[Command]:
        if self.phase is not Phase.APPLYING or self._applied != set(self._taking_part):
            return []
        self.committed, self.committed_progress, self._committed_at = self._version, self._progress, now
        for name in self._taking_part:
            if name in self.members:
                self.members[name].hold(self._version, (self.epoch, self.attempt))
            self._catch_ups.forget(name)
        self._catch_ups.supersede()
        self.phase = Phase.IDLE
        self.phases.committed = now
        return [
            self._commit_event(self._version, self._progress),
            Committed(self._version, self._progress, self._taking_part),
        ]

    def _commit_event(self, version: Version, progress: int) -> SyncEvent:
        assert self._prepare is not None
        return _follow_up(self._prepare, "commit", version=version, progress=progress, seconds=None)

    def _fail(self, reason: str, lost: tuple[str, ...]) -> list[Command]:
        started = self.phase in {Phase.ENTERING, Phase.APPLYING}
        self.phase = Phase.IDLE
        self._grouped = ()  # a failed group is never used again: the next attempt has a new epoch
        for name in lost:
            self.members.pop(name, None)
        assert self._prepare is not None  # an attempt always has a prepare event
        abort = _follow_up(self._prepare, "abort", reason=reason)
        return [abort, *([AbandonCollective()] if started else []), Failed(self._version, reason, lost)]


def _follow_up(prepare: SyncEvent, verb: str, **more: object) -> SyncEvent:
    """Return the event that follows a prepare: go, commit or abort."""
    return prepare.model_copy(update={"verb": verb, "manifest": [], "canary": {}, "rendezvous": {}, **more})
