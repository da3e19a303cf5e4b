"""A member's side of the weight-sync gate: a pure state machine for the host of one engine.

idle ──prepare──▶ pausing ──paused──▶ ready ──go──▶ receiving ──received──▶ applied ──commit──▶ idle at the new version
                    a pull goes from paused to receiving by itself
                    abort or a lapsed lease: untouched → resume the old version; touched → dirty, and ask for the
                    weights again
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from trinity_mq.messages import SyncEvent, SyncVerb, Version
from trinity_mq.sync.gate.records import Key, key_of


class Stage(enum.Enum):
    """Stage of a member within a try."""

    IDLE = "idle"
    PAUSING = "pausing"
    READY = "ready"
    RECEIVING = "receiving"
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop new batch steps and wait for the running one; report :meth:`Member.paused` or ``broke``."""

    key: Key
    seconds: float


@dataclass(frozen=True, slots=True)
class Receive:
    """Enter the barrier and the collective; report :meth:`Member.received` or ``broke``."""

    key: Key
    prepare: SyncEvent
    seconds: float


@dataclass(frozen=True, slots=True)
class Commit:
    """Stamp the version and serve again."""

    version: Version
    progress: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Serve the old version again."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Say in a join at once what the engine holds; where that is nothing that counts, it serves nothing until a
    commit.
    """


Command = SyncEvent | Pause | Receive | Commit | Resume | Rejoin
"""An event is to be published to the coordinator."""


@dataclass(slots=True)
class Member:
    """One engine host's gate. Time is given in seconds of one monotonic clock."""

    name: str
    life: str = ""
    """Random id of the engine's process; a restarted engine has another."""
    version: Version | None = None
    """Version that the engine serves; None before the first commit and while dirty."""
    stage: Stage = Stage.IDLE
    lease_ends: float = float("inf")
    _prepare: SyncEvent | None = None
    _touched: bool = False
    _pause_seconds: float = 0.0
    _latest: tuple[int, int] = (0, 0)
    """Generation and attempt of the newest try heard of: both only rise."""

    @property
    def key(self) -> Key | None:
        """The try under way."""
        return key_of(self._prepare) if self._prepare else None

    def prepare(self, event: SyncEvent, now: float) -> list[Command]:
        """The coordinator offers a version."""
        if self.name not in event.members:
            return []
        if self._prepare is not None and self._same_try(event):
            if self.stage is Stage.READY:
                self._extend(event, now)
                return [self._ready()]
            return []
        if event.pull and event.version is not None and event.version == self.version:
            return [Rejoin()]
        order = (event.version[0] if event.version else 0, event.attempt)
        if order <= self._latest:
            return []  # late: how that try ended is known, and its commit may be on its way to us
        self._latest = order
        commands = self._give_up() if self._prepare is not None else []
        self._prepare, self._touched, self.stage = event, False, Stage.PAUSING
        self._extend(event, now)
        return [*commands, Pause(key_of(event), event.seconds or 60.0)]

    def paused(self, key: Key, seconds: float = 0.0) -> list[Command]:
        """The engine stands still; that took ``seconds``."""
        if self.stage is not Stage.PAUSING or key != self.key or self._prepare is None:
            return []
        self._pause_seconds = seconds
        if self._prepare.pull:
            self.stage = Stage.RECEIVING
            return [Receive(key, self._prepare, self._prepare.seconds or 60.0)]
        self.stage = Stage.READY
        return [self._ready()]

    def go(self, event: SyncEvent, now: float) -> list[Command]:
        """Everybody is ready."""
        if self.stage is not Stage.READY or self._prepare is None or not self._same_try(event):
            return []
        self.stage = Stage.RECEIVING
        self._extend(event, now)
        return [Receive(key_of(event), self._prepare, event.seconds or 60.0)]

    def received(self, key: Key, canary: dict[str, Any], seconds: dict[str, float] | None = None) -> list[Command]:
        """The engine holds the new weights; ``seconds`` says how long it took to ``receive`` and to ``apply`` them."""
        if self.stage is not Stage.RECEIVING or key != self.key:
            return []
        self._touched = True
        self.stage = Stage.APPLIED
        return [self._answer("applied", canary=canary, detail=seconds or {})]

    def broke(self, key: Key, reason: str, *, touched: bool) -> list[Command]:
        """Pausing or receiving failed."""
        if key != self.key:
            return []
        self._touched = self._touched or touched
        if not touched and self.stage is Stage.RECEIVING:
            self.stage = Stage.READY
        answer = self._answer("failed", reason=reason)
        after = self._give_up()
        # the coordinator has left us out until we join
        return [answer, *after, *([] if Rejoin() in after else [Rejoin()])]

    def commit(self, event: SyncEvent) -> list[Command]:
        """The version exists. For those not in this try it only moves the progress."""
        if self.stage is not Stage.APPLIED or event.version is None or not self._same_try(event):
            return []
        return self._committed(event.version, event.progress or 0)

    def abort(self, event: SyncEvent) -> list[Command]:
        """The try is over."""
        return self._give_up() if self._same_try(event) else []

    def tick(self, now: float, given: Key | None) -> list[Command]:
        """Time has passed; ``given`` is the version last committed at this member, and the try that did it, as the
        trainer's latest beat says.

        The version alone would not do: a try that failed for our canary is followed by one for the same version.
        """
        if self._prepare is None:
            return []
        if self.stage is Stage.APPLIED and self._prepare.version is not None and given == self.key:
            return self._committed(self._prepare.version, self._prepare.progress or 0)
        return self._give_up() if now >= self.lease_ends else []

    def lost_engine(self) -> list[Command]:
        """The engine died; its successor holds nothing, and is in no group. Nobody is to wait for us until it is up."""
        self.version, self._touched = None, False
        leave = SyncEvent(verb="leave", sender=self.name, life=self.life, reason="the engine died")
        if self._prepare is None:
            return [leave]
        answer = self._answer("failed", reason="the engine died")
        self._clear()
        return [answer, leave]

    # -- inside

    def _same_try(self, event: SyncEvent) -> bool:
        return self._prepare is not None and event.sender == self._prepare.sender and key_of(event) == self.key

    def _ready(self) -> SyncEvent:
        return self._answer("ready", detail={"pause": self._pause_seconds})

    def _extend(self, event: SyncEvent, now: float) -> None:
        # longer than the coordinator's own deadline, so that it decides first
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

    def _give_up(self) -> list[Command]:
        # while receiving nobody can say yet whether weights were touched: only a sure "no" keeps the old version
        receiving, touched = self.stage is Stage.RECEIVING, self._touched or self.stage is Stage.RECEIVING
        self._clear()
        if touched:
            self.version = None
            # what is cut off here might wait for its peers for ever, and no further transfer could begin
            return [Resume(), Rejoin()] if receiving else [Rejoin()]
        return [Resume()]

    def _clear(self) -> None:
        self._prepare, self._touched, self.stage, self.lease_ends = None, False, Stage.IDLE, float("inf")
