"""A member's side of the weight-sync gate: a pure state machine for the host of one engine.

idle ──prepare──▶ pausing ──paused──▶ ready ──go──▶ receiving ──received──▶ applied ──commit──▶ idle at the new version
                    a pull goes from paused directly to receiving
                    abort or a lapsed lease: untouched weights → resume the old version; touched weights → dirty,
                    and request the weights again
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from trinity_mq.messages import SyncEvent, SyncVerb, Version
from trinity_mq.sync.gate.records import Key, key_of


class MemberStage(enum.Enum):
    """Stage of a member within an attempt."""

    IDLE = "idle"
    PAUSING = "pausing"
    READY = "ready"
    RECEIVING = "receiving"
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop new batch steps and wait for the running batch step. Report with :meth:`Member.paused` or ``broke``."""

    key: Key
    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the new weights: enter the barrier and the collective, or fetch them without a barrier in a pull. Report
    with :meth:`Member.received` or ``broke``.
    """

    key: Key
    prepare: SyncEvent
    seconds: float


@dataclass(frozen=True, slots=True)
class Commit:
    """Stamp the version and resume serving."""

    version: Version
    progress: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Cut off a running transfer, and resume serving the old version if its weights are untouched."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Send a join at once to report the version that the engine holds. An engine without trustworthy weights serves
    nothing until a commit.
    """


Command = SyncEvent | Pause | Receive | Commit | Resume | Rejoin
"""A command to the driver. A :class:`SyncEvent` is published to the coordinator."""


@dataclass(slots=True)
class Member:
    """Gate state of one engine host. Times are in seconds of one monotonic clock."""

    name: str
    life: str = ""
    """Random id of the engine's process; a restarted engine has a new id."""
    version: Version | None = None
    """Version that the engine serves. None before the first commit and while the weights are dirty."""
    stage: MemberStage = MemberStage.IDLE
    lease_ends: float = float("inf")
    _prepare: SyncEvent | None = None
    _touched: bool = False
    _pause_seconds: float = 0.0
    _latest: tuple[int, int] = (0, 0)
    """Generation and attempt of the newest attempt seen so far. Both only increase."""

    @property
    def key(self) -> Key | None:
        """Key of the current attempt."""
        return key_of(self._prepare) if self._prepare else None

    def prepare(self, event: SyncEvent, now: float) -> list[Command]:
        """Handle prepare: the coordinator offers a version."""
        if self.name not in event.members:
            return []
        if self._prepare is not None and self._same_try(event):
            if self.stage is MemberStage.READY:
                self._extend(event, now)
                return [self._ready()]
            return []
        if event.pull and event.version is not None and event.version == self.version:
            return [Rejoin()]
        order = (event.version[0] if event.version else 0, event.attempt)
        if order <= self._latest:
            return []  # a late message: that attempt has already ended, and its commit may be on its way to us
        self._latest = order
        commands = self._end_attempt() if self._prepare is not None else []
        self._prepare, self._touched, self.stage = event, False, MemberStage.PAUSING
        self._extend(event, now)
        return [*commands, Pause(key_of(event), event.seconds or 60.0)]

    def paused(self, key: Key, seconds: float = 0.0) -> list[Command]:
        """Handle the engine's report that it has paused, ``seconds`` after the command."""
        if self.stage is not MemberStage.PAUSING or key != self.key or self._prepare is None:
            return []
        self._pause_seconds = seconds
        if self._prepare.pull:
            self.stage = MemberStage.RECEIVING
            return [Receive(key, self._prepare, self._prepare.seconds or 60.0)]
        self.stage = MemberStage.READY
        return [self._ready()]

    def go(self, event: SyncEvent, now: float) -> list[Command]:
        """Handle go: all members are ready."""
        if self.stage is not MemberStage.READY or self._prepare is None or not self._same_try(event):
            return []
        self.stage = MemberStage.RECEIVING
        self._extend(event, now)
        return [Receive(key_of(event), self._prepare, event.seconds or 60.0)]

    def received(self, key: Key, canary: dict[str, Any], seconds: dict[str, float] | None = None) -> list[Command]:
        """Handle the arrival of the new weights in the engine. ``seconds`` holds the durations of ``receive`` and
        ``apply``.
        """
        if self.stage is not MemberStage.RECEIVING or key != self.key:
            return []
        self._touched = True
        self.stage = MemberStage.APPLIED
        return [self._answer("applied", canary=canary, detail=seconds or {})]

    def broke(self, key: Key, reason: str, *, touched: bool) -> list[Command]:
        """Handle a failed pause or transfer. ``touched``: the engine's weights may have changed."""
        if key != self.key:
            return []
        self._touched = self._touched or touched
        if not touched and self.stage is MemberStage.RECEIVING:
            self.stage = MemberStage.READY
        answer = self._answer("failed", reason=reason)
        after = self._end_attempt()
        # the coordinator excludes us until we join again
        return [answer, *after, *([] if Rejoin() in after else [Rejoin()])]

    def commit(self, event: SyncEvent) -> list[Command]:
        """Handle commit: the version of this member's attempt is committed. For any other commit do nothing: the driver
        updates the progress.
        """
        if self.stage is not MemberStage.APPLIED or event.version is None or not self._same_try(event):
            return []
        return self._committed(event.version, event.progress or 0)

    def abort(self, event: SyncEvent) -> list[Command]:
        """Handle abort: the attempt has ended."""
        return self._end_attempt() if self._same_try(event) else []

    def tick(self, now: float, last_commit: Key | None) -> list[Command]:
        """Handle the passage of time. ``last_commit`` is the version last committed at this member, and its attempt,
        from the trainer's latest heartbeat.

        The version alone is not enough: after an attempt failed because of our canary, the next attempt has the same
        version.
        """
        if self._prepare is None:
            return []
        if self.stage is MemberStage.APPLIED and self._prepare.version is not None and last_commit == self.key:
            return self._committed(self._prepare.version, self._prepare.progress or 0)
        return self._end_attempt() if now >= self.lease_ends else []

    def lost_engine(self) -> list[Command]:
        """Handle the death of the engine. Its successor holds no weights and is in no group. Leave the gate, so that
        the other members do not wait for the restart.
        """
        self.version, self._touched = None, False
        leave = SyncEvent(verb="leave", sender=self.name, life=self.life, reason="the engine died")
        if self._prepare is None:
            return [leave]
        answer = self._answer("failed", reason="the engine died")
        self._clear()
        return [answer, leave]

    # -- private methods

    def _same_try(self, event: SyncEvent) -> bool:
        return self._prepare is not None and event.sender == self._prepare.sender and key_of(event) == self.key

    def _ready(self) -> SyncEvent:
        return self._answer("ready", detail={"pause": self._pause_seconds})

    def _extend(self, event: SyncEvent, now: float) -> None:
        # longer than the coordinator's own deadline, so that the coordinator decides first
        self.lease_ends = now + (3 if event.pull else 2) * (event.seconds or 60.0)

    def _answer(self, verb: SyncVerb, **more: Any) -> SyncEvent:
        assert self._prepare is not None
        version, epoch, attempt = key_of(self._prepare)
        return SyncEvent(
            verb=verb, sender=self.name, life=self.life, version=version, epoch=epoch, attempt=attempt, **more
        )

    def _committed(self, version: Version, progress: int) -> list[Command]:
        self.version = version
        self._clear()
        return [Commit(version, progress)]

    def _end_attempt(self) -> list[Command]:
        # during the transfer it is unknown whether weights were touched: keep the old version only if they certainly
        # were not
        receiving, touched = self.stage is MemberStage.RECEIVING, self._touched or self.stage is MemberStage.RECEIVING
        self._clear()
        if touched:
            self.version = None
            # resume cancels a receive that could wait for its peers forever and block every further transfer
            return [Resume(), Rejoin()] if receiving else [Rejoin()]
        return [Resume()]

    def _clear(self) -> None:
        self._prepare, self._touched, self.stage, self.lease_ends = None, False, MemberStage.IDLE, float("inf")
