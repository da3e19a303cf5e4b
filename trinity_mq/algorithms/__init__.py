"""Advantage estimators and losses: the path from rewards to a gradient. The package offers the class forms of
Trinity-RFT for your own losses, advantages, KL terms, entropy terms and whole algorithms, and helpers for such classes.
"""

from trinity_mq.algorithms.forms import (
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    AdvantageFn,
    AlgorithmType,
    EntropyLossFn,
    GroupAdvantage,
    KLFn,
    PolicyLossFn,
)
from trinity_mq.algorithms.masked import (
    aggregate_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    prefix_metrics,
)

__all__ = [
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "ENTROPY_LOSS_FN",
    "KL_FN",
    "POLICY_LOSS_FN",
    "AdvantageFn",
    "AlgorithmType",
    "EntropyLossFn",
    "GroupAdvantage",
    "KLFn",
    "PolicyLossFn",
    "aggregate_loss",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "prefix_metrics",
]
