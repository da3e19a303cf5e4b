"""One card for engines and trainer: who may use its memory, and when. A pure state machine for each side, and the lock.

    engine:   awake ──sleep──▶ draining ──drained──▶ freeing ──freed──▶ asleep
              asleep ──wake, weights, or the end of the lease──▶ waking ──locked, woken──▶ awake
    trainer:  away ──want──▶ asking ──locked──▶ holding ──done──▶ away

A file lock decides who may use the card: engines hold it shared from before they load a model until they sleep, and the
trainer holds it alone from before its state comes to the card until its state has left the card. The system releases
the lock of a process that dies, so no order of deaths leaves the card taken. Requests only ask the holder to release
it:

- The trainer repeats ``sleep`` until it has the lock. Each request also renews the lease of engines that sleep already.
- An engine drains once: later requests of its clients wait, so that the trainer gets the card when the running requests
  have ended, as ``synchronizer.pause_mode`` says.
- An engine wakes by ``wake``, by weights that arrive, or when its lease ends because the trainer is gone. It first
  takes the lock, so that it waits for a trainer that is alive.
- The trainer returns the card before it waits for anything: the next batch, an evaluation, or engines that take
  weights. So each side has its turn, and neither waits for the other while it holds the card.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from trinity_mq.file_lock import try_lock

SleepLevel = Literal[1, 2]
"""1: keep the weights in host memory. 2: discard the weights, because new weights follow."""
CARD_LEASE = 20.0
"""Seconds after the trainer's last request after which a sleeping engine wakes by itself."""
ASK_INTERVAL = 1.0
"""Seconds between two requests of the trainer while it waits for the card."""
LOCK_INTERVAL = 0.1
"""Seconds between two attempts to take the lock; a file lock does not notify."""


class CardLock:
    """Handle of one process to the file lock on the card of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "engines" / "card.lock"
        self._file: IO[str] | None = None

    def try_take(self, *, shared: bool) -> bool:
        """Take the lock, shared with other engines or alone. Return False if it is held by others. Do nothing if this
        process holds it already, in either way.

        Raises:
            OSError: The file system has no locks, or the file cannot be written.
        """
        if self._file is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._path.open("a"))
            if not try_lock(file, shared=shared):
                return False
            stack.pop_all()
            self._file = file
        return True

    async def take(self, *, shared: bool) -> None:
        """Take the lock as soon as it is free; errors as :meth:`try_take`."""
        while not self.try_take(shared=shared):  # noqa: ASYNC110  # a file lock does not notify
            await asyncio.sleep(LOCK_INTERVAL)

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


class EngineStage(enum.Enum):
    """Stage of an engine that shares a card."""

    AWAKE = "awake"
    DRAINING = "draining"
    FREEING = "freeing"
    """The memory is being freed. The engine still holds the lock."""
    ASLEEP = "asleep"
    WAKING = "waking"
    """The engine waits for the lock, or fills its memory."""


class EngineCommand(enum.Enum):
    """A command of :class:`EngineTurn` to the engine."""

    PAUSE_REQUESTS = "pause requests"
    """Start no more batch steps, and report :meth:`EngineTurn.drained` when the running steps have ended."""
    TAKE_CARD = "take card"
    """Take the lock shared, as soon as it is free, then fill the memory. Report :meth:`EngineTurn.woken`."""
    STOP_WAKING = "stop waking"
    """Stop waiting for the lock."""
    SERVE = "serve"
    """End the pause, and serve again."""


@dataclass(slots=True)
class EngineTurn:
    """State machine of an engine that shares a card."""

    stage: EngineStage = EngineStage.AWAKE
    level: SleepLevel = 1
    """Treatment of the weights when the memory is freed."""
    has_lock: bool = False
    """While waking: whether the lock is taken and the memory is being filled."""
    wakes_again: bool = False
    """While the memory is being freed: whether the engine was told to wake."""

    def sleep(self, level: SleepLevel) -> list[EngineCommand]:
        """Handle the trainer's request for the card, which it repeats."""
        self.wakes_again = False
        if self.stage is EngineStage.AWAKE:
            self.stage, self.level = EngineStage.DRAINING, level
            return [EngineCommand.PAUSE_REQUESTS]
        if self.stage is EngineStage.WAKING and not self.has_lock:
            self.stage = EngineStage.ASLEEP
            return [EngineCommand.STOP_WAKING]
        return []

    def drained(self) -> bool:
        """Handle the end of the running batch steps. If it returns True, the engine must free its memory on the card by
        :attr:`level`, then release the lock, then call :meth:`freed`.
        """
        if self.stage is not EngineStage.DRAINING:
            return False
        self.stage, self.wakes_again = EngineStage.FREEING, False
        return True

    def freed(self) -> list[EngineCommand]:
        """Handle the release of the lock."""
        if self.stage is not EngineStage.FREEING:
            return []
        self.stage = EngineStage.ASLEEP
        return self.wake() if self.wakes_again else []

    def wake(self) -> list[EngineCommand]:
        """Handle the return of the card, the arrival of weights, or the end of the lease."""
        if self.stage is EngineStage.DRAINING:
            self.stage = EngineStage.AWAKE  # the trainer is gone, or has given up, before this engine slept
            return [EngineCommand.SERVE]
        self.wakes_again = True
        if self.stage is not EngineStage.ASLEEP:
            return []
        self.stage, self.has_lock = EngineStage.WAKING, False
        return [EngineCommand.TAKE_CARD]

    def locked(self) -> bool:
        """Record that the lock is taken. Return False if the engine must release it again."""
        self.has_lock = self.stage is EngineStage.WAKING
        return self.has_lock

    def woken(self) -> list[EngineCommand]:
        """Handle the end of filling the memory."""
        if self.stage is not EngineStage.WAKING or not self.has_lock:
            return []
        self.stage, self.has_lock = EngineStage.AWAKE, False
        return [EngineCommand.SERVE]


class TrainerStage(enum.Enum):
    """Stage of a trainer that shares a card."""

    AWAY = "away"
    ASKING = "asking"
    HOLDING = "holding"


@dataclass(frozen=True, slots=True)
class AskEngines:
    """Send ``sleep`` to every living engine. Then try to take the lock alone; report :meth:`TrainerTurn.locked`."""

    level: SleepLevel


@dataclass(frozen=True, slots=True)
class MoveIn:
    """Bring the trainer's state to the card."""


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Move the trainer's state to the host, then release the lock, then send ``wake`` if ``wakes``."""

    wakes: bool


TrainerCommand = AskEngines | MoveIn | MoveOut


@dataclass(slots=True)
class TrainerTurn:
    """State machine of a trainer that shares a card."""

    stage: TrainerStage = TrainerStage.AWAY
    level: SleepLevel = 1

    def want(self, level: SleepLevel) -> list[TrainerCommand]:
        """Ask for the card, unless the trainer holds it."""
        if self.stage is TrainerStage.HOLDING:
            return []
        self.stage, self.level = TrainerStage.ASKING, level
        return [AskEngines(level)]

    def locked(self, *, is_free: bool) -> list[TrainerCommand]:
        """Handle the result of an attempt to take the lock."""
        if self.stage is not TrainerStage.ASKING:
            return []
        if not is_free:
            return [AskEngines(self.level)]
        self.stage = TrainerStage.HOLDING
        return [MoveIn()]

    def done(self, *, weights_follow: bool) -> list[TrainerCommand]:
        """Return the card. ``weights_follow``: a weight sync wakes the engines."""
        if self.stage is TrainerStage.AWAY:
            return []
        self.stage = TrainerStage.AWAY
        return [MoveOut(wakes=not weights_follow)]
