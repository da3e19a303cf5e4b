"""The explorer's saved state, and the file that it is written to atomically."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
from pydantic import BaseModel, Field, ValidationError

from trinity_agents.explorer.in_flight import InFlightBatches, PendingTask, SubmittedTask
from trinity_mq.dispatch.tickets import Ticket
from trinity_mq.runtime.errors import FatalError, RestartMe
from trinity_mq.runtime.process import write_atomic

SEEN_SUBMISSIONS = 10_000
"""Submission ids that are remembered, so that a repeated submission is not executed twice."""


class ExplorerState(BaseModel):
    """The state with which an explorer goes on where another was killed."""

    incarnations: int = 0
    taskset: dict[str, Any] | None = None
    """Identity, epoch, seed, cursor."""
    results_offset: int | None = None
    opened: int = 0
    """Training batches opened."""
    closed: int = 0
    """Training batches closed."""
    tickets: dict[str, Ticket] = Field(default_factory=dict)
    following: InFlightBatches = Field(default_factory=InFlightBatches)
    broken: list[SubmittedTask] = Field(default_factory=list)
    """Submitted tasks of abandoned batches whose submitters are still to be answered."""
    pending: list[PendingTask] = Field(default_factory=list)
    given_back: dict[str, list[int]] = Field(default_factory=dict)
    """By open ticket: the tasks in it that were given back before."""
    seen_submissions: list[str] = Field(default_factory=list)
    due: list[int] = Field(default_factory=list)
    """Evaluations to do, by the number of closed batches at which each was due."""
    evaluated: list[str] = Field(default_factory=list)
    """Evaluations done, as batch ids such as ``"50/heldout"``."""
    consecutive_empty: int = 0
    ended: bool = False
    """No more batches will be opened."""
    finished: bool = False
    """The last evaluation is done."""


class StateFile:
    """Reads and writes the state; one write at a time, the latest state wins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self._known: tuple[int, int] | None = None
        """Identity of the file when it was last read or written; None: there was none."""

    def load(self) -> ExplorerState:
        """Return the saved state, a fresh one when there is none.

        Raises:
            FatalError: The file is there but cannot be used; starting from nothing would do the run's work again.
        """
        self._known = self._identity()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ExplorerState()
        except OSError as error:
            raise FatalError(f"{self._path}: the explorer's state cannot be read: {error.strerror or error}") from error
        try:
            return ExplorerState.model_validate(msgpack.unpackb(data, strict_map_key=False))
        except (ValueError, ValidationError, msgpack.UnpackException) as error:
            raise FatalError(
                f"{self._path}: the explorer's state does not decode ({' '.join(str(error).split())[:200]}). Restore "
                "the file, or start a "
                "run under another name"
            ) from error

    async def save(self, state: ExplorerState) -> None:
        """Write ``state`` as it is now; on return it is on disk.

        Raises:
            RestartMe: Another explorer wrote the file since: it had the lock while this one was disconnected.
        """
        async with self._lock:
            data: bytes = msgpack.packb(state.model_dump(mode="python"))
            await asyncio.to_thread(self._write, data)

    async def check(self) -> None:
        """Return if nobody else wrote the file since it was last read or written.

        Raises:
            RestartMe: As :meth:`save`.
        """
        async with self._lock:
            await asyncio.to_thread(self._check)

    def _check(self) -> None:
        if self._identity() != self._known:
            raise RestartMe(
                f"{self._path}: another explorer has gone on with this run; this one starts anew from there"
            )

    def _write(self, data: bytes) -> None:
        self._check()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, data)
        self._known = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns
