"""Advantage estimators: compute a number per trained token from the rewards of runs, or from a teacher's logprobs."""

from trinity_mq.algorithms.estimators.registry import ESTIMATORS, estimate

__all__ = ["ESTIMATORS", "estimate"]
