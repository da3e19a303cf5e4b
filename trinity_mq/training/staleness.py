"""What is too old to train on goes by whole groups, before any optimizer step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.experience import Experience, group_by


def staleness(experience: Experience, step: int) -> int:
    """Return ``max(0, trainer step - step stamped on the oldest token)``, in train steps."""
    oldest = experience.version_min
    return 0 if oldest is None else max(0, step - oldest[1])


def drop_stale(
    experiences: Sequence[Experience], step: int, max_staleness: int
) -> tuple[list[Experience], dict[str, float]]:
    """Return the experiences of the groups whose oldest token is at most ``max_staleness`` steps old, and ``sample/*``
    metrics.
    """
    kept: list[Experience] = []
    groups = group_by(list(experiences), "task").values()
    dropped_groups = 0
    for group in groups:
        if max(staleness(experience, step) for experience in group) > max_staleness:
            dropped_groups += 1
        else:
            kept += group
    ages = [staleness(experience, step) for experience in kept]
    metrics = {
        "sample/dropped_stale_groups": float(dropped_groups),
        "sample/dropped_stale_experiences": float(len(experiences) - len(kept)),
        "sample/experiences": float(len(kept)),
    }
    if ages:
        metrics["sample/staleness/mean"] = sum(ages) / len(ages)
        metrics["sample/staleness/max"] = float(max(ages))
    return kept, metrics
