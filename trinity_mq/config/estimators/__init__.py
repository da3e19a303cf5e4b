"""Estimators: how rewards, or a teacher's logprobs, become an advantage per response token."""

from trinity_mq.config.estimators.presets import ESTIMATOR_PRESETS
from trinity_mq.config.estimators.sections import (
    ACROSS_RUNS,
    KINDS,
    DiscountedEstimator,
    DistillEstimator,
    Estimator,
    EstimatorBase,
    EstimatorPlugin,
    GaeEstimator,
    GigpoEstimator,
    GroupEstimator,
    JsdEstimator,
    LengthPenaltyWeights,
    NoEstimator,
    Place,
)

__all__ = [
    "ACROSS_RUNS",
    "ESTIMATOR_PRESETS",
    "KINDS",
    "DiscountedEstimator",
    "DistillEstimator",
    "Estimator",
    "EstimatorBase",
    "EstimatorPlugin",
    "GaeEstimator",
    "GigpoEstimator",
    "GroupEstimator",
    "JsdEstimator",
    "LengthPenaltyWeights",
    "NoEstimator",
    "Place",
]
