"""Trains on the batches of a train step, including repaired batches, and reports the outcome of each batch.

A sample of the experiences of each step is kept in the run's folder for later inspection (:class:`TrainSamples`).
"""

from __future__ import annotations

import asyncio
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog

from trinity_agents.trainer.decisions import REPLAYED, replayed_key
from trinity_agents.trainer.sources.base import BatchResult, TrainBatch
from trinity_mq.bus import Envelope, HeaderValue, Topology
from trinity_mq.experience import EncodeError, ExperienceBatch
from trinity_mq.experience.rules import Versions
from trinity_mq.messages import BatchReady
from trinity_mq.messages.batches import StepOutcome
from trinity_mq.runtime.deliveries import OFFSETS_HEADER, envelope
from trinity_mq.telemetry.group_drops import TOO_OLD
from trinity_mq.telemetry.sample_log import SAMPLES_FOLDER, SampleLog
from trinity_mq.telemetry.trace import span
from trinity_mq.training.checkpoints.checkpoint import StepAttempts
from trinity_mq.training.learner import Learner
from trinity_mq.training.update import SKIPPED, WRITTEN

log = structlog.get_logger(__name__)

STOPPED_FOLDER = "stopped"
"""Subfolder of the run folder for the experiences of batches at which the guard stopped the training."""


def staleness(versions: Versions | None, step: int) -> int:
    """Return ``max(0, trainer step - step stamped on the oldest token)``, in train steps; 0 without stamped tokens."""
    if not versions:
        return 0
    if len(versions) == 1:
        return max(0, step - versions[0][2])
    oldest = min((generation, stamped) for _, generation, stamped in versions)
    return max(0, step - oldest[1])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one train step; each batch has its own :attr:`TrainBatch.result`."""

    metrics: dict[str, float]
    """Metrics of the step. ``sample/skipped_step`` tells whether it was skipped, and ``sample/repaired_batches`` the
    number of repaired batches trained on, if the step had any."""
    stepped: bool
    """True if the step changed the policy's weights; False for a step that was skipped or trained only the critic."""


async def train_on(
    batch: TrainBatch, step: int, *, learner: Learner, attempts: StepAttempts, max_staleness: int
) -> StepResult:
    """Train on the usable batches of a train step and on its replayed experiences, and set the result of each batch.

    No step is made without usable fresh experiences. Experiences of groups that are too old are removed from each
    batch.

    Args:
        batch: The batch that the source returned, with the other batches of the step.
        step: Number of train steps so far; staleness is measured from this step.
        learner: Makes the optimizer step.
        attempts: Records the attempt before the step and clears it afterwards. An attempt that is still recorded at the
            next start shows that the step crashed the trainer.
        max_staleness: Maximum age in train steps; groups with an older token are dropped as a whole before any
            optimizer step.
    """
    for part in batch.parts:
        part.result = part.unusable_result(attempts.starts(part.starts_key))
    if any(part.result is not None and part.result.kills for part in batch.parts):
        # The batch is to blame, not the replayed groups.
        attempts.finish([key for key in attempts.known if key.startswith(REPLAYED)])
    usable = [part for part in batch.parts if part.result is None]
    metrics: dict[str, float] = {}
    replayed, batch.replayed = batch.replayed, ExperienceBatch.of([])  # restored below if fresh experiences remain
    if usable:
        # On a thread, because the experiences that are joined and copied may be gigabytes.
        with span("drop stale groups", threads=True):
            experiences, metrics = await asyncio.to_thread(drop_stale_groups, usable, step, max_staleness)
    fresh = [part for part in usable if part.experiences]
    if fresh:
        keys = [part.starts_key for part in fresh]
        if replayed:
            batch.replayed = replayed
            keys += map(replayed_key, dict.fromkeys(replayed.ids("tid")))
            experiences = await asyncio.to_thread(ExperienceBatch.concat, [experiences, replayed])
        with attempts.noted(keys), span("await train step", wait=True):
            metrics |= await learner.step(experiences, step + 1)
        outcome, reason = _step_outcome(metrics)
        for part in fresh:
            assert part.result is not None
            part.result = replace(part.result, outcome=outcome, reason=reason)
    metrics["sample/skipped_step"] = float(not any(part.trained for part in batch.parts))
    if repaired := [part for part in batch.parts if part.is_repaired]:
        metrics["sample/repaired_batches"] = float(sum(part.trained for part in repaired))
    return StepResult(metrics, any(part.trained for part in fresh) and _moved_policy(metrics))


def _moved_policy(metrics: Mapping[str, float]) -> bool:
    return metrics.get("actor/optimizer_steps", 1.0) > 0


def _step_outcome(metrics: Mapping[str, float]) -> tuple[StepOutcome, str | None]:
    """Return the outcome and its reason for the batches of a train step."""
    if _moved_policy(metrics) or metrics.get("critic/optimizer_steps", 0.0) > 0 or metrics.get(WRITTEN, 0.0) > 0:
        return "trained", None
    skipped = [name.removeprefix(SKIPPED) for name, count in metrics.items() if name.startswith(SKIPPED) and count]
    if skipped == ["empty"]:
        return "empty", "no token to train on"
    guarded = ", ".join(reason for reason in skipped if reason != "empty")
    return (
        "skipped",
        f"the guard let no optimizer step through ({guarded})" if guarded else "no optimizer step was possible",
    )


def drop_stale_groups(
    parts: Sequence[TrainBatch], step: int, max_staleness: int
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Remove from each batch the groups whose oldest token is more than ``max_staleness`` steps old. Set the result of
    each batch to *dropped*; the caller replaces the result of each batch that still has experiences.

    Returns:
        The remaining experiences of all batches in order, and ``sample/*`` metrics.
    """
    whole = ExperienceBatch.concat(part.experiences for part in parts)
    tids, ages = whole.ids("tid"), [staleness(versions, step) for versions in whole.values("versions")]
    stale = {tid for tid, age in zip(tids, ages, strict=True) if age > max_staleness}
    for part in parts:
        is_fresh = np.array([tid not in stale for tid in part.experiences.ids("tid")], dtype=np.bool_)
        dropped = part.experiences.select(~is_fresh)
        part.experiences = part.experiences.select(is_fresh)
        tasks = sorted({task for experience in dropped if isinstance(task := experience.eid.task, int)})
        part.result = BatchResult("dropped", "every group was too old", stale_tasks=tasks, dropped=len(dropped))
    kept_indexes = [number for number, tid in enumerate(tids) if tid not in stale]
    metrics = {
        TOO_OLD.metric: float(len(stale)),
        "sample/dropped_stale_experiences": float(len(whole) - len(kept_indexes)),
        "sample/experiences": float(len(kept_indexes)),
    }
    metrics |= _age_metrics([(tids[number], ages[number]) for number in kept_indexes])
    return whole.select(kept_indexes), metrics


def _age_metrics(ages: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Return ``sample/staleness/*`` from the group and the age of each experience; the age of a group is the age of its
    oldest experience.
    """
    if not ages:
        return {}
    groups: dict[str, int] = {}
    for tid, age in ages:
        groups[tid] = max(age, groups.get(tid, 0))
    return {
        "sample/staleness/mean": sum(age for _, age in ages) / len(ages),
        "sample/staleness/max": float(max(groups.values())),
        "sample/staleness/groups/mean": sum(groups.values()) / len(groups),
    }


def dump_batch(batch: TrainBatch, folder: Path, tokenizer: Path) -> str:
    """Write a file with the experiences of the train step at which the guard stopped the training.

    Args:
        batch: The first batch of the step, with the other batches and the replayed experiences of the step.
        folder: The run's folder.
        tokenizer: Folder with the model's tokenizer.

    Returns:
        A message for the user: the batch is read again, and the command that shows the file, or the reason why the file
        could not be written.
    """
    path = folder / STOPPED_FOLDER / f"batch-{re.sub('[^0-9A-Za-z_.-]', '_', str(batch.batch))}.tmqx"
    again = f"Batch {batch.batch} is not counted: the next start of the trainer reads it again"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ExperienceBatch.concat([*(part.experiences for part in batch.parts), batch.replayed]).encode())
    except (OSError, EncodeError) as error:
        return f"{again}. Its experiences could not be written to {path}: {error}"
    look = shlex.join(["trinity-mq", "inspect", str(path), "--tokenizer", str(tokenizer)])
    return f"{again}. Look at its experiences with `{look}`"


def skipped_batch_dead_letter(batch: TrainBatch, reason: str, by: str, topology: Topology) -> Envelope:
    """Return the dead letter of a skipped batch: the BatchReady of its set, with the stream offsets of the chunks.

    The batch is retried only if ``trinity-mq dead replay`` publishes it again.
    """
    headers: dict[str, HeaderValue] = {
        "dead-reason": reason,
        "dead-by": by,
        "dead-queue": topology.ready.name,
        OFFSETS_HEADER: ",".join(map(str, batch.offsets)),
    }
    message = BatchReady(
        batch=batch.batch,
        ticket=batch.ticket,
        op=batch.op,
        chunks=len(batch.offsets),
        experiences=len(batch.experiences),
        metrics=batch.metrics,
        filtered_groups=batch.filtered_groups,
    )
    return envelope(message, message_id=f"skipped-{batch.ticket}-{batch.op}", headers=headers)


def chosen(batch: ExperienceBatch, most: int, seed: int) -> list[int]:
    """Return the indexes, in ascending order, of the experiences of some whole groups. ``seed`` determines the groups.

    They have at most ``most`` experiences together. A single group may have more.
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
        per_batch: Approximate number of experiences kept per batch of a train step; 0 switches the log off.
        max_bytes: Maximum size of the whole log in bytes.
    """

    def __init__(self, run_dir: Path, per_batch: int, max_bytes: int) -> None:
        self._per_batch = per_batch
        self._log = SampleLog(run_dir / SAMPLES_FOLDER, max_bytes)

    async def keep(self, step: int, batches: Sequence[ExperienceBatch]) -> None:
        """Write a sample of the experiences of each batch of train step ``step``. After an OSError, such as a full
        disk, nothing more is written, and training continues.
        """
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
