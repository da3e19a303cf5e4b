"""Saves checkpoints while training continues, one checkpoint at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.processes.chaos_points import pass_point
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, TrainerProgress, Writer
from trinity_mq.training.learner import Learner

Committed = Callable[[TrainerProgress, float], Awaitable[None]]
"""Called with the state of a committed checkpoint, and the seconds since the write began."""


class CheckpointSaver:
    """Copies the learner's state and writes the copy while training continues, at most one checkpoint at a time.

    Args:
        store: Store of the checkpoints.
        learner: Learner whose state is saved.
        in_background: True: :meth:`run` writes the checkpoint. False: :meth:`save` returns once it is committed.
    """

    def __init__(self, store: CheckpointStore, learner: Learner, *, in_background: bool) -> None:
        self._store, self._learner, self._in_background = store, learner, in_background
        self._staged: tuple[Writer, TrainerProgress, Committed] | None = None
        """The staged checkpoint that :meth:`run` writes, None without a staged checkpoint."""
        self._changed = Notifier()

    async def save(self, state: TrainerProgress, committed: Committed) -> None:
        """Start a checkpoint after the previous checkpoint is committed; the weights may change after the return.

        Args:
            state: The trainer's state, saved next to the learner's files.
            committed: Awaited after the checkpoint is committed, before the next checkpoint is started.

        Raises:
            RestartRequested: A trainer of a newer generation has taken over the run.
            CheckpointError: The checkpoint could not be written; only if not ``in_background``.
        """
        await self.idle()
        if not self._in_background:
            await self._write(self._learner.save, state, committed)
            return
        self._store.check_generation(state)
        self._staged = (await self._learner.stage(), state, committed)
        self._changed.notify()

    async def idle(self) -> None:
        """Wait until no checkpoint is being written. If a write fails, :meth:`run` raises and this never returns."""
        await self._changed.until(lambda: self._staged is None)

    async def run(self) -> None:
        """Write each staged checkpoint to disk, until cancelled.

        Raises:
            CheckpointError: A checkpoint could not be written; older checkpoints are untouched.
            RestartRequested: A trainer of a newer generation has taken over the run.
        """
        while True:
            await self._changed.until(lambda: self._staged is not None)
            assert self._staged is not None
            await self._write(*self._staged)
            self._staged = None
            self._changed.notify()

    async def _write(self, write: Writer, state: TrainerProgress, committed: Committed) -> None:
        started = asyncio.get_running_loop().time()
        await self._store.save(write, state)
        pass_point("saved checkpoint")
        await committed(state, asyncio.get_running_loop().time() - started)
