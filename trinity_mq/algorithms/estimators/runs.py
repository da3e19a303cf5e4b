"""Rewards of the runs of a batch, and helpers that assign a number per run to its trained tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.ragged import FEW, Ragged
from trinity_mq.telemetry.group_drops import TOO_FEW_RUNS

Group = dict[str, float]
"""Rewards by run id."""
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

LARGEST = 1e30
"""Numbers are limited to +- this value: their squares must be finite, and advantages must fit in float32."""
WHITEN_EPSILON = 1e-8
"""Added to the variance of whitened advantages."""


def run_values(
    batch: ExperienceBatch, numbers: Sequence[Any], units: Sequence[str] | None = None
) -> tuple[dict[str, Group], int]:
    """Return the values of the runs by task (``tid``) and run (``rid``), in the order of their appearance.

    The value of a run is the number of its last step (largest ``eid.step``; the last listed of equal steps), limited to
    +-``LARGEST``. A run whose last step has no finite number does not count, so a task may have no runs left.

    Args:
        batch: A whole batch.
        numbers: Number of each experience, or None.
        units: Run id of each experience; the ``rid`` by default.

    Returns:
        The values, and the number of runs that do not count.
    """
    tids, steps = batch.ids("tid"), batch.values("eid.step")
    owners = batch.ids("rid") if units is None else units
    last = dict(zip(owners, range(len(owners)), strict=True))
    if len(last) < len(owners):  # runs of several steps
        last = {}
        for number, unit in enumerate(owners):
            if unit not in last or steps[number] >= steps[last[unit]]:
                last[unit] = number
    groups: dict[str, Group] = {tid: {} for tid in dict.fromkeys(tids)}
    for unit, number in last.items():
        value = numbers[number]
        if is_finite(value):
            groups[tids[number]][unit] = float(value) if -LARGEST <= value <= LARGEST else math.copysign(LARGEST, value)
    return groups, len(last) - sum(map(len, groups.values()))


def whole_groups(batch: ExperienceBatch, unrewarded: set[str], min_runs: int) -> tuple[list[int], dict[str, float]]:
    """Return the rows of the remaining experiences, and two metrics: the number of runs in ``unrewarded``, and the
    number of tasks dropped with fewer than ``min_runs`` other runs.
    """
    rids, tids = batch.ids("rid"), batch.ids("tid")
    finished: dict[str, set[str]] = {tid: set() for tid in tids}
    for rid, tid in zip(rids, tids, strict=True):
        finished[tid] |= {rid} - unrewarded
    whole = {rid for runs in finished.values() if len(runs) >= min_runs for rid in runs}
    return [number for number, rid in enumerate(rids) if rid in whole], {
        "rollout/missing_rewards": float(len(unrewarded)),
        TOO_FEW_RUNS.metric: float(sum(len(runs) < min_runs for runs in finished.values())),
    }


def scores(batch: ExperienceBatch, metric: str = "accuracy") -> list[Any]:
    """Return the score of each experience: its metric of that name, else its reward, else None. By convention an answer
    is right if its score is above 0.
    """
    measured = zip(batch.values("metrics"), batch.values("reward"), strict=True)
    return [(metrics or {}).get(metric, reward) for metrics, reward in measured]


def is_finite(number: Any) -> TypeGuard[float]:
    """Return whether ``number`` is a finite number."""
    # check the common type first: an isinstance() check with an abstract class takes five times as long
    return (type(number) is float or isinstance(number, Real)) and math.isfinite(number)


def finite_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, or tensors of one finite number."""
    numbers = {
        str(name): value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in metrics.items()
    }
    return {name: float(number) for name, number in numbers.items() if is_finite(number)}


def spread(name: str, numbers: Sequence[float]) -> dict[str, float]:
    """Return ``{name}/mean``, ``/max`` and ``/min``; nothing without numbers."""
    if not numbers:
        return {}
    try:
        mean = statistics.fmean(numbers)
    except OverflowError:  # the sum overflowed
        mean = math.fsum(number / len(numbers) for number in numbers)
    return {f"{name}/mean": mean, f"{name}/max": max(numbers), f"{name}/min": min(numbers)}


def reward_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the spread over tasks of the mean and the unbiased standard deviation of their runs' rewards."""
    return {
        **spread("group_advantages/reward_mean", [statistics.fmean(group) for group in groups]),
        **spread("group_advantages/reward_std", [deviation(np.array(group)) for group in groups]),
    }


def numbered(keys: Sequence[Hashable]) -> Counts:
    """Return a number for each key, int64: equal for equal keys, ascending from 0 in the order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def deviation(values: Numbers, ddof: int = 1) -> float:
    """Return the standard deviation, unbiased unless ``ddof`` is 0. It is exactly 0 for fewer than two values and for
    equal values, although their computed mean may be off by rounding.
    """
    if len(values) < 2 or are_equal(values):
        return 0.0
    distances = values - np.add.reduce(values) / len(values)  # as np.std, at a third of its cost for a group
    return math.sqrt(np.add.reduce(distances * distances) / (len(values) - ddof))


def are_equal(values: Numbers) -> bool:
    """Return whether all numbers are equal."""
    if len(values) > FEW:
        return bool(values.min() == values.max())
    listed: list[float] = values.tolist()
    return listed.count(listed[0]) == len(listed)


def center(values: Numbers) -> Numbers:
    """Return the values minus their mean; exactly 0 for equal values."""
    if len(values) == 0 or are_equal(values):
        return np.zeros(len(values))
    mean: float = np.add.reduce(values) / len(values)
    return values - mean


def refuse(batch: ExperienceBatch, wrong: Flags, name: str, why: str) -> None:
    """Raise ValueError if ``wrong`` marks any experience; the message says that the first of them lacks the field
    ``name``.
    """
    if wrong.any():
        number = int(wrong.argmax())
        raise ValueError(
            f"experience {batch.ids('uid')[number]} ({batch.values('experience_type')[number]}) has no {name}, wanted "
            f"one per response token; {why}"
        )


def mask_lengths(batch: ExperienceBatch) -> Counts:
    """Return the number of response tokens of each experience, int64.

    Raises:
        ValueError: An experience has no action mask (dpo).
    """
    lengths = batch.lengths("action_mask")
    refuse(batch, lengths < 0, "action_mask", "advantages are for single_turn and multi_turn experiences")
    return lengths


def trained_tokens(batch: ExperienceBatch) -> Flags:
    """Return which response tokens the action mask selects: bool ``[response tokens of the batch]``.

    Raises:
        ValueError: An experience has no action mask (dpo).
    """
    mask_lengths(batch)
    return batch.dense("action_mask").bool().numpy() if len(batch) else np.zeros(0, dtype=np.bool_)


def response_field(batch: ExperienceBatch, name: str, required: Flags, maker: str) -> Tensor:
    """Return a field of all response tokens of the batch, float32 ``[tokens]``; 0 for experiences without the field.

    Args:
        batch: Experiences with action masks.
        name: Field with one value per response token.
        required: Experiences that must have the field.
        maker: End of the message: the origin of the field, or the reason why it is needed.

    Raises:
        ValueError: An experience in ``required`` lacks the field.
    """
    lengths = batch.lengths(name)
    refuse(batch, required & (lengths < 0), name, maker)
    masks = batch.lengths("action_mask")
    if len(batch) and (lengths == masks).all():
        return batch.dense(name).float()
    flat = torch.zeros(int(masks.sum()))
    if (lengths >= 0).any():
        flat[torch.from_numpy(np.repeat(lengths >= 0, masks))] = batch.dense(name).float()
    return flat


def with_scores(batch: ExperienceBatch, scores: Sequence[float], *, whitened: bool = False) -> ExperienceBatch:
    """Return the experiences with their scores as advantages: the score for tokens that the action mask selects, else
    0.

    Args:
        batch: Experiences with action masks.
        scores: Score of each experience.
        whitened: Whether to normalise the advantages of all trained tokens to mean 0 and variance 1.
    """
    if whitened:
        return with_advantages(batch, np.repeat(np.array(scores, dtype=np.float64), mask_lengths(batch)), whitened=True)
    if not len(batch):
        return batch
    bounded = np.clip(np.array(scores, dtype=np.float64), -LARGEST, LARGEST).astype(np.float32)
    flat = np.where(trained_tokens(batch), np.repeat(bounded, mask_lengths(batch)), np.float32(0))
    return batch.replace(advantages=per_token(batch, flat))


def with_advantages(batch: ExperienceBatch, flat: Numbers, *, whitened: bool = False) -> ExperienceBatch:
    """Return the experiences with the advantages ``flat``, float64 ``[response tokens of the batch]``, stored as
    float32; 0 where the action mask is False. ``whitened``: whiten ``flat`` over the trained tokens first.
    """
    if not len(batch):
        return batch
    trained = trained_tokens(batch)
    values = whiten(flat, trained) if whitened else np.where(trained, flat, 0.0) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return batch.replace(advantages=per_token(batch, values.clip(-LARGEST, LARGEST)))


def per_token(batch: ExperienceBatch, flat: npt.NDArray[np.floating[Any]]) -> Ragged:
    """Return numbers of all response tokens as a field of the batch, float32."""
    return Ragged.packed(torch.from_numpy(flat).float(), mask_lengths(batch))


def whiten(flat: Numbers, trained: Flags) -> Numbers:
    """Return the values normalised to mean 0 and unbiased variance 1 over the trained tokens, 0 elsewhere. If all
    trained values are equal, all results are 0. With the variance v the divisor is ``sqrt(v + 1e-8)`` (arXiv
    2501.03262).
    """
    values = center(flat[trained])
    result = np.zeros(len(flat))
    result[trained] = values / math.sqrt(deviation(values) ** 2 + WHITEN_EPSILON)
    return result
