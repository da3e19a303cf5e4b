"""The estimators of the registered algorithms, from their settings in the algorithm section."""

from __future__ import annotations

from trinity_mq.algorithms.estimators import estimate
from trinity_mq.config.algorithm import AlgorithmConfig
from trinity_mq.config.estimators import DistillEstimator, GroupEstimator
from trinity_mq.experience import ExperienceBatch


def group_relative_advantages(
    batch: ExperienceBatch, config: AlgorithmConfig
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Compare the rewards of a task's runs (:func:`trinity_mq.algorithms.estimators.group.group_advantages`)."""
    args = GroupEstimator(scale=config.std_level, epsilon=config.std_epsilon)
    return estimate(batch, args, min_group_runs=config.effective_min_group_runs)


def distillation_advantages(
    batch: ExperienceBatch, config: AlgorithmConfig
) -> tuple[ExperienceBatch, dict[str, float]]:
    """Follow a teacher (:func:`trinity_mq.algorithms.estimators.teacher.distillation_advantages`)."""
    return estimate(batch, DistillEstimator(kl_coef=config.kl_coef))
