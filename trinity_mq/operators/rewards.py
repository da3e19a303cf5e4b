"""Operators that change rewards: by statistics of the experiences, and by the length of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_mq.algorithms.estimators.runs import is_finite, spread
from trinity_mq.experience import ExperienceBatch
from trinity_mq.experience.rules import DPO
from trinity_mq.operators.base import ColumnOperator
from trinity_mq.rewards.math.rewards import check_lengths, overlong_penalty

_OPS = ("ADD", "SUB", "MUL", "DIV")


class RewardShaping(ColumnOperator):
    """Changes each reward by statistics of its experience, one after the other: ``reward op (weight * statistic)``.

    Args:
        reward_shaping_configs: Mappings, each with ``stats_key`` (a key of ``info``, else of ``metrics``), ``op_type``
            (``ADD``, ``SUB``, ``MUL`` or ``DIV``; ``ADD`` by default) and ``weight`` (1 by default).

    A change is skipped if the reward or the statistic is missing or not a finite number, or if it divides by 0.

    Raises:
        ValueError: A configuration does not have this form; raised by the constructor.
    """

    def __init__(self, reward_shaping_configs: Sequence[Any] = ()) -> None:
        self.changes = [_parse_change(number, change) for number, change in enumerate(reward_shaping_configs)]

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return all experiences, the number of changed rewards as ``shaped_count``, and the differences of the rewards
        as ``reward_diff_{mean,max,min}`` over the experiences with a finite reward.
        """
        rewards, infos, measured = (batch.values(name) for name in ("reward", "info", "metrics"))
        shaped = [
            self._shape(reward, {**(metrics or {}), **(info or {})}) if is_finite(reward) else reward
            for reward, info, metrics in zip(rewards, infos, measured, strict=True)
        ]
        return batch.replace(reward=shaped), _differences(rewards, shaped, "shaped_count")

    def _shape(self, reward: float, statistics: Mapping[str, Any]) -> float:
        for key, op, weight in self.changes:
            statistic = statistics.get(key)
            if not is_finite(statistic):
                continue
            term = weight * float(statistic)
            if op == "ADD":
                reward += term
            elif op == "SUB":
                reward -= term
            elif op == "MUL":
                reward *= term
            elif term:
                reward /= term
        return reward


class LengthPenalty(ColumnOperator):
    """Adds the soft overlong penalty of DAPO (:func:`trinity_mq.rewards.math.rewards.overlong_penalty`) to each reward.

    Args:
        max_response_length: Number of response tokens at which the penalty is full.
        cache_length: Number of tokens before ``max_response_length`` over which the penalty grows.
        penalty_factor: Size of the full penalty.

    An experience without a finite reward is unchanged. In dpo experiences the chosen response counts.

    Raises:
        ValueError: The lengths are invalid; raised by the constructor.
    """

    def __init__(self, max_response_length: int, cache_length: int, penalty_factor: float = 1.0) -> None:
        check_lengths(max_response_length, cache_length)
        self.max_response_length, self.cache_length = max_response_length, cache_length
        self.penalty_factor = penalty_factor

    def apply(self, batch: ExperienceBatch) -> tuple[ExperienceBatch, dict[str, Any]]:
        """Return all experiences, the number of changed rewards as ``penalized_count``, and the differences of the
        rewards as ``reward_diff_{mean,max,min}`` over the experiences with a finite reward.
        """
        rewards = batch.values("reward")
        shaped = [
            reward + self.penalty_factor * overlong_penalty(length, self.max_response_length, self.cache_length)
            if is_finite(reward)
            else reward
            for reward, length in zip(rewards, response_lengths(batch), strict=True)
        ]
        return batch.replace(reward=shaped), _differences(rewards, shaped, "penalized_count")


def response_lengths(batch: ExperienceBatch) -> list[int]:
    """Return the number of response tokens of each experience; for dpo the tokens of the chosen response."""
    masks = batch.lengths("action_mask")
    plain = np.where(masks >= 0, masks, batch.lengths("tokens") - batch.prompt_lengths())
    kinds = np.array([kind == DPO for kind in batch.values("experience_type")], dtype=np.bool_)
    lengths: list[int] = np.where(kinds, batch.lengths("chosen"), plain).tolist()
    return lengths


def _differences(before: Sequence[Any], after: Sequence[Any], count: str) -> dict[str, float]:
    changes = [new - old for old, new in zip(before, after, strict=True) if is_finite(old)]
    statistics = spread("reward_diff", list(filter(is_finite, changes)))
    return {
        count: float(sum(change != 0 for change in changes)),
        **{name.replace("/", "_"): value for name, value in statistics.items()},
    }


def _parse_change(number: int, change: Any) -> tuple[str, str, float]:
    match change:
        case {"stats_key": str(key), **rest} if rest.keys() <= {"op_type", "weight"}:
            op, weight = rest.get("op_type", "ADD"), rest.get("weight", 1.0)
            if op in _OPS and is_finite(weight):
                return key, op, float(weight)
    raise ValueError(
        f"reward_shaping_configs[{number}] is {change!r}, wanted stats_key, and optionally op_type "
        f"({', '.join(_OPS)}) and a number as weight"
    )
