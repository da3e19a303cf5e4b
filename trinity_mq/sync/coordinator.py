"""The coordinator's side of the weight-sync gate: a pure state machine, events in, commands out, no clock of its own.

    prepare ──▶ all ready ──▶ go ──▶ collective ──▶ all applied ──▶ commit
       └────────────┴───────── anything else ────────────┴────────▶ abort, and the next try has a new epoch

A version exists only once it is committed. A member that fails or does not answer costs this try and is left out of the
next
until it joins again; nothing waits without a deadline.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trinity_mq.messages import SyncEvent, Version

COMMIT_TRAVEL = 3.0
"""Seconds in which a join may still speak of the time before a commit: a beat repeats what a lost commit said."""
RESEND_INTERVAL = 1.0
"""Seconds between repeats of prepare and go to those who have not answered."""


class Phase(enum.Enum):
    """Where a try is."""

    IDLE = "idle"
    PREPARING = "preparing"
    ENTERING = "entering"
    """go is out, the collective runs."""
    APPLYING = "applying"
    """Our part of the collective is done, some member has not said applied."""


@dataclass(frozen=True, slots=True)
class Send:
    """Publish this event to the members."""

    event: SyncEvent


@dataclass(frozen=True, slots=True)
class StartCollective:
    """Meet the members at the barrier and broadcast; report with :meth:`Coordinator.collective_done` or
    ``collective_failed``.
    """

    version: Version
    epoch: int
    attempt: int
    members: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class AbandonCollective:
    """Stop waiting for the collective; its group must not be used again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The version exists."""

    version: Version
    progress: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """This try is over; ``lost`` are left out until they join again."""

    version: Version
    reason: str
    lost: tuple[str, ...]


Command = Send | StartCollective | AbandonCollective | Committed | Failed


@dataclass(slots=True)
class Member:
    """A member of the gate as the coordinator knows it."""

    lease_ends: float
    version: Version | None
    """What it says it holds; None when it holds nothing that can be trusted."""
    fingerprint: str | None = None


@dataclass(slots=True)
class Coordinator:
    """One trainer's gate.

    Feed it with the methods below, each given the current time in seconds of one monotonic clock; perform the commands
    returned, in order.
    Call :meth:`tick` at :attr:`next_deadline`.
    """

    name: str
    timeout: float
    """Seconds each phase may take."""
    lease: float
    """Seconds without a join until a member counts as gone."""
    max_wait: float = 1800.0
    """Seconds by which members may delay ready by asking for time."""
    members: dict[str, Member] = field(default_factory=dict)
    phase: Phase = Phase.IDLE
    epoch: int = 0
    attempt: int = 0
    committed: Version | None = None
    committed_progress: int = 0
    _version: Version = (0, 0)
    _progress: int = 0
    _prepare: SyncEvent | None = None
    _taking_part: tuple[str, ...] = ()
    _grouped: tuple[str, ...] = ()
    _ready: set[str] = field(default_factory=set)
    _applied: set[str] = field(default_factory=set)
    _done: bool = False
    _committed_at: float = float("-inf")
    _deadline: float = 0.0
    _latest: float = 0.0
    _resend: float = 0.0

    # -- membership

    def join(
        self,
        member: str,
        version: Version | None,
        now: float,
        *,
        lease: float | None = None,
        fingerprint: str | None = None,
    ) -> list[Command]:
        """A member says that it lives and what it holds."""
        if version != self.committed and member in self._grouped and now - self._committed_at < COMMIT_TRAVEL:
            version = self.committed  # said before our commit reached it
        if version is None and self.phase is Phase.IDLE and member in self._grouped:
            self._grouped = ()  # perhaps another process by now, which has never been in this group
        self.members[member] = Member(now + (lease or self.lease), version, fingerprint)
        return []

    def leave(self, member: str, now: float, reason: str = "left") -> list[Command]:
        """A member goes, or is known to have gone."""
        known = self.members.pop(member, None)
        if self.phase is Phase.IDLE and member in self._grouped:
            self._grouped = ()
        if known is None or self.phase is Phase.IDLE or member not in self._taking_part:
            return []
        return self._fail(f"{member} {reason}", (member,))

    def stale_members(self) -> tuple[str, ...]:
        """Members that do not hold the committed version."""
        return tuple(
            sorted(
                name
                for name, member in self.members.items()
                if member.version is None or member.version != self.committed
            )
        )

    # -- a version

    def start(self, version: Version, progress: int, prepare: SyncEvent, now: float) -> list[Command]:
        """Begin a try with the present members. ``prepare`` carries manifest, rendezvous and canary; the rest is filled
        in here.
        """
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a try of version {self._version} is under way")
        if not self.members:
            raise RuntimeError("no members to send weights to")
        self._taking_part = tuple(sorted(self.members))
        if self._taking_part != self._grouped:
            self.epoch += 1
            self._grouped = self._taking_part
        self.attempt += 1
        self._version, self._progress = version, progress
        self._ready.clear()
        self._applied.clear()
        self._done = False
        self.phase = Phase.PREPARING
        self._deadline, self._latest, self._resend = now + self.timeout, now + self.max_wait, now + RESEND_INTERVAL
        self._prepare = prepare.model_copy(update=self._stamp("prepare") | {"members": list(self._taking_part)})
        return [Send(self._prepare)]

    def unchanged(self, progress: int) -> list[Command]:
        """Nothing changed since the last commit: commit the new progress without a transfer."""
        if self.committed is None or self.phase is not Phase.IDLE:
            raise RuntimeError("only a committed version can be committed again, and only between tries")
        self.committed_progress = progress
        return [self._commit_event(self.committed, progress), Committed(self.committed, progress, ())]

    def ready(self, event: SyncEvent, now: float) -> list[Command]:
        """A member has paused and waits for go."""
        if self.phase is not Phase.PREPARING or not self._is_ours(event):
            return []
        self._ready.add(event.sender)
        if self._ready != set(self._taking_part):
            return []
        self.phase = Phase.ENTERING
        self._deadline, self._resend = now + self.timeout, now + RESEND_INTERVAL
        return [
            Send(self._go()),
            StartCollective(self._version, self.epoch, self.attempt, self._taking_part, self.timeout),
        ]

    def wait(self, event: SyncEvent, now: float) -> list[Command]:
        """A member asks for time before it can be ready (an evaluation is open). The others go on serving meanwhile,
        and say ready once more when it is.
        """
        if self.phase is Phase.PREPARING and self._is_ours(event):
            self._ready.clear()
            self._deadline = min(max(self._deadline, now + self.timeout), self._latest)
        return []

    def collective_done(self, epoch: int, attempt: int, now: float) -> list[Command]:
        """Our side of the broadcast is through."""
        if self.phase is not Phase.ENTERING or (epoch, attempt) != (self.epoch, self.attempt):
            return []
        self._done = True
        self.phase = Phase.APPLYING
        self._deadline = now + self.timeout
        return self._try_commit(now)

    def collective_failed(self, epoch: int, attempt: int, reason: str) -> list[Command]:
        """The barrier did not fill or the broadcast broke. Nobody is to blame by name: whoever lives joins again."""
        if self.phase is not Phase.ENTERING or (epoch, attempt) != (self.epoch, self.attempt):
            return []
        return self._fail(f"collective: {reason}", ())

    def applied(self, event: SyncEvent, canary_error: str | None, now: float) -> list[Command]:
        """A member holds the new weights; ``canary_error`` says why its logprobs do not show it."""
        if self.phase not in {Phase.ENTERING, Phase.APPLYING} or not self._is_ours(event):
            return []
        if canary_error is not None:
            return self._fail(f"{event.sender} failed the canary: {canary_error}", (event.sender,))
        self._applied.add(event.sender)
        return self._try_commit(now)

    def failed(self, event: SyncEvent) -> list[Command]:
        """A member could not do its part."""
        if self.phase is Phase.IDLE or not self._is_ours(event):
            return []
        return self._fail(f"{event.sender}: {event.reason or 'failed'}", (event.sender,))

    def cancel(self, reason: str) -> list[Command]:
        """Give the try under way up; nobody is to blame."""
        return [] if self.phase is Phase.IDLE else self._fail(reason, ())

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        gone = [name for name, member in self.members.items() if member.lease_ends <= now]
        if self.phase is Phase.IDLE:
            for name in gone:
                del self.members[name]
            return []
        lost = [name for name in gone if name in self._taking_part]
        for name in gone:
            if name not in self._taking_part:
                del self.members[name]
        if lost:
            return self._fail(f"the lease of {', '.join(lost)} ended", tuple(lost))
        if now >= self._deadline:
            missing = self._missing()
            return self._fail(
                f"{self.phase.value}: no answer from {', '.join(missing) or 'the collective'} in {self.timeout:g} s",
                missing,
            )
        if now >= self._resend and self.phase in {Phase.PREPARING, Phase.ENTERING} and self._prepare is not None:
            self._resend = now + RESEND_INTERVAL
            return [Send(self._prepare if self.phase is Phase.PREPARING else self._go())]
        return []

    @property
    def next_deadline(self) -> float:
        """When :meth:`tick` is due."""
        leases = min((member.lease_ends for member in self.members.values()), default=float("inf"))
        if self.phase is Phase.IDLE:
            return leases
        resend = self._resend if self.phase in {Phase.PREPARING, Phase.ENTERING} else float("inf")
        return min(leases, self._deadline, resend)

    # -- inside

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
        return self._prepare.model_copy(update={"verb": "go", "manifest": [], "canary": {}})

    def _is_ours(self, event: SyncEvent) -> bool:
        # the version tells an answer to another life of this trainer apart: its generation rises with each start
        ours = (self._version, self.epoch, self.attempt)
        return (event.version, event.epoch, event.attempt) == ours and event.sender in self._taking_part

    def _missing(self) -> tuple[str, ...]:
        answered = self._ready if self.phase is Phase.PREPARING else self._applied
        return tuple(name for name in self._taking_part if name not in answered)

    def _try_commit(self, now: float) -> list[Command]:
        if not self._done or self._applied != set(self._taking_part):
            return []
        self.committed, self.committed_progress, self._committed_at = self._version, self._progress, now
        for name in self._taking_part:
            if name in self.members:
                self.members[name].version = self._version
        self.phase = Phase.IDLE
        return [
            self._commit_event(self._version, self._progress),
            Committed(self._version, self._progress, self._taking_part),
        ]

    def _commit_event(self, version: Version, progress: int) -> Send:
        return Send(
            SyncEvent(
                verb="commit",
                sender=self.name,
                version=version,
                progress=progress,
                epoch=self.epoch,
                attempt=self.attempt,
                members=list(self._taking_part),
            )
        )

    def _fail(self, reason: str, lost: tuple[str, ...]) -> list[Command]:
        started = self.phase in {Phase.ENTERING, Phase.APPLYING}
        self.phase = Phase.IDLE
        self._grouped = ()  # what failed is never used again: the next try is a new epoch
        for name in lost:
            self.members.pop(name, None)
        abort = SyncEvent(
            verb="abort",
            sender=self.name,
            version=self._version,
            epoch=self.epoch,
            attempt=self.attempt,
            members=list(self._taking_part),
            reason=reason,
        )
        commands: list[Command] = [Send(abort)]
        if started:
            commands.append(AbandonCollective(self.epoch))
        return [*commands, Failed(self._version, reason, lost)]
