"""Keeps some experiences of each train step in the run's folder, for who looks at the run later."""

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
    """Return the numbers of about ``most`` experiences: whole groups drawn at random, the first of them whatever its
    size; the same for the same seed.
    """
    groups: dict[str, list[int]] = {}
    for number, tid in enumerate(batch.ids("tid")):
        groups.setdefault(tid, []).append(number)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    found: list[int] = []
    for group in order:
        if found and len(found) + len(group) > most:
            break
        found += group
    return sorted(found)


class Samples:
    """The log of samples of one trainer.

    Args:
        run_dir: The run's folder.
        each: Experiences of a step; 0: none.
        max_bytes: Bytes of the whole log.
    """

    def __init__(self, run_dir: Path, each: int, max_bytes: int) -> None:
        self._each = each
        self._log = SampleLog(run_dir / SAMPLES_FOLDER, max_bytes)

    async def keep(self, step: int, batches: Sequence[ExperienceBatch]) -> None:
        """Write some experiences of train step ``step``. A disk that is full ends the log, and not the trainer."""
        if not self._each:
            return
        try:
            await asyncio.to_thread(self._keep, step, batches)
        except OSError as error:
            log.warning("samples_end", reason=error.strerror or str(error))
            self._each = 0

    def _keep(self, step: int, batches: Sequence[ExperienceBatch]) -> None:
        for batch in batches:
            if len(batch):
                self._log.append(step, batch.select(chosen(batch, self._each, step)).encode())

    def close(self) -> None:
        """Close the log."""
        self._log.close()
