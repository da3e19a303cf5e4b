"""What is too old to train on goes by whole groups, before any optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.experience import Experience, ExperienceBatch
from trinity_mq.experience.rules import Versions


def staleness(versions: Versions | None, step: int) -> int:
    """Return ``max(0, trainer step - step stamped on the oldest token)``, in train steps; 0 where none is stamped."""
    if not versions:
        return 0
    oldest = min((generation, stamped) for _, generation, stamped in versions)
    return max(0, step - oldest[1])


def _ages(batch: ExperienceBatch, step: int) -> list[int]:
    return [staleness(versions, step) for versions in batch.values("versions")]


def stale_tasks(experiences: Sequence[Experience], step: int, max_staleness: int) -> list[int]:
    """Return the tasks, in order, with an experience whose oldest token is more than ``max_staleness`` steps old."""
    batch = ExperienceBatch.of(experiences)
    ages = _ages(batch, step)
    if max(ages, default=0) <= max_staleness:
        return []
    tasks = {one.eid.task for one, age in zip(batch, ages, strict=True) if age > max_staleness}
    return sorted(task for task in tasks if isinstance(task, int))


def drop_stale(
    experiences: Sequence[Experience], step: int, max_staleness: int
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Return the experiences of the groups whose oldest token is at most ``max_staleness`` steps old, and ``sample/*``
    metrics.
    """
    batch = ExperienceBatch.of(experiences)
    ages = _ages(batch, step)
    tids = batch.ids("tid")
    stale = {tid for tid, age in zip(tids, ages, strict=True) if age > max_staleness}
    kept = [number for number, tid in enumerate(tids) if tid not in stale]
    metrics = {
        "sample/dropped_stale_groups": float(len(stale)),
        "sample/dropped_stale_experiences": float(len(batch) - len(kept)),
        "sample/experiences": float(len(kept)),
    }
    if kept:
        metrics |= _spread([ages[number] for number in kept])
    return batch.select(kept) if stale else batch, metrics


def _spread(ages: Sequence[int]) -> dict[str, float]:
    return {"sample/staleness/mean": sum(ages) / len(ages), "sample/staleness/max": float(max(ages))}
