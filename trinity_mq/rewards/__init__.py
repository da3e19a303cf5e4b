"""Reward functions: what a response is worth, one file each, pure."""

from trinity_mq.rewards.registry import ACCURACY, REWARDS, RewardError, RewardFn, counts_tokens, create_reward, parts_of
from trinity_mq.runtime.plugins import UnknownNameError

__all__ = [
    "ACCURACY",
    "REWARDS",
    "RewardError",
    "RewardFn",
    "UnknownNameError",
    "counts_tokens",
    "create_reward",
    "parts_of",
]
