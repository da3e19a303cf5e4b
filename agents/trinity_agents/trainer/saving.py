"""Saves checkpoints while training goes on, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from trinity_mq.runtime.notify import Notifier
from trinity_mq.runtime.processes.marked_points import passed
from trinity_mq.training.checkpoints.checkpoint import CheckpointStore, TrainerState, Writer
from trinity_mq.training.learner import Learner

Committed = Callable[[TrainerState, float], Awaitable[None]]
"""Called with the state of a checkpoint that is committed, and the seconds since its writing began."""


class CheckpointSaver:
    """Copies the learner's state, and writes the copy beside the training: at most one checkpoint is being written.

    Args:
        store: Where to.
        learner: Whose.
        in_background: Otherwise :meth:`save` returns when the checkpoint is committed.
    """

    def __init__(self, store: CheckpointStore, learner: Learner, *, in_background: bool) -> None:
        self._store, self._learner, self._in_background = store, learner, in_background
        self._begun: tuple[Writer, TrainerState, Committed] | None = None
        """The checkpoint to be written."""
        self._changed = Notifier()

    async def save(self, state: TrainerState, committed: Committed) -> None:
        """Begin a checkpoint once the one before it is committed; on return the weights may change.

        Args:
            state: Goes beside what the learner writes.
            committed: Awaited once the checkpoint is committed, before the next one is begun.

        Raises:
            RestartMe: A trainer of a newer generation has gone on with the run.
            CheckpointError: Not in the background: it could not be written.
        """
        await self.idle()
        if not self._in_background:
            await self._write(self._learner.save, state, committed)
            return
        self._store.check_generation(state)
        self._begun = (await self._learner.stage(), state, committed)
        self._changed.notify()

    async def idle(self) -> None:
        """Return when no checkpoint is being written. Where that fails, :meth:`run` raises and this never returns."""
        await self._changed.until(lambda: self._begun is None)

    async def run(self) -> None:
        """Write what is begun, until cancelled.

        Raises:
            CheckpointError: A checkpoint could not be written; older ones are untouched.
            RestartMe: A trainer of a newer generation has gone on with the run.
        """
        while True:
            await self._changed.until(lambda: self._begun is not None)
            assert self._begun is not None
            await self._write(*self._begun)
            self._begun = None
            self._changed.notify()

    async def _write(self, write: Writer, state: TrainerState, committed: Committed) -> None:
        started = asyncio.get_running_loop().time()
        await self._store.save(write, state)
        passed("saved checkpoint")
        await committed(state, asyncio.get_running_loop().time() - started)
