"""Registry of the algorithms by their names in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trinity_mq.algorithms.advantage import distillation_advantages, group_relative_advantages
from trinity_mq.algorithms.losses import LossTerms, clipped_policy_loss
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.experience import ExperienceBatch

LossFunction = Callable[..., LossTerms]
"""Takes logprobs, old logprobs and advantages, each float32 ``[tokens]``, and the AlgorithmConfig; returns sums over
tokens. Further parameters are custom fields by their destination, ``[tokens, ...]`` each."""


AdvantageFunction = Callable[[ExperienceBatch, AlgorithmConfig], tuple[ExperienceBatch, dict[str, float]]]
"""Returns the experiences that stay of a batch, with ``advantages``, and metrics."""


@dataclass(frozen=True)
class Algorithm:
    """Advantages, computed by operators, and the loss, computed by the trainer."""

    advantage: AdvantageFunction
    loss: LossFunction
    needs_reward: bool = True
    """Runs without a reward are dropped."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(group_relative_advantages, clipped_policy_loss),
    "on_policy_distill": Algorithm(distillation_advantages, clipped_policy_loss, needs_reward=False),
}
"""Algorithms by the name in the configuration."""
