"""Advantage estimators: rewards of runs, or a teacher's logprobs, become a number per trained token."""

from trinity_mq.algorithms.estimators.registry import ESTIMATORS, estimate

__all__ = ["ESTIMATORS", "estimate"]
