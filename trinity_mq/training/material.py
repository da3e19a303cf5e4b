"""What a train step is made of: a batch, and repaired ones along with it; and what is told of one that is given up."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_mq.bus import Envelope, HeaderValue, Topology
from trinity_mq.experience import ExperienceBatch
from trinity_mq.messages import Progress
from trinity_mq.runtime.mail import envelope
from trinity_mq.training.source import TrainBatch
from trinity_mq.training.staleness import drop_stale

MAX_STARTS = 2
"""Unfinished starts on one batch; the next start skips it."""
MAX_STARTS_REPAIRED = 1
"""The same for one that goes along with another: what kills may be either, and the other gets a start without it."""


def fresh(parts: Sequence[TrainBatch], step: int, max_staleness: int) -> tuple[ExperienceBatch, dict[str, float]]:
    """Leave in each batch only the groups that are fresh enough; one without any is ``dropped``.

    Args:
        parts: What there is to train on at once.
        step: Train step of the weights.
        max_staleness: In train steps, by the oldest token of a group.

    Returns:
        What is left of all, in order, and the ``sample/*`` metrics of :func:`drop_stale`.
    """
    whole = ExperienceBatch.concat(part.experiences for part in parts)
    kept, metrics = drop_stale(whole, step, max_staleness)
    left = set(kept.ids("tid"))
    for part in parts:
        numbers = [number for number, tid in enumerate(part.experiences.ids("tid")) if tid in left]
        part.experiences = part.experiences.select(numbers)
        if not numbers:
            part.state, part.reason = "dropped", "every group was too old"
    return kept, metrics


def skipped_letter(told: Progress, by: str, topology: Topology) -> Envelope:
    """Return the dead letter of a batch that is not tried again: what is ``told`` of it, with its reason."""
    headers: dict[str, HeaderValue] = {
        "dead-reason": told.reason or "",
        "dead-by": by,
        "dead-queue": topology.ready.name,
    }
    return envelope(told, message_id=f"skipped-{told.ticket}", headers=headers)


def trained_counts(batch: TrainBatch) -> dict[str, float]:
    """Return whether no train step was made, and how many repaired batches were trained on if there were any."""
    trained = [one.state == "trained" for one in (batch, *batch.repaired)]
    found = {"sample/skipped_step": float(not any(trained))}
    return found | ({"sample/repaired_batches": float(sum(trained[1:]))} if batch.repaired else {})
