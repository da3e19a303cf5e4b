"""The estimators of known algorithms."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_mq.config.estimators.sections import (
    DiscountedEstimator,
    DistillEstimator,
    Estimator,
    GaeEstimator,
    GigpoEstimator,
    GroupEstimator,
    JsdEstimator,
    NoEstimator,
)

ESTIMATOR_PRESETS: Mapping[str, Estimator] = {
    "grpo": GroupEstimator(epsilon=1e-4),  # arXiv 2402.03300
    "dr_grpo": GroupEstimator(scale="none"),  # arXiv 2503.20783
    "rloo": GroupEstimator(baseline="leave_one_out", scale="none"),  # arXiv 2402.14740
    "reinforce": GroupEstimator(baseline="none", scale="none"),
    "reinforceplusplus": DiscountedEstimator(),  # arXiv 2501.03262
    "reinforceplusplus_baseline": GroupEstimator(scale="none", whiten=True),  # arXiv 2501.03262 v3
    "remax": GroupEstimator(baseline="greedy", scale="none"),  # arXiv 2310.10505
    "opmd": GroupEstimator(scale="none"),
    "asymre": GroupEstimator(shift=-0.1, scale="none"),  # arXiv 2506.20520
    "rec": GroupEstimator(scale="none"),  # arXiv 2509.24203
    "max_rl": GroupEstimator(scale="mean"),  # arXiv 2602.02710
    "opo": GroupEstimator(baseline="length_weighted", scale="none"),  # arXiv 2505.23585
    "passk": GroupEstimator(baseline="second_best"),
    "gpg": GroupEstimator(scale="none", nonzero_scale=True),  # arXiv 2504.02546
    "rae": GroupEstimator(baseline="role_mean", scale="none"),  # arXiv 2506.24119
    "gigpo": GigpoEstimator(),  # arXiv 2505.10978
    "ppo": GaeEstimator(),  # arXiv 1707.06347
    "on_policy_distill": DistillEstimator(),  # arXiv 2306.13649
    "jsd": JsdEstimator(),  # arXiv 2306.13649
    "sft": NoEstimator(),
}
"""The estimator of each algorithm that has one of its own."""
