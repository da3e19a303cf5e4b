"""Writes a sample of the experiences of each train step to the run's folder, for later inspection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import structlog

from trinity_mq.experience import ExperienceBatch
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLog

log = structlog.get_logger(__name__)


def chosen(batch: ExperienceBatch, most: int, seed: int) -> list[int]:
    """Return the indexes of about ``most`` experiences: whole groups in random order, fixed by ``seed``.

    The first group is included whatever its size.
    """
    groups: dict[str, list[int]] = {}
    for number, tid in enumerate(batch.ids("tid")):
        groups.setdefault(tid, []).append(number)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    indexes: list[int] = []
    for group in order:
        if indexes and len(indexes) + len(group) > most:
            break
        indexes += group
    return sorted(indexes)


class TrainSamples:
    """The sample log of one trainer.

    Args:
        run_dir: The run's folder.
        each: Experiences per batch of a train step; 0 switches the log off.
        max_bytes: Maximum size of the whole log in bytes.
    """

    def __init__(self, run_dir: Path, per_batch: int, max_bytes: int) -> None:
        self._per_batch = per_batch
        self._log = SampleLog(run_dir / SAMPLES_FOLDER, max_bytes)

    async def keep(self, step: int, batches: Sequence[ExperienceBatch]) -> None:
        """Write some experiences of train step ``step``. An OSError such as a full disk ends only the log."""
        if not self._per_batch:
            return
        try:
            await asyncio.to_thread(self._write, step, batches)
        except OSError as error:
            log.warning("sample_log_disabled", reason=error.strerror or str(error))
            self._per_batch = 0

    def _write(self, step: int, batches: Sequence[ExperienceBatch]) -> None:
        for batch in batches:
            if len(batch):
                self._log.append(step, batch.select(chosen(batch, self._per_batch, step)).encode())

    def close(self) -> None:
        """Close the log."""
        self._log.close()
