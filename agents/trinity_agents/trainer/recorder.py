"""The learner of mode ``explore``: writes the experiences to a sink and never changes the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_mq.data.storage import ExperienceSink
from trinity_mq.experience import Experience
from trinity_mq.training.learner import Learner
from trinity_mq.training.update import WRITTEN

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_mq.training.checkpoints.checkpoint import Writer

NOTE = "recorded.txt"
"""File in a checkpoint folder: names the sink that has the experiences up to this checkpoint."""


class RecordingLearner:
    """Writes batches to a sink. After a crash it writes the batches after its checkpoint again, which overwrites them.

    Args:
        learner: Holds the weights that the engines get.
        sink: Takes the experiences.
    """

    def __init__(self, learner: Learner, sink: ExperienceSink) -> None:
        self._learner, self._sink = learner, sink

    async def open(self, checkpoint: Path | None) -> None:
        """Load the configured model, whatever the checkpoint, because these checkpoints hold no weights."""
        await self._learner.open(None)

    async def step(self, experiences: Sequence[Experience], step_number: int) -> dict[str, float]:
        """Write the experiences, grouped by the batch number in their ids.

        Raises:
            SinkError: The experiences cannot be written.
        """
        by_batch: dict[int, list[Experience]] = {}
        for experience in experiences:
            by_batch.setdefault(int(experience.eid.batch), []).append(experience)
        for batch, members in by_batch.items():
            await asyncio.to_thread(self._sink.write, batch, members)
        return {"actor/optimizer_steps": 0.0, WRITTEN: float(len(experiences))}

    async def save(self, folder: Path) -> None:
        """Write the file :data:`NOTE`, which names the sink."""
        await asyncio.to_thread((folder / NOTE).write_text, f"written to {self._sink.title}\n")

    async def stage(self) -> Writer:
        """Return :meth:`save`: no state changes while the checkpoint is written."""
        return self.save

    async def export(self, folder: Path) -> None:
        """Write the model, which is still the initial model of the run."""
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
