"""The learner of mode ``explore``: it writes what it would train on, and its weights stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.data.sinks import ExperienceSink
from trinity_mq.experience import Experience
from trinity_mq.training.learner import Learner
from trinity_mq.training.update import WRITTEN

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.training.checkpoints.checkpoint import Writer

NOTE = "recorded.txt"
"""File of a checkpoint: what is behind it, is in the sink."""


class RecordingLearner:
    """Writes batches to a sink. Killed and started again it writes those behind its checkpoint once more, in the place
    of the first ones.

    Args:
        learner: Has the weights that engines are given.
        sink: Takes the experiences.
    """

    def __init__(self, learner: Learner, sink: ExperienceSink) -> None:
        self._learner, self._sink = learner, sink

    async def open(self, checkpoint: Path | None) -> None:
        """Load the configured model, whatever the checkpoint: it holds no weights."""
        await self._learner.open(None)

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Write experiences, by the batches in their ids.

        Raises:
            SinkError: They cannot be written.
        """
        by_batch: dict[int, list[Experience]] = {}
        for one in experiences:
            by_batch.setdefault(int(one.eid.batch), []).append(one)
        for batch, members in by_batch.items():
            await asyncio.to_thread(self._sink.write, batch, members)
        return {"actor/optimizer_steps": 0.0, WRITTEN: float(len(experiences))}

    async def save(self, folder: Path) -> None:
        """Write a note."""
        await asyncio.to_thread((folder / NOTE).write_text, f"written to {self._sink.title}\n")

    async def stage(self) -> Writer:
        """Return :meth:`save`: there is nothing that changes."""
        return self.save

    async def export(self, folder: Path) -> None:
        """Write the model, which is the one that the run began with."""
        await self._learner.export(folder)

    async def manifest(self) -> list[tuple[str, str, list[int]]]:
        """Return the weights' names, dtypes and shapes."""
        return await self._learner.manifest()

    async def weights(self) -> list[tuple[str, Tensor]]:
        """Return the weights."""
        return await self._learner.weights()

    async def canary_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the logprobs of ``tokens[1:]``."""
        return await self._learner.canary_logprobs(tokens)

    async def close(self) -> None:
        """Close the sink and the model."""
        await asyncio.to_thread(self._sink.close)
        await self._learner.close()
