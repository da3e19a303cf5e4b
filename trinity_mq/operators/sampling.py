"""Operators that drop experiences without a new learning signal: too easy or too hard tasks, and repeated runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trinity_mq.algorithms.estimators.runs import run_values, scores
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import column_items
from trinity_mq.operators.base import ColumnOperator, rows_of_tasks


class DapoDynamicSampling(ColumnOperator):
    """Keeps tasks with both right and wrong runs (DAPO, arXiv 2503.14476, equation 11).

    A run is right if its score is above ``correct_threshold``. The score is taken from the run's last step: the metric
    ``metric_key`` of the experience, else its reward. A run without a score does not count. A task needs at least two
    runs with a score.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key = metric_key
        self.correct_threshold = correct_threshold

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the remaining experiences, ``filtered_count``, and the numbers of experiences dropped because all runs
        of their task were right, all were wrong, or too few had a score.
        """
        kept_tids: set[str] = set()
        sizes = Counter(batch.ids("tid"))
        dropped = {"dropped_all_correct": 0, "dropped_all_wrong": 0, "dropped_too_few": 0}
        for tid, run_scores in run_values(batch, scores(batch, self.metric_key))[0].items():
            right = sum(score > self.correct_threshold for score in run_scores.values())
            if len(run_scores) < 2:
                dropped["dropped_too_few"] += sizes[tid]
            elif right == len(run_scores):
                dropped["dropped_all_correct"] += sizes[tid]
            elif right == 0:
                dropped["dropped_all_wrong"] += sizes[tid]
            else:
                kept_tids.add(tid)
        rows = rows_of_tasks(batch, kept_tids)
        return batch.select(rows), {"filtered_count": len(batch) - len(rows), **dropped}


class Deduplication(ColumnOperator):
    """Keeps the first of equal runs of a task, and the first of experiences with the same id (``uid``).

    Runs are equal if their steps have the same tokens (and, for dpo, the same pair of responses) and the same action
    mask. Runs with multi-modal inputs are never equal, because their tokens do not represent the inputs.
    """

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return the remaining experiences, and the numbers of dropped experiences (``filtered_count``) and runs
        (``duplicate_runs``).
        """
        rows, runs = _first_runs(batch)
        rids = batch.ids("rid")
        return batch.select(rows), {
            "filtered_count": len(batch) - len(rows),
            "duplicate_runs": runs - len({rids[number] for number in rows}),
        }


def _first_runs(batch: ExperienceBatch) -> tuple[list[int], int]:
    """Return the row numbers of the experiences to keep, in order, and the number of runs."""
    rids, tids, uids = (batch.ids(kind) for kind in ("rid", "tid", "uid"))
    steps, contents = batch.values("eid.step"), _contents(batch)
    firsts = {uid: number for number, uid in reversed(list(enumerate(uids)))}
    runs: dict[str, list[int]] = {}
    for number in sorted(firsts.values()):
        runs.setdefault(rids[number], []).append(number)
    seen_keys: set[tuple[Any, ...]] = set()
    rows: list[int] = []
    for numbers in runs.values():
        key = (tids[numbers[0]], *sorted((steps[number], contents[number]) for number in numbers))
        if key in seen_keys and all(contents[number] for number in numbers):
            continue
        seen_keys.add(key)
        rows += numbers
    return sorted(rows), len(runs)


_CONTENT = ("tokens", "chosen", "rejected", "action_mask")


def _contents(batch: ExperienceBatch) -> list[tuple[bytes, ...]]:
    """Return the content of each experience, for comparison; an empty tuple if it has multi-modal inputs."""
    columns = [column_items(batch.column(name), len(batch)) for name in _CONTENT]
    inputs = batch.columns()[2].values()
    shown = [any(part.lengths[number] >= 0 for column in inputs for part in column) for number in range(len(batch))]
    rows = zip(*columns, strict=True)
    return [
        () if has_inputs else tuple(b"" if tensor is None else _bytes(tensor) for tensor in row)
        for row, has_inputs in zip(rows, shown, strict=True)
    ]


def _bytes(tensor: Any) -> bytes:
    """Return the values of a tensor as bytes that do not depend on its integer type."""
    return tensor.numpy(force=True).astype("int64").tobytes()  # type: ignore[no-any-return]
