"""Every algorithm there is, by the name that the configuration uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from trinity_mq.algorithms.advantage import group_relative_advantages
from trinity_mq.algorithms.distillation import distillation_advantages
from trinity_mq.algorithms.losses import LossTerms, clipped_policy_loss
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.experience.access import E

LossFunction = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], LossTerms]
"""Logprobs, old logprobs and advantages, each ``[tokens]``, in; a sum over tokens out."""


class AdvantageFunction(Protocol):
    """A batch in; what stays of it, in the same form, with ``advantages`` set, and metrics out."""

    def __call__(self, experiences: E, config: AlgorithmConfig) -> tuple[E, dict[str, float]]:
        """Return experiences with advantages, and metrics."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, complete."""

    name: str
    advantage: AdvantageFunction
    where: Literal["operator", "trainer"]
    """Who computes advantages: the trainer only if they need what a model of its own says of the tokens."""
    loss: LossFunction
    needs: frozenset[Literal["critic", "reference", "teacher"]]
    """Models beside the policy that the trainer holds."""
    schema: Literal["experience", "sft", "dpo"]
    """What a training example is."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        name="grpo",
        advantage=group_relative_advantages,
        where="operator",
        loss=clipped_policy_loss,
        needs=frozenset(),
        schema="experience",
    ),
    "on_policy_distill": Algorithm(
        name="on_policy_distill",
        advantage=distillation_advantages,
        where="operator",  # workflows bring the teacher's logprobs along
        loss=clipped_policy_loss,
        needs=frozenset(),
        schema="experience",
    ),
}
